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


def test_topics_of_any_name_come_back_whole_to_every_reader(
    spark: SparkSession, archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    archive.write(batch(1, 56, *NAMES))
    assert archived(archive) == seen(root) == expected(1, 56, *NAMES)
    plain = spark.read.parquet(f"{root}/data")
    assert in_order(plain.collect()) == expected(1, 56, *NAMES)
    moments = {row["id"]: row["published_at"] for row in plain.collect()}
    assert all(
        moments[row[0]].replace(tzinfo=None) == row[-1].replace(tzinfo=None)
        for row in messages(1, 56, *NAMES)
    )


def test_files_lie_by_topic_and_by_day_in_utc(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    archive.write(batch(1, 8, "ORDERS"))
    folders = {path.parent.relative_to(root) for path in Path(root).rglob("data/**/*.parquet")}
    assert folders == {
        Path("data/stream=ORDERS/date=2026-11-20"), Path("data/stream=ORDERS/date=2026-11-21")
    }  # fmt: skip


def test_no_topic_leaves_its_folder_or_shares_it() -> None:
    folders = [folder(name) for name in (*NAMES, folder("a/b").removeprefix("stream="))]
    assert len({name.lower() for name in folders}) == len(folders) - 1, "ORDERS and orders"
    assert all(not set(name) & set("/\\%\n ") and len(name) < 100 for name in folders)


def test_a_batch_that_comes_again_adds_nothing(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    archive.write(batch(1, 20, "A", "B"))
    archive.write(batch(1, 20, "A", "B"))
    archive.write(batch(11, 30, "A", "B"))
    assert seen(root) == expected(1, 30, "A", "B")


def test_what_was_cut_off_before_its_entry_has_not_happened(
    archive: Archive, batch: Callable[..., DataFrame], root: str, cut: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    archive.write(batch(1, 10, "A"))
    cut("create")
    with pytest.raises(Cut):
        archive.write(batch(11, 20, "A"))
    monkeypatch.undo()
    again = Archive.made(archive.spark, root, CLUSTER)
    assert seen(root) == archived(again) == expected(1, 10, "A")
    again.write(batch(11, 20, "A"))
    assert seen(root) == expected(1, 20, "A")


def test_what_was_cut_off_after_its_entry_is_finished_by_whoever_comes_next(
    archive: Archive, batch: Callable[..., DataFrame], root: str, cut: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cut("move")
    with pytest.raises(Cut):
        archive.write(batch(1, 10, "A"))
    assert seen(root) == []
    monkeypatch.undo()
    again = Archive.opened(archive.spark, root)
    assert seen(root) == archived(again) == expected(1, 10, "A")
    again.write(batch(1, 20, "A"))
    assert seen(root) == expected(1, 20, "A")


def test_two_that_write_the_same_at_once_write_it_once(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    other = Archive.made(archive.spark, root, CLUSTER)
    archive.write(batch(1, 10, "A", "B"), guard=lambda: other.write(batch(1, 4, "A", "B")))
    assert seen(root) == archived(archive) == expected(1, 10, "A", "B")


def test_a_guard_that_refuses_leaves_the_archive_as_it_was(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    def refuse() -> None:
        raise Cut

    with pytest.raises(Cut):
        archive.write(batch(1, 10, "A"), refuse)
    assert seen(root) == archived(archive) == []


def test_compaction_makes_one_file_of_a_day_and_loses_nothing(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    for number in range(3):
        archive.write(batch(10 * number + 1, 10 * number + 10, "A", "b/c", parts=2))
    assert [len(small) for small, _ in archive_compaction.compact_all(archive)] == [6] * 2
    assert seen(root) == archived(archive) == expected(1, 30, "A", "b/c")
    assert len(archive.log.files) == len(list(Path(root).rglob("data/**/*.parquet"))) == 2


def test_a_compaction_that_is_cut_off_never_doubles_and_is_finished_by_the_next(
    archive: Archive, batch: Callable[..., DataFrame], root: str, cut: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for number in range(2):
        archive.write(batch(10 * number + 1, 10 * number + 10, "A"))
    cut("move")
    with pytest.raises(Cut):
        list(archive_compaction.compact_all(archive))
    rows = seen(root)
    assert len(rows) == len(set(rows))
    monkeypatch.undo()
    again = Archive.opened(archive.spark, root)
    assert seen(root) == archived(again) == expected(1, 20, "A")


def test_a_job_and_a_compaction_go_on_side_by_side(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    for number in range(2):
        archive.write(batch(10 * number + 1, 10 * number + 10, "A"))
    other = Archive.opened(archive.spark, root)
    archive.write(
        batch(21, 30, "A"), guard=lambda: [*archive_compaction.compact_all(other)] and None
    )
    assert list(archive_compaction.compact_all(other))
    archive.write(batch(31, 40, "A"))
    assert seen(root) == archived(archive) == expected(1, 40, "A")


def test_a_merge_of_files_that_others_have_merged_does_nothing(
    archive: Archive, batch: Callable[..., DataFrame], root: str
) -> None:
    for number in range(2):
        archive.write(batch(10 * number + 1, 10 * number + 10, "A"))
    other = Archive.opened(archive.spark, root)
    files = [file for file in other.log.files.values() if file.date == "2026-11-21"]
    assert list(archive_compaction.compact_all(archive))
    assert archive_compaction.merge(other, files) == 0
    assert seen(root) == expected(1, 20, "A")


def test_a_look_at_files_that_others_merge_meanwhile_is_taken_again(
    archive: Archive, batch: Callable[..., DataFrame]
) -> None:
    for number in range(2):
        archive.write(batch(10 * number + 1, 10 * number + 10, "A"))
    other = Archive.opened(archive.spark, archive.log.folder.root)
    assert list(archive_compaction.compact_all(archive))
    assert other.looked_at(lambda: archived(other)) == expected(1, 20, "A")


def test_the_log_is_read_from_its_last_snapshot_on(
    archive: Archive, batch: Callable[..., DataFrame], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_log, "_ENTRIES_PER_SNAPSHOT", 2)
    monkeypatch.setattr(archive_log, "_DAY_SECONDS", -1)
    archive.write(batch(1, 10, "A"))
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


def test_an_archive_of_another_database_is_refused(archive: Archive, root: str) -> None:
    with pytest.raises(ArchiveFault, match=CLUSTER):
        Archive.made(archive.spark, root, "1/2")


def test_a_folder_that_is_no_archive_is_refused(spark: SparkSession, root: str) -> None:
    with pytest.raises(ArchiveFault, match="there is no archive"):
        Archive.opened(spark, root)
    Path(root, "data").mkdir(parents=True)
    with pytest.raises(ArchiveFault, match="is no archive's"):
        Archive.made(spark, root, CLUSTER)


def test_a_path_that_spark_would_take_for_a_pattern_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ArchiveFault, match=r"cannot hold \*"):
        Archive.opened(spark, "/tmp/*")  # noqa: S108 - never made
