"""Archive store: writes messages of topics, each exactly once; compacts small files."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from math import ceil
from typing import TYPE_CHECKING, Final, Self, TypeVar
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf

from psqlmessages.pipeline.archive.log import (
    DATA,
    STAGING,
    ArchiveError,
    ArchiveFile,
    ArchiveFolder,
    ArchiveLog,
    ArchiveLogEntry,
)
from psqlmessages.pipeline.columns import TOPIC_SCHEMA
from psqlmessages.pipeline.spark_session import temporary_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


T = TypeVar("T")

_FILE_MISSING: Final = ("PATH_NOT_FOUND", "FAILED_READ_FILE.FILE_NOT_EXIST")
_MICROSECONDS_A_DAY: Final = 24 * 60 * 60 * 1_000_000
# The vectorized reader puts 4,096 bodies into one array of at most 2 GB, but bodies may have 64 MB.
_ROW_BY_ROW: Final = ("spark.sql.parquet.enableVectorizedReader", "false")
# By default, Parquet would buffer 100 rows before it checks their size.
_SIZE_CHECKS: Final = {"parquet.block.size.row.check.min": 4, "parquet.page.size.row.check.min": 4}
# By default Spark writes times as INT96. Few other readers support INT96, and no reader can filter
# by it.
_TIMESTAMPS: Final = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


class Archive:
    """One archive: a folder with ``data`` (the files), ``_log`` and ``_staging``.

    Threads and processes may share it: each change is one log entry. The constructor makes
    ``spark`` read Parquet row by row: see _ROW_BY_ROW.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.spark = spark
        self.spark.conf.set(*_ROW_BY_ROW)
        self.log = ArchiveLog(ArchiveFolder(spark, root))
        self._lock = threading.Lock()

    @classmethod
    def open(cls, spark: SparkSession, root: str) -> Self:
        """Open an existing archive; raises ArchiveError if there is none or it is damaged."""
        archive = cls(spark, root)
        archive.log.load()
        if not archive.log.identity:
            raise ArchiveError(f"there is no archive in {archive.log.folder.root}")
        return archive

    @classmethod
    def open_or_create(cls, spark: SparkSession, root: str, cluster: str) -> Self:
        """Open an archive for writing, and create it if it does not exist.

        ``cluster`` is the identity of the database, from stream_horizons. Raises ArchiveError if
        the archive is damaged or belongs to another database, whose ids mean other messages.
        """
        archive = cls(spark, root)
        log = archive.log
        log.load()
        while not log.identity:
            if log.folder.exists(DATA):
                raise ArchiveError(f"{log.folder.address(DATA)} exists, but belongs to no archive")
            log.commit(ArchiveLogEntry(identity=uuid4().hex, cluster=cluster))
            log.refresh()
        if log.cluster != cluster:
            raise ArchiveError(
                f"the archive in {log.folder.root} belongs to database {log.cluster}, but this is"
                f" {cluster}: use another folder"
            )
        log.delete_stale_staging()
        return archive

    def write(self, batch: DataFrame, guard: Callable[[], None] | None = None) -> None:
        """Archive the rows after the archived position of their topic, and skip other rows.

        A batch may therefore be written again, and a stream may restart without its checkpoint.
        ``guard`` is called between staging and commit; if it raises, the archive is unchanged.
        After the return, the files are durable.
        """
        with self._lock:
            self.log.refresh()
            while not self._try_write(batch, guard):
                self.log.refresh()

    def _try_write(self, batch: DataFrame, guard: Callable[[], None] | None) -> bool:
        """Stage and commit a batch; return False if another process has archived part of it."""
        with self.stage(self._drop_archived(batch)) as files:
            if guard is not None:
                guard()
            if not files:
                return True
            positions: dict[str, int] = {}
            for file in files:
                positions[file.topic] = max(file.last, positions.get(file.topic, 0))
            while all(file.first > self.log.positions.get(file.topic, 0) for file in files):
                if self.log.commit(ArchiveLogEntry(add=files, positions=positions)):
                    return True
                self.log.refresh()
        return False

    def retry_reads(self, read: Callable[[], T]) -> T:
        """Call ``read``; repeat the call if files are missing because they have been compacted."""
        while True:
            version = self.log.version
            try:
                return read()
            except (PySparkException, Py4JJavaError) as error:
                # The error of a failed task is a Py4JJavaError; its text names the condition.
                if not any(condition in str(error) for condition in _FILE_MISSING):
                    raise
                self.log.refresh()
                if self.log.version == version:
                    raise

    def rows(self) -> DataFrame:
        """Return all rows, from the files that the log lists now."""
        return self.read(self.log.files.values())

    def read(self, files: Iterable[ArchiveFile]) -> DataFrame:
        """Return the rows of these files."""
        paths = [self.log.folder.address(f"{DATA}/{file.path}") for file in files]
        if not paths:
            return self.spark.createDataFrame([], TOPIC_SCHEMA)
        return self.spark.read.schema(TOPIC_SCHEMA).parquet(*paths)

    @contextmanager
    def stage(self, rows: DataFrame) -> Iterator[tuple[ArchiveFile, ...]]:
        """Write rows to staged files by topic and day (UTC); delete uncommitted files at the end.

        After an error in the block, the files remain: a log entry may name them already.
        """
        staging = f"{STAGING}/{uuid4().hex}"
        try:
            files = self._write_staged_files(rows, staging)
        except BaseException:
            self.log.folder.delete(staging)
            raise
        yield files
        self.log.folder.delete(staging)

    def skip_to(self, positions: Mapping[str, int]) -> None:
        """Record that messages up to these positions will never be archived."""
        with self._lock:
            while not self.log.commit(ArchiveLogEntry(positions=positions)):
                self.log.refresh()

    def _write_staged_files(self, rows: DataFrame, staging: str) -> tuple[ArchiveFile, ...]:
        target = self.log.folder.address(staging)
        # The same value as `topic_hash` in archive/log.py.
        key = sf.sha2(sf.col("topic").cast("binary"), 256).substr(1, 16)
        # The day in UTC, independent of the session's time zone.
        days = sf.floor(sf.unix_micros("published_at") / _MICROSECONDS_A_DAY).cast("int")
        date_ = sf.date_from_unix_date(days).cast("string")
        with temporary_settings(rows.sparkSession, _TIMESTAMPS):
            (
                # Each file has the column topic, because the name of the topic's folder may differ.
                rows.select(*TOPIC_SCHEMA.names, key.alias("key"), date_.alias("date"))
                .sortWithinPartitions("key", "date", "id")
                .write.partitionBy("key", "date")
                .options(compression="zstd", **_SIZE_CHECKS)
                .parquet(target)
            )
        if not self.log.folder.list_entries(staging).keys() - {"_SUCCESS"}:
            return ()
        # Reading the statistics also checks that the files are readable.
        statistics = (
            self.spark.read.schema("id bigint, topic string, key string, date string")
            .parquet(target)
            .groupBy("_metadata.file_path", sf.col("_metadata.file_size").alias("bytes"))
            .agg(
                sf.count("*").alias("rows"),
                sf.min("id").alias("first"),
                sf.max("id").alias("last"),
                sf.min("topic").alias("topic"),
            )
            .collect()
        )
        unique = uuid4().hex[:8]
        return tuple(
            ArchiveFile.from_statistics(
                staging + row.file_path.rpartition(staging)[2], row, f"{unique}{number}"
            )
            for number, row in enumerate(statistics)
        )

    def _drop_archived(self, batch: DataFrame) -> DataFrame:
        """Drop rows up to the archived position: messages arrive in the order of their ids."""
        if not self.log.positions:
            return batch
        positions = sf.from_json(sf.lit(json.dumps(self.log.positions)), "map<string, bigint>")
        archived = batch.sparkSession.range(1).select(sf.explode(positions).alias("topic", "last"))
        joined = batch.join(sf.broadcast(archived), "topic", "left")
        return joined.where(sf.col("last").isNull() | (sf.col("id") > sf.col("last")))


# Compaction: merge many small files of one topic and day into few large ones, in one log entry.

# Files of at least this size are not merged.
LARGE_BYTES: Final = 128 * 1024 * 1024
# Fewer files of similar size are not merged yet, so that each row is rewritten only a few times.
MIN_FILES_TO_MERGE: Final = 16
_SMALLEST_BYTES: Final = 32 * 1024


def groups_to_merge(files: Iterable[ArchiveFile], today: date) -> Iterator[list[ArchiveFile]]:
    """Yield groups of files to merge, each of one topic and one day.

    A group has all small files of an earlier day, or at least MIN_FILES_TO_MERGE files of similar
    size.
    """
    for small in _group_small_files(files):
        if small[0].date < today.isoformat() and len(small) > 1:
            yield small
            continue
        by_size: dict[int, list[ArchiveFile]] = defaultdict(list)
        for file in small:
            # Similar sizes: below 128 kB, below 1 MB, below 8 MB, and so on by factors of eight.
            by_size[max(file.bytes // _SMALLEST_BYTES, 1).bit_length() // 3].append(file)
        yield from (group for group in by_size.values() if len(group) >= MIN_FILES_TO_MERGE)


def compact_some(archive: Archive) -> int:
    """Merge the first group of `groups_to_merge`, if any; return how many fewer files exist."""
    group = next(groups_to_merge(archive.log.files.values(), datetime.now(UTC).date()), None)
    return merge(archive, group) if group else 0


def compact_all(archive: Archive) -> Iterator[tuple[list[ArchiveFile], int]]:
    """Merge the small files of each topic and day; yield each group and the result of `merge`."""
    archive.log.refresh()
    for small in list(_group_small_files(archive.log.files.values())):
        if len(small) > 1:
            yield small, merge(archive, small)


def merge(archive: Archive, files: list[ArchiveFile]) -> int:
    """Replace files by fewer ones in one log entry; return how many fewer files exist.

    Returns 0 if another process has merged one of the files first. Raises ArchiveError if the
    number of rows differs from the log.
    """
    new_count = max(1, ceil(sum(file.bytes for file in files) / LARGE_BYTES))
    entry = ArchiveLogEntry(remove=tuple(file.path for file in files))

    def attempt() -> int:
        if any(path not in archive.log.files for path in entry.remove):
            return 0
        rows = archive.read(files)
        rows = rows.coalesce(1) if new_count == 1 else rows.repartitionByRange(new_count, "id")
        with archive.stage(rows) as new_files:
            if sum(file.rows for file in new_files) != sum(file.rows for file in files):
                raise ArchiveError(
                    f"{files[0].path} and {len(files) - 1} more: row counts differ from the log"
                )
            while all(path in archive.log.files for path in entry.remove):
                if archive.log.commit(replace(entry, add=new_files)):
                    return len(files) - len(new_files)
                archive.log.refresh()
        return 0

    return archive.retry_reads(attempt)


def _group_small_files(files: Iterable[ArchiveFile]) -> Iterator[list[ArchiveFile]]:
    groups: dict[tuple[str, str], list[ArchiveFile]] = defaultdict(list)
    for file in files:
        if file.bytes < LARGE_BYTES:
            groups[file.topic, file.date].append(file)
    yield from groups.values()
