"""Source of topics: streaming reads, which return each message exactly once, and batch reads."""

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

from psqlmessages.client.stream_calls import subscribe_from
from psqlmessages.pipeline import columns, offsets, reader, topic_ranges
from psqlmessages.pipeline.columns import Condition, limit_ids, matching_topics, to_condition
from psqlmessages.pipeline.database import Database, RenewalThread, logger
from psqlmessages.pipeline.errors import MessagesGone, ReadBroken
from psqlmessages.pipeline.offsets import Offset, TopicWatermark, Watermarks
from psqlmessages.pipeline.source_options import LATEST, SourceOptions
from psqlmessages.pipeline.topic_ranges import IdRange, StreamStatements, WeightedRange


class TopicBatchReader(DataSourceReader):
    """Reads the messages that topics store when the read is planned.

    Spark reads the partitions later. Messages that are committed after the planning, or removed
    before their partition is read, may be missing.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.column_names(schema, columns.TOPIC_SCHEMA)
        self._schema = schema
        self._conditions: list[Condition] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Split the topics into ranges of ids with about the same number of messages."""
        options = self._options
        with closing(Database(options.dsn_options)) as database:
            topics = offsets.read_watermarks(database, options.client, options.topics).topics
            ranges = [
                IdRange(
                    name, *limit_ids(topics[name].removed, topics[name].newest, self._conditions)
                )
                for name in matching_topics(topics, self._conditions)
            ]
            weighted = topic_ranges.estimate_weights(database, options.client, ranges)
            parts = topic_ranges.split_evenly(weighted, options.partitions)
        # Not an empty list: Spark would treat it as one unknown partition.
        return [InputPartition(part) for part in parts or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, on an executor."""
        if not partition.value:
            return iter(())
        conditions = [c.sql for c in self._conditions if not c.is_exact]
        options, ranges = self._options, partition.value
        statements = StreamStatements(options.client, ranges, self._columns, conditions)
        return reader.read_batches(options.dsn_options, statements, self._schema)


class FilteredTopicBatchReader(TopicBatchReader):
    """A TopicBatchReader that accepts filters; Spark rejects it if filter pushdown is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take the filters that PostgreSQL evaluates like Spark; yield the other filters."""
        for filter_ in filters:
            condition = to_condition(filter_, self._schema)
            if condition is None:
                yield filter_
            else:
                self._conditions.append(condition)


_FIRST_SINCE: Final = """
    SELECT min(id) FILTER (WHERE published_at >= %s), max(id), count(*)
    FROM messages.read_stream(%s, %s, %s, %s, %s, false)
"""
_ROWS_PER_SEARCH: Final = 100_000


class TopicSubscriptions:
    """The driver side of a topic stream: a subscription per topic retains the unread messages.

    Each subscription is at the last committed position. A thread renews all subscriptions.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._database = Database(options.dsn_options)
        self._lock = threading.RLock()
        self._positions: dict[str, int] = {}
        self._reported_gaps: dict[str, int] = {}
        self._renewal = RenewalThread(self._renew, options.timeout)

    def start(self) -> Offset:
        """Subscribe to all topics at the positions of startingOffsets; return these positions."""
        watermarks = self.read_watermarks()
        positions = {
            topic.name: self._start_position(topic) for topic in watermarks.topics.values()
        }
        offset = Offset(watermarks.cluster, positions)
        self._subscribe_all(offset, watermarks)
        return offset

    def resume(self, start: Offset, max_rows: int | None = None) -> Watermarks:
        """Subscribe from a committed offset; return up to which ids topics can be read."""
        watermarks = self.read_watermarks(start.positions, max_rows)
        offsets.check_cluster(start.cluster, watermarks.cluster)
        # An id in startingOffsets may be higher than all ids of the database.
        if not isinstance(self._options.starting, int):
            offsets.check_not_restored(start, watermarks.topics)
        self._subscribe_all(start, watermarks)
        return watermarks

    def position(self, offset: Offset, topic: TopicWatermark) -> int:
        """Return the position in a topic. New topics are read from their oldest stored message."""
        return offset.positions.get(topic.name, self._positions.get(topic.name, topic.removed))

    def move_to(self, offset: Offset) -> None:
        """Move the subscriptions to an offset, so that earlier messages can be removed."""
        with self._lock:
            known = self._positions
            self._subscribe({t: p for t, p in offset.positions.items() if known.get(t, p) != p})

    def close(self) -> None:
        """Close the connection; the subscriptions remain until the timeout."""
        self._renewal.stop()
        self._database.close()

    def read_watermarks(
        self, after: Mapping[str, int] | None = None, max_rows: int | None = None
    ) -> Watermarks:
        """Return up to which ids topics can be read now."""
        options = self._options
        return offsets.read_watermarks(
            self._database, options.client, options.topics, after, max_rows
        )

    def _start_position(self, topic: TopicWatermark) -> int:
        starting = self._options.starting
        end = max(topic.watermark, topic.removed)
        if isinstance(starting, datetime):
            return self._find_position_before(starting, topic, end)
        if isinstance(starting, int):
            return max(starting - 1, 0)
        return end if starting == LATEST else topic.removed

    def _find_position_before(self, time: datetime, topic: TopicWatermark, end: int) -> int:
        """Find the position before the first message since ``time``; ``end`` if there is none."""
        position, client = topic.removed, self._options.client
        while True:
            ((first, last, count),) = self._database.fetch_rows(
                _FIRST_SINCE, (time, client, topic.name, position, end, _ROWS_PER_SEARCH)
            )
            if first is not None:
                return int(first) - 1
            if count < _ROWS_PER_SEARCH:
                return end
            position = int(last)

    def _subscribe_all(self, offset: Offset, watermarks: Watermarks) -> None:
        """Subscribe to all topics that have no subscription at their position yet."""
        positions = {t.name: self.position(offset, t) for t in watermarks.topics.values()}
        self._check_gaps(positions, ((t.name, t.removed) for t in watermarks.topics.values()))
        with self._lock:
            # Forget topics that were removed: their subscriptions were removed too.
            self._positions = {t: p for t, p in self._positions.items() if t in positions}
            self._subscribe({t: p for t, p in positions.items() if self._positions.get(t) != p})
        self._renewal.start()

    def _renew(self) -> None:
        with self._lock:
            # A topic that a pattern matched may have been removed: skip it.
            topics = self.read_watermarks().topics
            self._subscribe({t: p for t, p in self._positions.items() if t in topics})

    def _subscribe(self, positions: Mapping[str, int]) -> None:
        if not positions:
            return
        call = subscribe_from(self._options.client, positions, self._options.timeout)
        missed = self._database.run_call(call)
        self._positions.update(positions)
        self._check_gaps(positions, missed.items())

    def _check_gaps(self, positions: Mapping[str, int], removed: Iterable[tuple[str, int]]) -> None:
        """Raise or log MessagesGone if messages after a position were removed."""
        for topic, last in removed:
            position, timeout = positions[topic], self._options.timeout
            if last > max(position, self._reported_gaps.get(topic, 0)):
                error = offsets.messages_gone_error(topic, position, last, timeout)
                _raise_or_log(error, self._options)
                self._reported_gaps[topic] = last


def _raise_or_log(error: MessagesGone, options: SourceOptions) -> None:
    """Raise an error, or log it if the option failOnDataLoss is false."""
    if options.fail_on_data_loss:
        raise error
    logger.warning("%s", error.text)


# A batch of at most this many ids is one task: a second task would cost more time than it saves.
_MAX_UNSPLIT_IDS: Final = 5_000


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics by position. Spark's driver and each executor have their own copy of it."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.column_names(schema, columns.TOPIC_SCHEMA)
        self._schema = schema
        self._initial: Offset | None = None
        self._is_start_stored = options.starting != LATEST
        self._newest: Offset | None = None
        self._final_positions: Mapping[str, int] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a query without a checkpoint starts."""
        # Spark calls this several times and expects the same result.
        if self._initial is None:
            self._initial = self._subscriptions.start()
        return self._initial.as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxRowsPerTrigger."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Ignore messages that are published from now on."""
        watermarks = self._subscriptions.read_watermarks()
        self._final_positions = {name: topic.watermark for name, topic in watermarks.topics.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, or ``start`` if the next batch is empty."""
        begin = Offset.of(start)
        if not self._is_start_stored and begin == self._initial:
            # Spark stores only the ends of batches. Return the start as the end of an empty batch,
            # so that Spark stores it. Otherwise, a query that is interrupted in its first batch
            # would restart at the end of the topics, and skip the messages published until then.
            self._is_start_stored = True
            return start
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        watermarks = self._subscriptions.resume(begin, max_rows)
        ends = dict(begin.positions)
        newest = dict(begin.positions)
        for topic in watermarks.topics.values():
            position = self._subscriptions.position(begin, topic)
            end = topic.watermark
            if self._final_positions is not None:
                end = min(end, self._final_positions.get(topic.name, position))
            if end > position:
                ends[topic.name] = end
            newest[topic.name] = max(position, topic.newest)
        self._newest = Offset(watermarks.cluster, newest)
        return start if ends == begin.positions else Offset(watermarks.cluster, ends).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the ids of the newest visible messages, for the progress of the query."""
        return self._newest.as_json() if self._newest is not None else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split the messages between two offsets into about equal parts."""
        begin, until = Offset.of(start), Offset.of(end)
        if "_subscriptions" not in self.__dict__:
            # Spark repeats a batch that was running when the query stopped, without latestOffset().
            self._subscriptions.resume(begin)
        lows = begin.positions
        ranges = [
            IdRange(topic, lows.get(topic, 0), high, must_be_complete=topic in lows)
            for topic, high in until.positions.items()
            if high > lows.get(topic, 0)
        ]
        width = sum(r.width for r in ranges)
        part_count = 1 if width <= _MAX_UNSPLIT_IDS else self._options.partitions
        weighted = [WeightedRange(range_, range_.width) for range_ in ranges]
        parts = topic_ranges.split_evenly(weighted, part_count)
        return [InputPartition((part, until.cluster)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, and check afterwards that none of its messages were removed."""
        ranges: list[IdRange]
        cluster: str
        ranges, cluster = partition.value
        # If a topic was removed, its name causes an SQL error, but a pattern does not. So query a
        # topic by its name if the option has this name, and otherwise by a pattern. The name in the
        # pattern is cut, because a pattern has at most 100 characters.
        topics = self._options.topics
        names = {r.topic if r.topic in topics else f"{r.topic[:99]}*" for r in ranges}
        watermarks_sql = offsets.watermarks_sql(self._options.client, sorted(names))
        statements = StreamStatements(self._options.client, ranges, self._columns)
        # Transactions before the watermark have ended: only a removal can change the result.
        return reader.read_batches(
            self._options.dsn_options,
            statements,
            self._schema,
            final_query=(watermarks_sql, partial(self._check_complete, ranges, cluster)),
            is_repeatable=True,
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Move the subscriptions to an offset that Spark has committed."""
        self._subscriptions.move_to(Offset.of(end))

    def stop(self) -> None:
        """Close the connection."""
        if "_subscriptions" in self.__dict__:
            self._subscriptions.close()

    @cached_property
    def _subscriptions(self) -> TopicSubscriptions:
        # Created on first use: executors have a copy of this reader but no subscription.
        return TopicSubscriptions(self._options)

    def _check_complete(
        self, ranges: Sequence[IdRange], cluster: str, answer: Mapping[str, Any], is_resumed: bool
    ) -> None:
        """Raise or log an error if messages of the ranges were removed before they were read.

        If ``is_resumed``, a removal always raises: the repeated read may have skipped wrong rows.
        """
        watermarks = Watermarks.of(answer)
        offsets.check_cluster(cluster, watermarks.cluster)
        for range_ in ranges:
            topic = watermarks.topics.get(range_.topic)
            if topic is None:
                _raise_or_log(offsets.topic_gone_error(range_.topic, range_.low), self._options)
            elif topic.removed <= range_.low:
                continue
            elif range_.must_be_complete:
                timeout = self._options.timeout
                error = offsets.messages_gone_error(topic.name, range_.low, topic.removed, timeout)
                _raise_or_log(error, self._options)
            if is_resumed:
                raise ReadBroken(
                    f"the read of topic {range_.topic} broke, and messages were removed before it"
                    " was repeated"
                )
