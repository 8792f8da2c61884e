"""Database: the driver's connection, which comes back after the database was away."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import psycopg

from psqlmessages.client import calls
from psqlmessages.client.connections import is_broken
from psqlmessages.exceptions import ConnectionLost, ServerUnreachable
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.waiting import PATIENCE, Waiting

Parameters = Sequence[Any]


class Database:
    """Runs statements one by one, in autocommit; threads may share it.

    What breaks off is asked again: a statement may have been done twice. The first connection is
    tried once, so that a wrong address is told at once; later ones for ``patience``.
    """

    def __init__(self, address: Mapping[str, str], patience: timedelta = PATIENCE) -> None:
        self._address = address
        self._patience = patience
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._was_connected = False

    def ask(self, sql: str, parameters: Parameters = ()) -> dict[str, Any]:
        """Call a function that answers JSON; raises the error of its number."""
        ((answer,),) = self.rows(sql, parameters)
        return calls.checked(json.loads(answer) if isinstance(answer, str) else answer)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """Run a query; its rows."""
        with self._lock:
            waiting = Waiting(self._patience)
            while True:
                try:
                    rows = self._run(sql, parameters)
                except ConnectionLost as error:
                    waiting.after(error.text)
                else:
                    waiting.over()
                    return rows

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        connection = self._connected()
        try:
            return connection.execute(sql.encode(), parameters or None).fetchall()
        except psycopg.Error as error:
            is_lost = is_broken(connection, error)
            if is_lost:
                self.close()
            raise calls.error_of(error, is_broken=is_lost) from error

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            try:
                self._connection = psycopg.connect(connectable(dsn(self._address)), autocommit=True)
            except psycopg.OperationalError as error:
                if self._was_connected:
                    raise ConnectionLost(str(error)) from None
                raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from None
            self._was_connected = True
        return self._connection
