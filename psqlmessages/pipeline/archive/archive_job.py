"""Archive job: copies marked or requested topics from streams to Parquet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from time import sleep
from typing import TYPE_CHECKING, Any, Final

import psycopg

from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline import offsets
from psqlmessages.pipeline.archive import mark_calls, store
from psqlmessages.pipeline.archive.log import ArchiveError
from psqlmessages.pipeline.archive.store import Archive
from psqlmessages.pipeline.database import NO_RETRY, Database
from psqlmessages.pipeline.errors import MessagesGone

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# The node that reads. It differs from the node of the marks. Otherwise a stopping query, which
# still renews its subscriptions, could set a mark again that was just removed.
READER: Final = f"{mark_calls.IDENT}.reader"
_POLL_SECONDS: Final = 2.0


class ArchiveJob:
    """One run of the archive job, for ``topics`` (names and patterns), or all marked topics.

    Raises ArchiveError if ``root`` cannot be the archive of this database. `prepare` and the query
    raise MessagesGone if messages were removed before they were archived, unless ``allows_gaps``.
    """

    def __init__(
        self, spark: SparkSession, root: str, topics: tuple[str, ...], *, allows_gaps: bool = False
    ) -> None:
        self._spark = spark
        self._requested_topics = topics
        self._allows_gaps = allows_gaps
        self._database = Database({})
        self._batch_lock = threading.Lock()
        self._seen_topics: set[str] = set()
        try:
            cluster = offsets.read_watermarks(self._database, mark_calls.IDENT, ["*"]).cluster
            self.archive = Archive.open_or_create(spark, root, cluster)
        except BaseException:
            self.close()
            raise

    def topics(self) -> list[str]:
        """Return the topics to archive now: the requested ones, or else the marked ones."""
        return list(self._requested_topics) or self._read_marked(self._database)

    def prepare(self, topics: list[str]) -> None:
        """Mark the requested topics, and record gaps as skipped; raises as `_find_gaps` does."""
        watermarks = offsets.read_watermarks(self._database, mark_calls.IDENT, topics)
        self._mark_requested(watermarks)
        if gaps := self._find_gaps(watermarks):
            self.archive.skip_to(gaps)

    def start(
        self, topics: list[str], checkpoint: str, trigger: Mapping[str, Any]
    ) -> StreamingQuery:
        """Start the query. If ``checkpoint`` is missing, it skips messages that are archived."""
        return (
            self._spark.readStream.format("psqlmessages")
            .options(topic=",".join(topics), client=READER, timeout=10 * 60)
            # The archive detects missing messages itself: see _check_and_mark.
            .options(maxRowsPerTrigger=300_000, failOnDataLoss="false")
            .load()
            .writeStream.foreachBatch(self._write)
            .option("checkpointLocation", f"{checkpoint}/{self.archive.log.identity}")
            .trigger(**trigger)
            .start()
        )

    @contextmanager
    def stop_on_mark_change(
        self, query: StreamingQuery, topics: list[str]
    ) -> Iterator[Callable[[], bool]]:
        """Stop the query between batches if the marks change.

        Yields a function that returns whether the marks have changed.
        """
        block_ended, marks_changed = threading.Event(), threading.Event()

        def watch() -> None:
            # Do not retry here if the database is down: the query retries, and logs it.
            with closing(Database({}, NO_RETRY)) as database:
                while not block_ended.wait(_POLL_SECONDS):
                    if self._have_marks_changed(database, topics):
                        marks_changed.set()
                        # Wait for the current batch. Interrupting the next one is harmless.
                        with self._batch_lock:
                            pass
                        query.stop()
                        return

        watcher = threading.Thread(target=watch, name="archive marks", daemon=True)
        watcher.start()
        try:
            yield marks_changed.is_set
        finally:
            block_ended.set()
            watcher.join()

    def wait_for_marks(self, on_wait: Callable[[], None]) -> None:
        """Wait until a topic is marked; call ``on_wait`` after each check that finds none."""
        while not self.topics():
            on_wait()
            sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the connection; the marks remain."""
        self._database.close()

    def _write(self, batch: DataFrame, number: int) -> None:
        with self._batch_lock:
            self.archive.write(batch, self._check_and_mark)
            # Move only existing marks: do not mark topics whose mark was removed.
            archived = self.archive.log.positions
            marked = self._database.run_call(mark_calls.list_marked())
            self._mark({topic: archived[topic] for topic in marked if topic in archived})
            store.compact_some(self.archive)

    def _check_and_mark(self) -> None:
        """Raise an error if messages were removed before they were read; mark requested topics."""
        if topics := self.topics():
            watermarks = offsets.read_watermarks(self._database, mark_calls.IDENT, topics)
            self._find_gaps(watermarks)
            self._mark_requested(watermarks)

    def _find_gaps(self, watermarks: offsets.Watermarks) -> dict[str, int]:
        """Return topics with messages removed before they were archived: name → last removed id.

        Raises MessagesGone unless gaps are allowed; ArchiveError if the database was restored.
        """
        archived = self.archive.log.positions
        for topic in watermarks.topics.values():
            if 0 < topic.newest < archived.get(topic.name, 0):
                raise ArchiveError(
                    f"topic {topic.name} is archived up to {archived[topic.name]}, but its newest"
                    f" message is {topic.newest}: the database was restored to an earlier state,"
                    " and new messages reuse ids of archived ones. Archive to another folder"
                )
        gaps = {
            topic.name: topic.removed
            for topic in watermarks.topics.values()
            if topic.name in archived and topic.removed > archived[topic.name]
        }
        if gaps and not self._allows_gaps:
            parts = (f"{topic} between {archived[topic]} and {end}" for topic, end in gaps.items())
            raise MessagesGone(
                f"messages were removed before they were archived: {', '.join(parts)} (the topic"
                " was not marked at that time). Use --allow-gaps to continue without them"
            )
        return gaps

    def _mark_requested(self, watermarks: offsets.Watermarks) -> None:
        """Mark the topics that the requested names and patterns match, but each only once per run.

        A mark that is removed during the run is not set again.
        """
        if self._requested_topics:
            archived = self.archive.log.positions
            new = [t for t in watermarks.topics.values() if t.name not in self._seen_topics]
            archivable = [t for t in new if mark_calls.can_be_archived(t.name)]
            self._mark({t.name: archived.get(t.name, t.removed) for t in archivable})
            self._seen_topics |= {t.name for t in new}

    def _mark(self, positions: Mapping[str, int]) -> None:
        if positions:
            self._database.run_call(mark_calls.mark(positions))

    def _have_marks_changed(self, database: Database, topics: list[str]) -> bool:
        try:
            return not self._requested_topics and self._read_marked(database) != topics
        except (MessagesError, psycopg.Error):
            # The next check tries again. If the error affects the query, the query reports it.
            return False

    def _read_marked(self, database: Database) -> list[str]:
        marked = database.run_call(mark_calls.list_marked())
        return [topic for topic in marked if mark_calls.can_be_archived(topic)]
