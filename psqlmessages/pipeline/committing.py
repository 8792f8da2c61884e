"""Committing: staged rows enter a topic or queue in one call, once for each batch of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.staging import MOST_KEPT

# For so long a right that was found is believed: the commit itself looks again.
BELIEVED_SECONDS: Final = 60.0

_PUBLISH: Final = "SELECT messages.publish_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_PUSH: Final = "SELECT messages.push_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_UNSTAGE: Final = "SELECT messages.unstage(VARIADIC %s::text[])"


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
_kept: dict[str, Database] = {}
_believed: dict[tuple[str, Destination], float] = {}


class Desk:
    """Calls the functions that check, commit and throw away, on a connection that is kept.

    Each call waits for a database that is away, in whatever process it is made.
    """

    def __init__(self, options: Mapping[str, str], destination: Destination) -> None:
        self.destination = destination
        self._options = options
        self._address = connectable(dsn(options))

    def check(self) -> None:
        """Refuse what the rules do not allow, before anything is staged; raises MessagesError."""
        believed = (self._address, self.destination)
        if monotonic() - _believed.get(believed, float("-inf")) < BELIEVED_SECONDS:
            return
        self._database.ask(self._statement, self._arguments(None))
        self._database.note_reached()
        _believed[believed] = monotonic()

    def commit(self, batch: Batch) -> None:
        """Put a batch in; if that was done before, only throw its rows away.

        A connection that breaks leaves the outcome unknown: the call is made again, for as long as
        a database may be away, and does nothing if the first one did it. Raises MessagesError.
        """
        self._database.ask(self._statement, self._arguments(batch))

    def unstage(self, stagings: Sequence[str]) -> None:
        """Throw staged rows away. What cannot be now goes after a day, by itself."""
        if stagings:
            self._database.ask(_UNSTAGE, (list(stagings),))

    @property
    def _statement(self) -> str:
        return _PUSH if self.destination.is_queue else _PUBLISH

    def _arguments(self, batch: Batch | None) -> tuple[Any, ...]:
        names = (self.destination.client, self.destination.name)
        if batch is None:
            return (*names, None, 0, [], 0)
        return (*names, batch.query, batch.number, list(batch.stagings), batch.rows)

    @property
    def _database(self) -> Database:
        if self._address not in _kept:
            if len(_kept) >= MOST_KEPT:
                _disconnect()
            _kept[self._address] = Database(self._options)
        return _kept[self._address]


def close() -> None:
    """Close the connections that this process keeps, and believe nothing any more."""
    _believed.clear()
    _disconnect()


def _disconnect() -> None:
    while _kept:
        _, database = _kept.popitem()
        database.close()
