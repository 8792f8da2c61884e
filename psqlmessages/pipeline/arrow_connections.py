"""Cache of ADBC connections, and translation of their errors."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import adbc_driver_manager
from adbc_driver_postgresql import dbapi

from psqlmessages.exceptions import ConnectionLost, error_for
from psqlmessages.pipeline.database import connection_error, record_reached
from psqlmessages.pipeline.errors import CachedConnectionLost

MAX_CONNECTIONS: Final = 4

DriverError = adbc_driver_manager.Error


class ArrowConnections:
    """Caches one connection per process and address: connecting takes 40 ms."""

    def __init__(self) -> None:
        self._connections: dict[tuple[int, str], dbapi.Connection] = {}
        self._reused: set[tuple[int, str]] = set()

    def get(self, address: str) -> dbapi.Connection:
        """Return the cached connection, or a new one; raises ConnectionLost or LoginRefused."""
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
        record_reached(address)
        return self._connections[key]

    def drop_failed(self, address: str, error: DriverError) -> Exception:
        """Drop the connection that raised an error; return the error as one of ours."""
        is_reused = (os.getpid(), address) in self._reused
        self.drop(address)
        state, text = error.sqlstate or "", first_line(error)
        if state.startswith("PM") and state[2:].isdecimal():
            return error_for(int(state[2:]), text)
        is_io = error.status_code == adbc_driver_manager.AdbcStatusCode.IO
        if not state.startswith(("08", "57P")) and (state or not is_io):
            return error
        return CachedConnectionLost(text) if is_reused else ConnectionLost(text)

    def drop_failed_read(self, address: str, error: OSError) -> Exception:
        """Drop the connection that raised ``error``; return ConnectionLost if it is broken."""
        connection = self._connections.get((os.getpid(), address))
        try:
            if connection is not None:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
                    cursor.fetchall()
        except DriverError as probe_error:
            translated = self.drop_failed(address, probe_error)
            return translated if isinstance(translated, ConnectionLost) else error
        self.drop(address)
        return error

    def drop(self, address: str) -> None:
        """Close the connection to an address."""
        key = (os.getpid(), address)
        self._reused.discard(key)
        connection = self._connections.pop(key, None)
        if connection is not None:
            with suppress(DriverError):
                connection.close()

    def close(self) -> None:
        """Close all connections; the next call reconnects."""
        for _, address in list(self._connections):
            self.drop(address)


def first_line(error: DriverError) -> str:
    """Return the first line of a driver error: it ends with PostgreSQL's message."""
    return str(error).strip().partition("\n")[0]
