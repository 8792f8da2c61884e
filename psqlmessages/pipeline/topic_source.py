"""Source of topics, for batch and streaming reads: each message exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, offsets, reader, topic_ranges
from psqlmessages.pipeline.columns import Condition, bounded, condition, topics_left
from psqlmessages.pipeline.database import Database, KeepAliveThread, logger
from psqlmessages.pipeline.errors import MessagesGone, ReadBroken
from psqlmessages.pipeline.offsets import Offset, TopicWatermark, Watermarks
from psqlmessages.pipeline.source_options import LATEST, SourceOptions
from psqlmessages.pipeline.topic_ranges import IdRange, StreamCalls, WeightedRange

# Batch reads of topics: all stored messages, in partitions of about equal size.


class TopicBatchReader(DataSourceReader):
    """Reads the stored messages of topics that are visible when the read is planned.

    Each partition reads in its own transaction. If a message with a lower id is committed between
    two of them, it may or may not be read.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.chosen(schema, columns.TOPIC)
        self._schema = schema
        self._conditions: list[Condition] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Split the topics into ranges of ids with about the same number of messages."""
        options = self._options
        with closing(Database(options.address)) as database:
            found = offsets.ask(database, options.client, options.topics).topics
            names = topics_left(found, self._conditions)
            wholes = [
                IdRange(name, *bounded(found[name].removed, found[name].newest, self._conditions))
                for name in names
            ]
            weighed = topic_ranges.weighed(database, options.client, wholes)
            parts = topic_ranges.shared_out(weighed, options.partitions)
        # Never return an empty list: Spark would treat it as one unknown partition.
        return [InputPartition(part) for part in parts or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, on an executor."""
        if not partition.value:
            return iter(())
        conditions = [c.sql for c in self._conditions if not c.is_by_range]
        reads = StreamCalls(self._options.client, partition.value, self._columns, conditions)
        return reader.batches(self._options.address, reads, self._schema)


class FilteredTopicBatchReader(TopicBatchReader):
    """A TopicBatchReader with filters; Spark rejects it if filter pushdown is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Accept the filters that PostgreSQL evaluates like Spark, and return the others."""
        for filter_ in filters:
            pushed = condition(filter_, self._schema)
            if pushed is None:
                yield filter_
            else:
                self._conditions.append(pushed)


# Subscriptions of a stream, which retain its unread messages, and its watermarks.

_SUBSCRIBE: Final = "SELECT messages.subscribe_from(%s, %s::text[], %s::bigint[], %s::int)"
_SINCE: Final = """
    SELECT min(id) FILTER (WHERE published_at >= %s), max(id), count(*)
    FROM messages.read_stream(%s, %s, %s, %s, %s, false)
"""
_SINCE_ROWS: Final = 100_000


class TopicSubscription:
    """The driver side of a topic stream: keeps its position in the database.

    Lives in one worker while the query runs. From its first call it is a subscription at the last
    committed position, renewed at least three times within the timeout.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._database = Database(options.address)
        self._lock = threading.RLock()
        self._positions: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._keep_alive = KeepAliveThread(self._ping, options.timeout)

    def start(self) -> Offset:
        """Return the start position of a new query, and subscribe from it."""
        found = self.ask()
        positions = {topic.name: self._start_of(topic) for topic in found.topics.values()}
        offset = Offset(found.cluster, positions)
        self._subscribe_all(offset, found)
        return offset

    def watermarks(self, start: Offset, max_rows: int | None = None) -> Watermarks:
        """Return how far topics can be read after a committed offset."""
        found = self.ask(start.positions, max_rows)
        offsets.check_cluster(start.cluster, found.cluster)
        if not isinstance(self._options.starting, int):
            offsets.check_not_restored(start, found.topics)
        self._subscribe_all(start, found)
        return found

    def position(self, offset: Offset, topic: TopicWatermark) -> int:
        """Return the position of an offset in a topic, which may be newer than the offset."""
        return offset.positions.get(topic.name, self._positions.get(topic.name, topic.removed))

    def committed(self, offset: Offset) -> None:
        """Move the subscriptions to an offset: messages before it may be removed."""
        with self._lock:
            known = self._positions
            self._subscribe({t: p for t, p in offset.positions.items() if known.get(t, p) != p})

    def close(self) -> None:
        """Close the connection; the subscriptions remain until the timeout."""
        self._keep_alive.stop()
        self._database.close()

    def ask(
        self, after: Mapping[str, int] | None = None, max_rows: int | None = None
    ) -> Watermarks:
        """Return how far topics can be read now."""
        options = self._options
        return offsets.ask(self._database, options.client, options.topics, after, max_rows)

    def _start_of(self, topic: TopicWatermark) -> int:
        starting = self._options.starting
        newest = max(topic.horizon, topic.removed)
        if isinstance(starting, datetime):
            return self._before(starting, topic, newest)
        if isinstance(starting, int):
            return max(starting - 1, 0)
        return newest if starting == LATEST else topic.removed

    def _before(self, moment: datetime, topic: TopicWatermark, newest: int) -> int:
        """Return the id before the first message published at ``moment`` or later."""
        position, client = topic.removed, self._options.client
        while True:
            ((first, last, count),) = self._database.rows(
                _SINCE, (moment, client, topic.name, position, newest, _SINCE_ROWS)
            )
            if first is not None:
                return int(first) - 1
            if count < _SINCE_ROWS:
                return newest
            position = int(last)

    def _subscribe_all(self, offset: Offset, found: Watermarks) -> None:
        """Subscribe to all known topics that are not subscribed at their position yet."""
        positions = {t.name: self.position(offset, t) for t in found.topics.values()}
        self._check(positions, ((t.name, t.removed) for t in found.topics.values()))
        with self._lock:
            # A removed topic cannot be subscribed to; its subscription expires.
            self._positions = {t: p for t, p in self._positions.items() if t in positions}
            self._subscribe({t: p for t, p in positions.items() if self._positions.get(t) != p})
        self._keep_alive.start()

    def _ping(self) -> None:
        with self._lock:
            # If a topic of a pattern is gone, the others must still be renewed.
            found = self.ask().topics
            self._subscribe({t: p for t, p in self._positions.items() if t in found})

    def _subscribe(self, positions: Mapping[str, int]) -> None:
        if not positions:
            return
        options = self._options
        names, ids = list(positions), list(positions.values())
        answer = self._database.ask(_SUBSCRIBE, (options.client, names, ids, options.timeout))
        self._positions.update(positions)
        self._check(positions, ((m["Topic"], int(m["Removed"])) for m in answer["Missed"]))

    def _check(self, positions: Mapping[str, int], removed: Iterable[tuple[str, int]]) -> None:
        """Raise or log MessagesGone if messages after a position were removed."""
        for topic, last in removed:
            if last > max(positions[topic], self._lost.get(topic, 0)):
                error = offsets.messages_gone(topic, positions[topic], last, self._options.timeout)
                _report(error, self._options)
                self._lost[topic] = last


def _report(error: MessagesGone, options: SourceOptions) -> None:
    """Raise an error, or log it if the option failOnDataLoss is false."""
    if options.fail_on_data_loss:
        raise error
    logger.warning("%s", error.text)


# For fewer ids, a second task costs more than it saves.
_NARROW: Final = 5_000


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics by position. Spark's driver and each executor have their own copy."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.chosen(schema, columns.TOPIC)
        self._schema = schema
        self._initial: Offset | None = None
        self._is_kept = options.starting != LATEST
        self._newest: Offset | None = None
        self._target: Mapping[str, int] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the start of a query without a checkpoint."""
        # Spark calls this several times during the first batch, and expects the same result.
        if self._initial is None:
            self._initial = self._subscription.start()
        return self._initial.as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxRowsPerTrigger."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Ignore messages that are published from now on."""
        found = self._subscription.ask()
        self._target = {name: topic.horizon for name, topic in found.topics.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, or ``start`` itself if there are no messages."""
        begin = Offset.of(start)
        if not self._is_kept and begin == self._initial:
            # Spark stores the start of a query only with its first batch. If that batch is
            # interrupted, Spark asks for the start again, and a later start would skip messages.
            # So the first batch is empty.
            self._is_kept = True
            return start
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = self._subscription.watermarks(begin, max_rows)
        ends = dict(begin.positions)
        newest = dict(begin.positions)
        for topic in found.topics.values():
            position = self._subscription.position(begin, topic)
            end = topic.horizon
            if self._target is not None:
                end = min(end, self._target.get(topic.name, position))
            if end > position:
                ends[topic.name] = end
            newest[topic.name] = max(position, topic.newest)
        self._newest = Offset(found.cluster, newest)
        return start if ends == begin.positions else Offset(found.cluster, ends).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the newest visible messages, for the progress of the query."""
        return self._newest.as_json() if self._newest is not None else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split the messages between two offsets into about equal parts."""
        begin, to = Offset.of(start), Offset.of(end)
        if "_subscription" not in self.__dict__:
            # Repeats a batch that was running when the query stopped.
            self._subscription.watermarks(begin)
        wanted = [
            IdRange(topic, begin.positions.get(topic, 0), high, topic in begin.positions)
            for topic, high in to.positions.items()
            if high > begin.positions.get(topic, 0)
        ]
        width = sum(r.width for r in wanted)
        parts = 1 if width <= _NARROW else self._options.partitions
        shared = topic_ranges.shared_out((WeightedRange(r, r.width) for r in wanted), parts)
        return [InputPartition((part, to.cluster)) for part in shared]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, and check afterwards that none of its messages were removed."""
        ranges: Sequence[IdRange]
        ranges, cluster = partition.value
        # A topic matched by a pattern is queried as a pattern: then it is no error if it is gone.
        # A pattern has the same maximum length as a name.
        topics = self._options.topics
        names = {r.topic if r.topic in topics else f"{r.topic[:99]}*" for r in ranges}
        after = offsets.statement(self._options.client, sorted(names))
        reads = StreamCalls(self._options.client, ranges, self._columns)
        # All transactions up to the watermark have ended: only a removal changes the result.
        return reader.batches(
            self._options.address,
            reads,
            self._schema,
            after=(after, partial(self._check, ranges, cluster)),
            is_repeatable=True,
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Release the messages before an offset."""
        self._subscription.committed(Offset.of(end))

    def stop(self) -> None:
        """Close the connection."""
        if "_subscription" in self.__dict__:
            self._subscription.close()

    @cached_property
    def _subscription(self) -> TopicSubscription:
        # Created late: executors have a copy of this reader but no subscription.
        return TopicSubscription(self._options)

    def _check(
        self, ranges: Sequence[IdRange], cluster: str, answer: Mapping[str, Any], is_resumed: bool
    ) -> None:
        """Report removed messages; ``is_resumed``: the read was repeated, perhaps without them."""
        found = Watermarks.of(answer)
        offsets.check_cluster(cluster, found.cluster)
        for range_ in ranges:
            topic = found.topics.get(range_.topic)
            if topic is None:
                _report(offsets.topic_gone(range_.topic, range_.low), self._options)
            elif topic.removed <= range_.low:
                continue
            elif range_.is_checked:
                timeout = self._options.timeout
                error = offsets.messages_gone(topic.name, range_.low, topic.removed, timeout)
                _report(error, self._options)
            if is_resumed:
                raise ReadBroken(
                    f"the connection broke while reading topic {range_.topic}, and messages were"
                    " removed before it was restored"
                )
