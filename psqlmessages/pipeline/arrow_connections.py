"""Cache of ADBC connections, and translation of their errors."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import adbc_driver_manager
from adbc_driver_postgresql import dbapi

from psqlmessages.exceptions import ConnectionLost, error_for
from psqlmessages.pipeline.database import not_connected, note_reached
from psqlmessages.pipeline.errors import KeptConnectionLost

MOST_KEPT: Final = 4

DriverError = adbc_driver_manager.Error


class ArrowConnections:
    """Caches one connection per process and address: connecting takes 40 ms."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], dbapi.Connection] = {}
        self._used: set[tuple[int, str]] = set()

    def get(self, address: str) -> dbapi.Connection:
        """Return the cached connection, or a new one; raises ConnectionLost or LoginRefused."""
        key = (os.getpid(), address)
        if key in self._kept:
            self._used.add(key)
            return self._kept[key]
        if len(self._kept) >= MOST_KEPT:
            self.close()
        try:
            self._kept[key] = dbapi.connect(address, autocommit=True)
        except DriverError as error:
            raise not_connected(str(error)) from None
        note_reached(address)
        return self._kept[key]

    def failed(self, address: str, error: DriverError) -> Exception:
        """Drop the connection that raised an error; return the translated error."""
        is_kept = (os.getpid(), address) in self._used
        self.drop(address)
        state, text = error.sqlstate or "", sentence(error)
        if state.startswith("PM") and state[2:].isdecimal():
            return error_for(int(state[2:]), text)
        is_io = error.status_code == adbc_driver_manager.AdbcStatusCode.IO
        if state[:2] != "08" and state[:3] != "57P" and (state or not is_io):
            return error
        return KeptConnectionLost(text) if is_kept else ConnectionLost(text)

    def failed_amid(self, address: str, error: OSError) -> Exception:
        """Drop the connection; return ConnectionLost if it broke, otherwise the error."""
        connection = self._kept.get((os.getpid(), address))
        try:
            if connection is not None:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
                    cursor.fetchall()
        except DriverError as answer:
            found = self.failed(address, answer)
            return found if isinstance(found, ConnectionLost) else error
        self.drop(address)
        return error

    def drop(self, address: str) -> None:
        """Close the connection to an address."""
        key = (os.getpid(), address)
        self._used.discard(key)
        connection = self._kept.pop(key, None)
        if connection is not None:
            with suppress(DriverError):
                connection.close()

    def close(self) -> None:
        """Close all of them; the next call connects again."""
        for _, address in list(self._kept):
            self.drop(address)


def sentence(error: DriverError) -> str:
    """Return the first line of the driver's text, which ends with PostgreSQL's message."""
    return str(error).strip().partition("\n")[0]
