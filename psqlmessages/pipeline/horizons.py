"""Horizons: up to where topics can be read, as messages.stream_horizons answers it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psqlmessages.pipeline import literals
from psqlmessages.pipeline.database import Database

_ASK: Final = "SELECT messages.stream_horizons(%s, %s::text[], %s::json, %s::int)"


@dataclass(frozen=True)
class Topic:
    """A topic's ids: of the newest removed (0: none), of all that is settled, of the newest."""

    name: str
    removed: int
    horizon: int
    newest: int

    @property
    def last(self) -> int:
        """The highest id that is known of it, be that message kept or removed; 0: none."""
        return max(self.newest, self.removed)


@dataclass(frozen=True)
class Horizons:
    """What a call answers: the cluster it was asked of, and the topics there."""

    cluster: str
    topics: Mapping[str, Topic]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Horizons:
        """Read an answer."""
        found = (
            Topic(str(t["Topic"]), int(t["Removed"]), int(t["Horizon"]), int(t["Newest"]))
            for t in answer["Topics"]
        )
        return cls(str(answer["Cluster"]), {topic.name: topic for topic in found})


def ask(
    database: Database,
    client: str,
    topics: Sequence[str],
    after: Mapping[str, int] | None = None,
    max_rows: int | None = None,
) -> Horizons:
    """Ask for horizons, lowered so that at most ``max_rows`` messages lie after positions."""
    positions = None if after is None else json.dumps(dict(after))
    return Horizons.of(database.ask(_ASK, (client, list(topics), positions, max_rows)))


def statement(client: str, topics: Sequence[str]) -> str:
    """Return the call as SQL text, which answers JSON as text."""
    names = ", ".join(literals.text(name) for name in topics)
    return f"SELECT messages.stream_horizons({literals.text(client)}, ARRAY[{names}]::text[])::text"
