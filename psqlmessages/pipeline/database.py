"""Database: single statements by psycopg, on a connection that comes back after a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import psycopg

from psqlmessages.client import calls
from psqlmessages.client.connections import is_broken
from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.pipeline.connecting import connected, note_reached, patience_with
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.errors import KeptConnectionLost
from psqlmessages.pipeline.waiting import PATIENCE, Waiting

Parameters = Sequence[Any]


class Database:
    """Runs statements one by one, in autocommit; threads may share it.

    A statement whose connection breaks is run again, so it may be executed twice. A database that
    this machine never reached is an error immediately; for another one it waits ``patience``.
    """

    def __init__(self, address: Mapping[str, str], patience: timedelta = PATIENCE) -> None:
        self._address = address
        self._patience = patience
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._closings = 0

    def ask(self, sql: str, parameters: Parameters = ()) -> dict[str, Any]:
        """Call a function that answers JSON; raises the error of its number."""
        ((answer,),) = self.rows(sql, parameters)
        return calls.checked(json.loads(answer) if isinstance(answer, str) else answer)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """Run a query; its rows."""
        address = connectable(dsn(self._address))
        with self._lock:
            waiting = Waiting(min(self._patience, patience_with(address)))
            closings = self._closings

            def attempt() -> list[tuple[Any, ...]]:
                # Another thread has ended the query: this thread must not connect again.
                if closings != self._closings:
                    raise ServerUnreachable("the connection was closed while it was in use")
                return self._run(sql, parameters)

            return waiting.call(attempt)

    def note_reached(self) -> None:
        """Store again that this database was reached: old temporary files may be cleaned up."""
        note_reached(connectable(dsn(self._address)))

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        self._closings += 1
        self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        is_kept = self._connection is not None
        if self._connection is None:
            self._connection = connected(connectable(dsn(self._address)))
        connection = self._connection
        try:
            return connection.execute(sql.encode(), parameters or None).fetchall()
        except psycopg.Error as error:
            is_lost = is_broken(connection, error)
            if is_lost:
                self._drop()
            if is_lost and is_kept:
                raise KeptConnectionLost(str(error).strip()) from None
            raise calls.error_of(error, is_broken=is_lost) from error
