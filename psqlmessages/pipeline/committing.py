"""Committing: staged rows enter a topic or queue in one call, once for each batch of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import psycopg
from psycopg import errors

from psqlmessages.client.calls import checked, error_of
from psqlmessages.client.connections import is_broken
from psqlmessages.exceptions import ConnectionLost, ServerUnreachable
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.staging import MOST_KEPT
from psqlmessages.pipeline.waiting import NO_PATIENCE, PATIENCE, Waiting

# For so long a right that was found is believed: the commit itself looks again.
BELIEVED_SECONDS: Final = 60.0

RETRIED: Final = (
    ConnectionLost,
    ServerUnreachable,
    errors.DeadlockDetected,
    errors.SerializationFailure,
)

_PUBLISH: Final = "SELECT messages.publish_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_PUSH: Final = "SELECT messages.push_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_UNSTAGE: Final = "SELECT messages.unstage(VARIADIC %s::text[])"

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where rows go, and as whom: a topic or queue by name, and the node that writes."""

    name: str
    is_queue: bool
    client: str

    @property
    def kind(self) -> str:
        """The word for it."""
        return "queue" if self.is_queue else "topic"


@dataclass(frozen=True, slots=True)
class Batch:
    """What is committed once: a query's batch, and where its rows are staged, in their order."""

    query: str
    number: int
    stagings: tuple[str, ...]
    rows: int


# As with staging: Spark's planning processes are used again too.
_kept: dict[str, Connection] = {}
_believed: dict[tuple[str, Destination], float] = {}


class Desk:
    """Calls the functions that check, commit and throw away, on a connection that is kept."""

    def __init__(self, options: Mapping[str, str], destination: Destination) -> None:
        self.destination = destination
        self._address = connectable(dsn(options))

    def check(self) -> None:
        """Refuse what the rules do not allow, before anything is staged; raises MessagesError."""
        believed = (self._address, self.destination)
        if monotonic() - _believed.get(believed, float("-inf")) < BELIEVED_SECONDS:
            return
        # A wrong address is told at once; a database that was there before is waited for.
        is_known = any(address == self._address for address, _ in _believed)
        self._call(self._statement, self._arguments(None), PATIENCE if is_known else NO_PATIENCE)
        _believed[believed] = monotonic()

    def commit(self, batch: Batch) -> None:
        """Put a batch in; where that was done before, only its rows are thrown away.

        A connection that breaks leaves the outcome unknown: the call is made again, for as long as
        a database may be away, and does nothing where the first one did it. Raises MessagesError.
        """
        self._call(self._statement, self._arguments(batch))

    def unstage(self, stagings: Sequence[str]) -> None:
        """Throw staged rows away. What cannot be now goes after a day, by itself."""
        if stagings:
            self._call(_UNSTAGE, (list(stagings),))

    @property
    def _statement(self) -> str:
        return _PUSH if self.destination.is_queue else _PUBLISH

    def _arguments(self, batch: Batch | None) -> tuple[Any, ...]:
        names = (self.destination.client, self.destination.name)
        if batch is None:
            return (*names, None, 0, [], 0)
        return (*names, batch.query, batch.number, list(batch.stagings), batch.rows)

    def _call(
        self, statement: str, arguments: tuple[Any, ...], patience: timedelta = PATIENCE
    ) -> dict[str, Any]:
        waiting = Waiting(patience)
        while True:
            was_kept = self._address in _kept
            try:
                answer = self._try(statement, arguments)
            except RETRIED as error:
                # Kept from an earlier batch, a connection may be gone long ago: that is no failure.
                if not (was_kept and isinstance(error, ConnectionLost)):
                    waiting.after(error)
            else:
                waiting.over()
                return answer

    def _try(self, statement: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        connection = self._connected()
        try:
            row = connection.execute(statement, arguments).fetchone()
        except psycopg.Error as error:
            broken = is_broken(connection, error)
            if broken:
                connection.close()
                del _kept[self._address]
            known = error_of(error, is_broken=broken)
            if known is error:
                raise
            raise known from error
        return checked(row and row[0])

    def _connected(self) -> Connection:
        connection = _kept.get(self._address)
        if connection is None or connection.closed:
            if len(_kept) >= MOST_KEPT:
                close()
            try:
                connection = psycopg.connect(self._address, autocommit=True)
            except psycopg.OperationalError as error:
                raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
            _kept[self._address] = connection
        return connection


def close() -> None:
    """Close the connections that this process keeps, and believe nothing any more."""
    _believed.clear()
    while _kept:
        _, connection = _kept.popitem()
        connection.close()
