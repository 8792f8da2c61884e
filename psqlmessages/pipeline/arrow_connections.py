"""Cache of ADBC connections; translates driver errors to exceptions of psqlmessages."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import adbc_driver_manager
from adbc_driver_postgresql import dbapi

from psqlmessages.exceptions import ConnectionLost, error_for
from psqlmessages.pipeline.database import connection_error, record_reached_address
from psqlmessages.pipeline.errors import ReusedConnectionLost

MAX_CONNECTIONS: Final = 4

DriverError = adbc_driver_manager.Error


class ArrowConnections:
    """Caches one connection per process and address: connecting takes 40 ms."""

    def __init__(self) -> None:
        self._connections: dict[tuple[int, str], dbapi.Connection] = {}
        self._reused: set[tuple[int, str]] = set()

    def get(self, address: str) -> dbapi.Connection:
        """Return the cached connection, or open one; raises ConnectionLost or LoginRefused."""
        key = (os.getpid(), address)
        if key in self._connections:
            self._reused.add(key)
            return self._connections[key]
        if len(self._connections) >= MAX_CONNECTIONS:
            self.close()
        try:
            self._connections[key] = dbapi.connect(address, autocommit=True)
        except DriverError as error:
            raise connection_error(str(error)) from None
        record_reached_address(address)
        return self._connections[key]

    def drop_and_translate(self, address: str, error: DriverError) -> Exception:
        """Drop the connection that raised ``error``; return the exception to raise.

        Returns a ConnectionLost, the MessagesError of an SQL function, or else ``error``.
        """
        is_reused = (os.getpid(), address) in self._reused
        self.drop(address)
        state, text = error.sqlstate or "", first_line(error)
        # The SQL functions raise error 1 with the SQLSTATE PM001.
        if state.startswith("PM") and state[2:].isdecimal():
            return error_for(int(state[2:]), text)
        if state:
            # A connection exception, or the shutdown of the server or session.
            is_lost = state.startswith(("08", "57P"))
        else:
            is_lost = error.status_code == adbc_driver_manager.AdbcStatusCode.IO
        if not is_lost:
            return error
        return ReusedConnectionLost(text) if is_reused else ConnectionLost(text)

    def probe_and_drop(self, address: str, error: OSError) -> Exception:
        """Drop the connection on which a read raised ``error``; return the exception to raise.

        Returns a ConnectionLost if a probe query finds that the connection is lost, else ``error``.
        """
        connection = self._connections.get((os.getpid(), address))
        try:
            if connection is not None:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
                    cursor.fetchall()
        except DriverError as probe_error:
            translated = self.drop_and_translate(address, probe_error)
            return translated if isinstance(translated, ConnectionLost) else error
        self.drop(address)
        return error

    def drop(self, address: str) -> None:
        """Close this process's connection to an address, if there is one."""
        key = (os.getpid(), address)
        self._reused.discard(key)
        connection = self._connections.pop(key, None)
        if connection is not None:
            with suppress(DriverError):
                connection.close()

    def close(self) -> None:
        """Close the connections of this process; `get` opens new ones."""
        for _, address in list(self._connections):
            self.drop(address)


def first_line(error: DriverError) -> str:
    """Return the first line of a driver error, which ends with PostgreSQL's message."""
    return str(error).strip().partition("\n")[0]
