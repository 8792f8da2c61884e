"""Archives: each row once for every reader, whatever is cut off, replayed or compacted when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest
from pyspark.sql import Row
from pyspark.sql import functions as sf

from psqlmessages.pipeline import archive_compaction, archive_log
from psqlmessages.pipeline.archive import Archive
from psqlmessages.pipeline.archive_folder import Folder
from psqlmessages.pipeline.archive_layout import COLUMNS, ArchiveFault, File, folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CLUSTER = "7561234567890123456/16384"
MIDNIGHT = datetime(2026, 11, 21, tzinfo=UTC)
NAMES = (
    "ORDERS", "orders", "a/b", "a_b", "..", "2024", "x=y%2F", "snö☃ 𝄞", "q'\"\\", "L" * 100,
    "__HIVE_DEFAULT_PARTITION__", "date=2026-11-21", "/etc", "\n",
)  # fmt: skip
FIELDS = tuple(COLUMNS)
HOUR_MICROS = 60 * 60 * 1_000_000
MIDNIGHT_MICROS = int(MIDNIGHT.timestamp()) * 1_000_000


class Cut(Exception):
    """What a test lets happen in the place of a kill."""


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "an archive #1 %2F")


@pytest.fixture
def archive(spark: SparkSession, root: str) -> Archive:
    return Archive.made(spark, root, CLUSTER)


@pytest.fixture
def batch(spark: SparkSession) -> Callable[..., DataFrame]:
    """Rows with ids from one to another, of the topics in turn."""

    def make(first: int, last: int, *topics: str, parts: int = 1) -> DataFrame:
        moment = MIDNIGHT_MICROS - 1
        names = sf.array(*map(sf.lit, topics))
        return spark.range(first, last + 1, numPartitions=parts).select(
            "id",
            names[(sf.col("id") % len(topics)).cast("int")].alias("topic"),
            sf.lit("shop").alias("sender"),
            sf.format_string("body %d", "id").alias("body"),
            sf.when(sf.col("id") % 2 == 1, "json").alias("enc"),
            sf.lit(None).cast("string").alias("headers"),
            sf.timestamp_micros(sf.col("id") % 2 * HOUR_MICROS + moment).alias("published_at"),
        )

    return make


@pytest.fixture
def write(archive: Archive, batch: Callable[..., DataFrame]) -> Callable[..., None]:
    """Archive so many batches of ten rows, from a number on."""

    def write(count: int, *topics: str, first: int = 0, **given: Any) -> None:
        for number in range(first, first + count):
            archive.write(batch(10 * number + 1, 10 * number + 10, *topics, **given))

    return write


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a method of Folder raise from now on, as a kill would end it there."""

    def arm(method: str) -> None:
        def fail(*_: Any) -> None:
            raise Cut

        monkeypatch.setattr(Folder, method, fail)

    return arm


def messages(first: int, last: int, *topics: str) -> Iterable[tuple[Any, ...]]:
    for number in range(first, last + 1):
        moment = MIDNIGHT + timedelta(hours=number % 2, microseconds=-1)
        topic = topics[number % len(topics)]
        yield (number, topic, "shop", f"body {number}", (None, "json")[number % 2], None, moment)


def archived(archive: Archive) -> list[tuple[Any, ...]]:
    """What the archive says it holds, in order of id."""
    return in_order(archive.rows().collect())


def seen(root: str) -> list[tuple[Any, ...]]:
    """What a reader sees that knows nothing of archives, without Spark."""
    if not Path(root, "data").exists():
        return []
    return in_order(Row(**row) for row in pyarrow.parquet.read_table(f"{root}/data").to_pylist())


def in_order(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    found = [tuple(row[name] for name in FIELDS[:-1]) for row in rows]
    return sorted(found, key=lambda row: row[0])


def expected(first: int, last: int, *topics: str) -> list[tuple[Any, ...]]:
    return [row[:-1] for row in messages(first, last, *topics)]


def file(path: str, size: int, day: str = "2026-11-21", topic: str = "T") -> File:
    return File(path, topic, day, rows=1, first=1, last=1, bytes=size)


def test_topics_of_any_name_come_back_whole_to_every_reader_and_once(
    spark: SparkSession, archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    archive.write(batch(1, 56, *NAMES))
    assert archived(archive) == seen(root) == expected(1, 56, *NAMES)
    plain = spark.read.parquet(f"{root}/data").collect()
    assert in_order(plain) == expected(1, 56, *NAMES)
    moments = {row["id"]: row["published_at"].replace(tzinfo=None) for row in plain}
    assert moments == {row[0]: row[-1].replace(tzinfo=None) for row in messages(1, 56, *NAMES)}
    folders = {path.parent.relative_to(root) for path in Path(root).rglob("data/**/*.parquet")}
    assert len(folders) == len(NAMES)
    days = {"ORDERS": "2026-11-20", "orders": "2026-11-21"}
    assert folders > {Path("data", folder(name), f"date={day}") for name, day in days.items()}
    assert folder("ORDERS") == "stream=ORDERS"
    # A batch that comes again adds nothing, and of one that reaches further only what is beyond.
    archive.write(batch(1, 56, *NAMES))
    archive.write(batch(29, 84, *NAMES))
    assert seen(root) == expected(1, 84, *NAMES)


def test_no_topic_leaves_its_folder_or_shares_it() -> None:
    folders = [folder(name) for name in (*NAMES, folder("a/b").removeprefix("stream="))]
    assert len({name.lower() for name in folders}) == len(folders) - 1, "ORDERS and orders"
    assert all(not set(name) & set("/\\%\n ") and len(name) < 100 for name in folders)


def test_what_is_cut_off_has_not_happened_or_is_finished_by_whoever_comes_next(
    archive: Archive, write: Callable[..., None], batch: Callable[..., DataFrame], root: str,
    cut: Callable[[str], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(1, "A")
    cut("create")  # before its entry
    with pytest.raises(Cut):
        archive.write(batch(11, 20, "A"))
    monkeypatch.undo()
    again = Archive.made(archive.spark, root, CLUSTER)
    assert seen(root) == archived(again) == expected(1, 10, "A")
    cut("move")  # behind it
    with pytest.raises(Cut):
        again.write(batch(11, 20, "A"))
    assert seen(root) == expected(1, 10, "A")
    monkeypatch.undo()
    again = Archive.opened(archive.spark, root)
    assert seen(root) == archived(again) == expected(1, 20, "A")
    again.write(batch(1, 30, "A"))
    cut("move")
    with pytest.raises(Cut):
        list(archive_compaction.compact_all(again))
    rows = seen(root)
    assert len(rows) == len(set(rows))
    monkeypatch.undo()
    again = Archive.opened(archive.spark, root)
    assert seen(root) == archived(again) == expected(1, 30, "A")


def test_two_that_write_the_same_at_once_write_it_once_and_a_guard_may_refuse(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    def refuse() -> None:
        raise Cut

    with pytest.raises(Cut):
        archive.write(batch(1, 10, "A", "B"), refuse)
    assert seen(root) == archived(archive) == []
    other = Archive.made(archive.spark, root, CLUSTER)
    archive.write(batch(1, 10, "A", "B"), guard=lambda: other.write(batch(1, 4, "A", "B")))
    assert seen(root) == archived(archive) == expected(1, 10, "A", "B")


def test_compaction_makes_one_file_of_a_day_and_loses_nothing_whoever_else_is_there(
    archive: Archive, write: Callable[..., None], batch: Callable[..., DataFrame], root: str
) -> None:
    write(3, "A", "b/c", parts=2)
    other = Archive.opened(archive.spark, root)
    files = [file for file in other.log.files.values() if "stream=A/" in file.path]
    assert [len(small) for small, _ in archive_compaction.compact_all(archive)] == [6] * 2
    assert seen(root) == archived(archive) == expected(1, 30, "A", "b/c")
    assert len(archive.log.files) == len(list(Path(root).rglob("data/**/*.parquet"))) == 2
    # The other one knows of the files that were there: it looks again, and merges nothing twice.
    assert other.looked_at(lambda: archived(other)) == expected(1, 30, "A", "b/c")
    assert archive_compaction.merge(other, files) == 0
    archive.write(
        batch(31, 40, "A", "b/c"),
        guard=lambda: [*archive_compaction.compact_all(other)] and None,
    )
    assert list(archive_compaction.compact_all(other))
    write(1, "A", "b/c", first=4)
    assert seen(root) == archived(archive) == expected(1, 50, "A", "b/c")


def test_the_log_is_read_from_its_last_snapshot_on(
    archive: Archive, write: Callable[..., None], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_log, "_ENTRIES_PER_SNAPSHOT", 2)
    monkeypatch.setattr(archive_log, "_DAY_SECONDS", -1)
    write(1, "A")
    for number in range(4):
        archive.pass_over({"B": number})
    assert len(list(Path(root, "_log").glob("[0-9]*.json"))) < 4
    again = Archive.opened(archive.spark, root)
    assert again.log.files == archive.log.files
    assert again.log.positions == {"A": 10, "B": 3}


def test_many_files_of_one_size_are_due_and_those_of_days_before_as_soon_as_two() -> None:
    today = date(2026, 11, 21)
    small = [file(f"s{number}", 1_000) for number in range(archive_compaction.MANY)]
    larger = [file(f"l{number}", 10_000_000) for number in range(archive_compaction.MANY - 1)]
    huge = [file(f"h{number}", archive_compaction.LARGE_BYTES) for number in range(40)]
    before = [file(f"b{number}", 1_000 * number, "2026-11-20") for number in (1, 500)]
    assert list(archive_compaction.due([*small, *larger, *huge], today)) == [small]
    assert list(archive_compaction.due([*small[1:], *larger, *huge, *before], today)) == [before]
    assert not list(archive_compaction.due(before[1:], today))


def test_what_is_no_archive_of_this_database_is_refused(spark: SparkSession, root: str) -> None:
    with pytest.raises(ArchiveFault, match="there is no archive"):
        Archive.opened(spark, root)
    Path(root, "data").mkdir(parents=True)
    with pytest.raises(ArchiveFault, match="is no archive's"):
        Archive.made(spark, root, CLUSTER)
    Path(root, "data").rmdir()
    Archive.made(spark, root, CLUSTER)
    with pytest.raises(ArchiveFault, match=CLUSTER):
        Archive.made(spark, root, "1/2")
    # Spark would take it for a pattern.
    with pytest.raises(ArchiveFault, match=r"cannot hold \*"):
        Archive.opened(spark, "/tmp/*")  # noqa: S108 - never made
