"""Cache of ADBC connections; translates driver errors to exceptions of psqlmessages."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import adbc_driver_manager
from adbc_driver_postgresql import dbapi

from psqlmessages.exceptions import ConnectionLost, error_for
from psqlmessages.pipeline.database import CONFLICTS, connection_error, record_reached_address
from psqlmessages.pipeline.errors import ReusedConnectionLost

MAX_CONNECTIONS: Final = 4

DriverError = adbc_driver_manager.Error


class ArrowConnections:
    """Caches one connection per process and address, because connecting takes 40 ms.

    A process with MAX_CONNECTIONS connections closes all of them before it opens another.
    """

    def __init__(self) -> None:
        self._connections: dict[tuple[int, str], dbapi.Connection] = {}
        self._reused: set[tuple[int, str]] = set()

    def get(self, address: str) -> dbapi.Connection:
        """Return the cached connection, or open one; raises ConnectionLost or LoginRefused."""
        key = (os.getpid(), address)
        if key in self._connections:
            self._reused.add(key)
            return self._connections[key]
        if is_full(self._connections):
            self.close()
        try:
            self._connections[key] = dbapi.connect(address, autocommit=True)
        except DriverError as error:
            raise connection_error(str(error)) from None
        record_reached_address(address)
        return self._connections[key]

    def drop_and_translate(self, address: str, error: DriverError) -> Exception:
        """Drop the connection that raised ``error``; return the exception to raise.

        Returns ConnectionLost, an error of CONFLICTS, the MessagesError of an SQL function, or else
        ``error``.
        """
        is_reused = (os.getpid(), address) in self._reused
        self.drop(address)
        state, text = error.sqlstate or "", error_text(error)
        # The SQL functions raise error 1 with the SQLSTATE PM001.
        if state.startswith("PM") and state[2:].isdecimal():
            return error_for(int(state[2:]), text)
        if conflict := next((each for each in CONFLICTS if each.sqlstate == state), None):
            return conflict(text)
        # 08: a connection exception. 57P: the server or the session was shut down.
        is_io_error = error.status_code == adbc_driver_manager.AdbcStatusCode.IO
        if state.startswith(("08", "57P")) or (is_io_error and not state):
            return ReusedConnectionLost(text) if is_reused else ConnectionLost(text)
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


def is_full(cache: Iterable[tuple[int, str]]) -> bool:
    """Return whether this process has MAX_CONNECTIONS entries in a cache.

    The keys of the cache are process ids and addresses. A forked process has a copy of the cache,
    but must not use or close the copied connections.
    """
    return sum(pid == os.getpid() for pid, _ in cache) >= MAX_CONNECTIONS


def error_text(error: DriverError) -> str:
    """Return PostgreSQL's message in a driver error; if there is none, the error's first line."""
    line = str(error).strip().partition("\n")[0]
    return (line.partition("ERROR:")[2] or line).strip()
