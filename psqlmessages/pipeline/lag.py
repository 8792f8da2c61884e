"""Lag: how long the oldest message waits that a query has not read yet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.pipeline import horizons
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.waiting import NO_PATIENCE

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_WAITING: Final = """
    SELECT max(extract(epoch FROM clock_timestamp() - f.published_at))
    FROM unnest(%s::text[], %s::bigint[], %s::bigint[]) AS w (topic, position, newest)
    CROSS JOIN LATERAL (
        SELECT s.published_at
        FROM messages.read_stream(%s, w.topic, w.position, w.newest, 1, false) AS s
    ) AS f
"""


class Lag:
    """Tells the lag of a query that reads topics; one connection, kept between the calls."""

    def __init__(self, query: StreamingQuery, client: str, topics: Sequence[str]) -> None:
        self._query = query
        self._client = client
        self._topics = topics
        self._database = Database({}, NO_PATIENCE)

    def __call__(self) -> float | None:
        """Return the age in seconds of the oldest message not read yet; 0.0: all are read.

        None before the query has ended a batch: how far it has come is not known then. Raises
        ServerUnreachable where the database is away, and MessagesError where a right is missing.
        """
        read = self._positions()
        return None if read is None else self._ask(read)

    def close(self) -> None:
        """Disconnect."""
        self._database.close()

    def _positions(self) -> Mapping[str, int] | None:
        progress = self._query.lastProgress
        offset: Any = progress.sources[0].endOffset if progress is not None else None
        if isinstance(offset, str):
            offset = json.loads(offset)
        return offset["positions"] if offset else None

    def _ask(self, read: Mapping[str, int]) -> float:
        behind = [
            (topic.name, read.get(topic.name, topic.removed), topic.newest)
            for topic in horizons.ask(self._database, self._client, self._topics).topics.values()
            if topic.newest > read.get(topic.name, topic.removed)
        ]
        if not behind:
            return 0.0
        columns = [list(column) for column in zip(*behind, strict=True)]
        ((seconds,),) = self._database.rows(_WAITING, [*columns, self._client])
        return max(float(seconds or 0), 0.0)
