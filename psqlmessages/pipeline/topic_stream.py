"""Streams of topics: every message once, up to the horizon, from where the checkpoint stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, horizons, ranges
from psqlmessages.pipeline.errors import ReadBroken
from psqlmessages.pipeline.following import Following
from psqlmessages.pipeline.horizons import Horizons, Topic
from psqlmessages.pipeline.offsets import Offset, check_cluster, gone, vanished
from psqlmessages.pipeline.options import LATEST, SourceOptions
from psqlmessages.pipeline.ranges import Range, Weighed
from psqlmessages.pipeline.reading import Read, Reader
from psqlmessages.pipeline.stream_calls import StreamCalls
from psqlmessages.pipeline.waiting import logger

# A second task costs more than it saves where there are fewer ids to read.
_NARROW: Final = 5_000


@dataclass(frozen=True)
class Part:
    """What one task reads, and of which cluster."""

    ranges: Sequence[Range]
    cluster: str


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics by position. Spark's driver and executors each have one of their own."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.chosen(schema, columns.TOPIC)
        self._schema = schema
        self._following: Following | None = None
        self._initial: Offset | None = None
        self._is_kept = options.starting != LATEST
        self._newest: Offset | None = None
        self._target: Mapping[str, int] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return where a query without a checkpoint begins."""
        # Spark asks several times until the first batch is done, and counts on one answer.
        if self._initial is None:
            self._initial = self._follow().start()
        return self._initial.as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxRowsPerTrigger."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read nothing that comes after this moment."""
        found = self._follow().all_horizons()
        self._target = {name: topic.horizon for name, topic in found.topics.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next batch goes; ``start`` itself where nothing came."""
        begin = Offset.of(start)
        if not self._is_kept and begin == self._initial:
            # Spark keeps where a query begins with its first batch only, for which it then asks
            # anew where that is. So that one is empty: killed in it, nothing is passed over.
            self._is_kept = True
            return start
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = self._follow().horizons(begin, max_rows)
        ends = dict(begin.positions)
        newest = dict(begin.positions)
        for topic in found.topics.values():
            position = self._follow().position(begin, topic)
            end = self._end(topic, position)
            if end > position:
                ends[topic.name] = end
            newest[topic.name] = max(position, topic.newest)
        self._newest = Offset(found.cluster, newest)
        return start if ends == begin.positions else Offset(found.cluster, ends).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the newest messages seen, for the query's progress."""
        return self._newest.as_json() if self._newest is not None else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Cut what lies between two offsets into about equal parts."""
        begin, to = Offset.of(start), Offset.of(end)
        if self._following is None:
            # A batch that was under way when the query ended: it is read again.
            self._follow().horizons(begin)
        wanted = [
            Range(topic, begin.positions.get(topic, 0), high, topic in begin.positions)
            for topic, high in to.positions.items()
            if high > begin.positions.get(topic, 0)
        ]
        width = sum(r.width for r in wanted)
        parts = 1 if width <= _NARROW else self._options.partitions
        shared = ranges.shared_out((Weighed(r, r.width) for r in wanted), parts)
        return [InputPartition(Part(part, to.cluster)) for part in shared]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, and look afterwards whether all of it was still there."""
        part: Part = partition.value
        names = sorted({self._asked(r.topic) for r in part.ranges})
        after = horizons.statement(self._options.client, names)
        reads = StreamCalls(self._options.client, part.ranges, self._columns)
        # The transactions of all these messages have ended: only a removal changes the result.
        read = Read(reads, after, is_repeatable=True)

        def answered(answer: Mapping[str, Any], is_resumed: bool) -> None:
            found = Horizons.of(answer)
            self._check(part, found)
            if is_resumed:
                _check_nothing_removed(part, found)

        reader = Reader(self._options.address)
        return reader.batches(read, columns.arrow_schema(self._schema), answered)

    def commit(self, end: dict[str, Any]) -> None:
        """Let go of what lies before an offset."""
        self._follow().committed(Offset.of(end))

    def stop(self) -> None:
        """Disconnect."""
        if self._following is not None:
            self._following.close()

    def _follow(self) -> Following:
        # Late: executors have a copy of this reader, and follow nothing.
        if self._following is None:
            self._following = Following(self._options)
        return self._following

    def _end(self, topic: Topic, position: int) -> int:
        if self._target is None:
            return topic.horizon
        return min(topic.horizon, self._target.get(topic.name, position))

    def _asked(self, topic: str) -> str:
        """Name a topic as a pattern where a pattern meant it: it is no error then if it is gone."""
        # A pattern may be as long as a name.
        return topic if topic in self._options.topics else f"{topic[:99]}*"

    def _check(self, part: Part, found: Horizons) -> None:
        check_cluster(part.cluster, found.cluster)
        for range_ in part.ranges:
            topic = found.topics.get(range_.topic)
            if topic is None:
                error = vanished(range_.topic, range_.low)
            elif range_.is_checked and topic.removed > range_.low:
                error = gone(range_.topic, range_.low, topic.removed, self._options.timeout)
            else:
                continue
            if self._options.fail_on_data_loss:
                raise error
            logger.warning("%s", error.text)


def _check_nothing_removed(part: Part, found: Horizons) -> None:
    """Raise ReadBroken if a second read may have found fewer messages than the first one."""
    for range_ in part.ranges:
        topic = found.topics.get(range_.topic)
        if topic is None or topic.removed > range_.low:
            raise ReadBroken(
                f"the connection broke in a read of topic {range_.topic}, and messages were"
                " removed before it was back"
            )
