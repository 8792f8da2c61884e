"""Positions in topics: offsets of checkpoints, watermarks, and lag."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.pipeline import literals
from psqlmessages.pipeline.database import NO_RETRY, Database
from psqlmessages.pipeline.errors import CheckpointRefused, MessagesGone

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class Offset:
    """Positions in topics (topic → id of the last message read), and the database's identity."""

    cluster: str
    positions: Mapping[str, int]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Offset:
        """Parse an offset of a checkpoint."""
        return cls(str(value["cluster"]), {str(t): int(p) for t, p in value["positions"].items()})

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form, ordered by topic: Spark compares offsets as text."""
        return {"cluster": self.cluster, "positions": dict(sorted(self.positions.items()))}


def check_cluster(checkpoint_cluster: str, cluster: str) -> None:
    """Raise CheckpointRefused if a checkpoint belongs to another database than this one."""
    if checkpoint_cluster != cluster:
        raise CheckpointRefused(
            f"the checkpoint belongs to the database {checkpoint_cluster}, but this is {cluster}"
            " (cluster/database), where other messages have these ids. Connect to the checkpoint's"
            " database, or start with a new checkpoint"
        )


def check_not_restored(offset: Offset, topics: Mapping[str, TopicWatermark]) -> None:
    """Raise CheckpointRefused if the last id of a topic is below the checkpoint's position.

    Ids only grow, so the database must have been restored to an earlier state.
    """
    for topic in topics.values():
        last, position = max(topic.newest, topic.removed), offset.positions.get(topic.name, 0)
        if 0 < last < position:
            raise CheckpointRefused(
                f"topic {topic.name}: this query has read up to {position}, but the last message"
                f" is {last}: the database was restored to an earlier state, and new messages"
                " reuse ids that were read already. Start with a new checkpoint"
            )


def topic_gone_error(topic: str, position: int) -> MessagesGone:
    """Return the error for a topic that was removed, or lost its rule, before it was read."""
    return MessagesGone(
        f"topic {topic} was removed, or no rule allows reading it: this query loses the messages"
        f" after {position}. Set failOnDataLoss=false to continue without them"
    )


def messages_gone_error(topic: str, position: int, removed: int, timeout: int) -> MessagesGone:
    """Return the error for messages after ``position`` that were removed before they were read."""
    return MessagesGone(
        f"topic {topic}: this query has read up to {position}, but messages up to {removed} were"
        f" removed: the query loses at most {removed - position} messages. Set failOnDataLoss=false"
        " to continue with the stored messages, or start with a new checkpoint. A longer timeout"
        f" (now {timeout} s) or a retention of the topic keeps messages for a stopped query"
    )


_STREAM_HORIZONS: Final = "SELECT messages.stream_horizons(%s, %s::text[], %s::json, %s::int)"


@dataclass(frozen=True)
class TopicWatermark:
    """Ids of a topic. Messages up to ``watermark`` are committed or rolled back, and can be read.

    ``removed`` is the id of the last removed message; 0 if no message was removed. ``newest`` is
    the id of the newest visible message; without a message, it equals ``removed``.
    """

    name: str
    removed: int
    watermark: int
    newest: int


@dataclass(frozen=True)
class Watermarks:
    """The result of the SQL function stream_horizons; ``cluster`` identifies the database."""

    cluster: str
    topics: Mapping[str, TopicWatermark]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Watermarks:
        """Parse the JSON result."""
        topics = {
            t["Topic"]: TopicWatermark(t["Topic"], t["Removed"], t["Horizon"], t["Newest"])
            for t in answer["Topics"]
        }
        return cls(answer["Cluster"], topics)


def read_watermarks(
    database: Database,
    client: str,
    topics: Sequence[str],
    after: Mapping[str, int] | None = None,
    max_rows: int | None = None,
) -> Watermarks:
    """Query up to which id each topic can be read; ``topics`` are names and patterns.

    ``after`` has the reader's positions. ``max_rows`` lowers the watermarks, so that at most this
    number of messages is between the positions and the watermarks, in all topics together.
    """
    positions = None if after is None else json.dumps(dict(after))
    arguments = (client, list(topics), positions, max_rows)
    return Watermarks.of(database.call(_STREAM_HORIZONS, arguments))


def watermarks_sql(client: str, topics: Sequence[str]) -> str:
    """Return the query of the watermarks as SQL without parameters; the SQL returns JSON text."""
    names = ", ".join(literals.text(name) for name in topics)
    return f"SELECT messages.stream_horizons({literals.text(client)}, ARRAY[{names}]::text[])::text"


_OLDEST_AGE: Final = """
    SELECT max(extract(epoch FROM clock_timestamp() - f.published_at))
    FROM unnest(%s::text[], %s::bigint[], %s::bigint[]) AS w (topic, position, newest)
    CROSS JOIN LATERAL (
        SELECT s.published_at
        FROM messages.read_stream(%s, w.topic, w.position, w.newest, 1, false) AS s
    ) AS f
"""


class Lag:
    """Measures the lag of a query that reads topics; has a database connection for this."""

    def __init__(self, query: StreamingQuery, client: str, topics: Sequence[str]) -> None:
        self._query = query
        self._client = client
        self._topics = topics
        self._database = Database({}, NO_RETRY)

    def __call__(self) -> float | None:
        """Return the age in seconds of the oldest unread message; 0.0 if there is none.

        Returns None until the query has finished a batch: before that, its position is unknown.
        Raises psycopg.Error or MessagesError, for instance ServerUnreachable.
        """
        progress = self._query.lastProgress
        offset: Any = progress.sources[0].endOffset if progress is not None else None
        if isinstance(offset, str):
            offset = json.loads(offset)
        if not offset:
            return None
        positions = offset["positions"]
        unread = [
            (topic.name, positions.get(topic.name, topic.removed), topic.newest)
            for topic in read_watermarks(self._database, self._client, self._topics).topics.values()
            if topic.newest > positions.get(topic.name, topic.removed)
        ]
        if not unread:
            return 0.0
        columns = map(list, zip(*unread, strict=True))
        ((seconds,),) = self._database.fetch_rows(_OLDEST_AGE, [*columns, self._client])
        return max(float(seconds or 0), 0.0)

    def close(self) -> None:
        """Close the connection."""
        self._database.close()
