"""Archives: each row once for every reader, whatever is cut off, replayed or compacted when."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet
import pytest
from django.core.management import call_command
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf

from psqlmessages import archive_marks
from psqlmessages.exceptions import TopicNotExistent
from psqlmessages.pipeline.archive import log, replay, store
from psqlmessages.pipeline.archive.archive_job import ArchiveJob
from psqlmessages.pipeline.archive.log import topic_folder
from psqlmessages.pipeline.archive.replay import ReplayPlan, limit_plan
from psqlmessages.pipeline.archive.store import Archive
from psqlmessages.pipeline.archive.verify import verify
from psqlmessages.pipeline.columns import TOPIC_SCHEMA
from psqlmessages.pipeline.errors import MessagesGone
from tests.sql.conftest import World

CLUSTER = "7561234567890123456/16384"
MIDNIGHT = datetime(2026, 11, 21)  # noqa: DTZ001 - of UTC, as Spark returns it
NAMES = (
    "ORDERS", "orders", "a/b", "a_b", "..", "2024", "x=y%2F", "snö☃ 𝄞", "q'\"\\", "L" * 100,
    "__HIVE_DEFAULT_PARTITION__", "date=2026-11-21", "/etc", "\n",
)  # fmt: skip
MIDNIGHT_MICROS = int(MIDNIGHT.replace(tzinfo=UTC).timestamp()) * 1_000_000
TOPIC = "ORDERS/2026=%"
BODIES = (
    ("", None), ("plain", None), ("snö ☃ 𝄞 \\ \n\t'\"", None), ('{"of":"json"}', "json"),
    ("AAECAwQF", "b64"), ("x" * 1_000_000, None),
)  # fmt: skip
POSITION = """
    SELECT position FROM psqlmessages_subscription WHERE ident = 'pipeline.archive' AND topic = %s
"""


class Cut(Exception):
    """Raised in the place of a kill."""


def cut(*_: Any) -> None:
    raise Cut


@contextmanager
def cut_at(method: str) -> Iterator[None]:
    with patch.object(log.ArchiveFolder, method, cut), pytest.raises(Cut):
        yield


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "an archive #1 %2F")


@pytest.fixture
def archive(spark: SparkSession, root: str) -> Archive:
    return Archive.open_or_create(spark, root, CLUSTER)


def batch(spark: SparkSession, first: int, last: int, *topics: str, parts: int = 1) -> DataFrame:
    """Return rows with these ids, of the topics in turn."""
    names = sf.array(*map(sf.lit, topics))
    return spark.range(first, last + 1, numPartitions=parts).select(
        "id",
        names[(sf.col("id") % len(topics)).cast("int")].alias("topic"),
        sf.lit("shop").alias("sender"),
        sf.format_string("body %d", "id").alias("body"),
        sf.when(sf.col("id") % 2 == 1, "json").alias("enc"),
        sf.lit(None).cast("string").alias("headers"),
        sf.timestamp_micros(sf.col("id") % 2 * 3_600_000_000 + MIDNIGHT_MICROS - 1)
        .alias("published_at"),
    )  # fmt: skip


def expected(last: int, *topics: str) -> list[tuple[Any, ...]]:
    return [
        (number, topics[number % len(topics)], "shop", f"body {number}", (None, "json")[number % 2],
         None, MIDNIGHT + timedelta(hours=number % 2, microseconds=-1))
        for number in range(1, last + 1)
    ]  # fmt: skip


def archived(archive: Archive) -> list[tuple[Any, ...]]:
    return in_order(archive.rows().collect())


def seen(root: str) -> list[tuple[Any, ...]]:
    """Read the files without the log of the archive and without Spark."""
    if not Path(root, "data").exists():
        return []
    return in_order(Row(**row) for row in pyarrow.parquet.read_table(f"{root}/data").to_pylist())


def in_order(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    *names, moment = TOPIC_SCHEMA.names
    found = [(*map(row.__getitem__, names), row[moment].replace(tzinfo=None)) for row in rows]
    return sorted(found, key=lambda row: row[0])


def file(path: str, size: int, day: str = "2026-11-21", topic: str = "T") -> log.ArchiveFile:
    return log.ArchiveFile(path, topic, day, rows=1, first=1, last=1, bytes=size)


@pytest.mark.nightly  # Spark needs half a minute
def test_topics_of_any_name_are_read_once(spark: SparkSession, archive: Archive, root: str):
    archive.write(batch(spark, 1, 56, *NAMES))
    assert archived(archive) == seen(root) == expected(56, *NAMES)
    assert in_order(spark.read.parquet(f"{root}/data").collect()) == expected(56, *NAMES)
    folders = {path.parent.relative_to(root) for path in Path(root).rglob("data/**/*.parquet")}
    assert len(folders) == len(NAMES)
    days = {"ORDERS": "2026-11-20", "orders": "2026-11-21"}
    assert folders > {Path("data", topic_folder(name), f"date={day}") for name, day in days.items()}
    assert topic_folder("ORDERS") == "stream=ORDERS"
    # A repeated batch adds nothing; of a longer one only the new rows are added.
    archive.write(batch(spark, 1, 56, *NAMES))
    archive.write(batch(spark, 29, 84, *NAMES))
    assert seen(root) == expected(84, *NAMES)


def test_no_topic_leaves_its_folder_or_shares_it():
    folders = [topic_folder(name) for name in (*NAMES, topic_folder("a/b").removeprefix("stream="))]
    assert len({name.lower() for name in folders}) == len(folders) - 1, "ORDERS and orders"
    assert all(not set(name) & set("/\\%\n ") and len(name) < 100 for name in folders)


def test_a_cut_write_is_undone_or_finished_later(spark: SparkSession, archive: Archive, root: str):
    archive.write(batch(spark, 1, 10, "A"))
    with cut_at("create"):  # before its entry
        archive.write(batch(spark, 11, 20, "A"))
    again = Archive.open_or_create(spark, root, CLUSTER)
    assert seen(root) == archived(again) == expected(10, "A")
    with cut_at("move"):  # behind it
        again.write(batch(spark, 11, 20, "A"))
    assert seen(root) == expected(10, "A")
    again = Archive.open(spark, root)
    assert seen(root) == archived(again) == expected(20, "A")
    again.write(batch(spark, 1, 30, "A"))
    with cut_at("move"):
        list(store.compact_all(again))
    rows = seen(root)
    assert len(rows) == len(set(rows))
    again = Archive.open(spark, root)
    assert seen(root) == archived(again) == expected(30, "A")


def test_two_writers_write_once_and_guards_refuse(spark: SparkSession, archive: Archive, root: str):
    rows, other = batch(spark, 1, 10, "A", "B"), Archive.open_or_create(spark, root, CLUSTER)
    with pytest.raises(Cut):
        archive.write(rows, cut)
    assert seen(root) == archived(archive) == []
    archive.write(rows, guard=lambda: other.write(batch(spark, 1, 4, "A", "B")))
    assert seen(root) == archived(archive) == expected(10, "A", "B")


@pytest.mark.nightly  # Spark needs half a minute
def test_compaction_loses_nothing_to_other_jobs(spark: SparkSession, archive: Archive, root: str):
    def rows(number: int, parts: int = 1) -> DataFrame:
        return batch(spark, 10 * number + 1, 10 * number + 10, "A", "b/c", parts=parts)

    for number in range(3):
        archive.write(rows(number, parts=2))
    other = Archive.open(spark, root)
    files = [file for file in other.log.files.values() if "stream=A/" in file.path]
    assert [len(small) for small, _ in store.compact_all(archive)] == [6] * 2
    assert seen(root) == archived(archive) == expected(30, "A", "b/c")
    assert len(archive.log.files) == len(list(Path(root).rglob("data/**/*.parquet"))) == 2
    # The other archive reads the log again, and merges nothing twice.
    assert other.retry_reads(lambda: archived(other)) == expected(30, "A", "b/c")
    assert store.merge(other, files) == 0
    archive.write(rows(3), guard=lambda: [*store.compact_all(other)] and None)
    assert list(store.compact_all(other))
    archive.write(rows(4))
    assert seen(root) == archived(archive) == expected(50, "A", "b/c")


def test_the_log_is_read_from_its_last_snapshot_on(archive: Archive, root: str, monkeypatch):
    monkeypatch.setattr(log, "_ENTRIES_PER_SNAPSHOT", 2)
    monkeypatch.setattr(log, "_DAY_SECONDS", -1)
    archive.write(batch(archive.spark, 1, 10, "A"))
    for number in range(4):
        archive.skip_to({"B": number})
    assert len(list(Path(root, "_log").glob("[0-9]*.json"))) < 4
    again = Archive.open(archive.spark, root)
    assert again.log.files == archive.log.files
    assert again.log.positions == {"A": 10, "B": 3}


def test_many_files_of_one_size_are_due_and_those_of_days_before_as_soon_as_two():
    today = date(2026, 11, 21)
    small = [file(f"s{number}", 1_000) for number in range(store.MIN_FILES_TO_MERGE)]
    larger = [file(f"l{number}", 10_000_000) for number in range(store.MIN_FILES_TO_MERGE - 1)]
    huge = [file(f"h{number}", store.LARGE_BYTES) for number in range(40)]
    before = [file(f"b{number}", 1_000 * number, "2026-11-20") for number in (1, 500)]
    assert list(store.groups_to_merge([*small, *larger, *huge], today)) == [small]
    assert list(store.groups_to_merge([*small[1:], *larger, *huge, *before], today)) == [before]
    assert not list(store.groups_to_merge(before[1:], today))


def test_an_archive_of_another_database_is_refused(spark: SparkSession, root: str):
    with pytest.raises(log.ArchiveError, match="there is no archive"):
        Archive.open(spark, root)
    Path(root, "data").mkdir(parents=True)
    with pytest.raises(log.ArchiveError, match="belongs to no archive"):
        Archive.open_or_create(spark, root, CLUSTER)
    Path(root, "data").rmdir()
    Archive.open_or_create(spark, root, CLUSTER)
    with pytest.raises(log.ArchiveError, match=CLUSTER):
        Archive.open_or_create(spark, root, "1/2")
    # Spark would read this path as a pattern.
    with pytest.raises(log.ArchiveError, match=r"must not contain \*"):
        Archive.open(spark, "/tmp/*")  # noqa: S108 - never made


@pytest.fixture
def owner(world: World, django: None) -> str:
    """The role of the pipeline with its rules; SHOP keeps the messages of the topics."""
    role: str = world.owner.query("SELECT session_user::text")
    world.rule(role, "pipeline.*", "Topic", "*", "RW", 60)
    for topic in (TOPIC, "AGAIN", "OTHER"):
        world.rule(role, "SHOP", "Topic", topic, "RW", 60)
        world.owner.ok("subscribe", "SHOP", topic, 3600)
    return role


@pytest.fixture
def published(world: World, owner: str) -> list[tuple[str, str | None]]:
    assert archive_marks.mark(TOPIC)
    with pytest.raises(TopicNotExistent):
        archive_marks.mark("NONE*")
    for body, enc in BODIES:
        world.owner.ok("publish", "SHOP", TOPIC, body, enc)
    return [*BODIES]


@pytest.fixture
def run(spark: SparkSession, root: str) -> Callable[..., Archive]:
    def once(*topics: str, allows_gaps: bool = False) -> Archive:
        with closing(ArchiveJob(spark, root, topics, allows_gaps=allows_gaps)) as job:
            names = job.topics()
            job.prepare(names)
            job.start(names, f"{root}/_checkpoint", {"availableNow": True}).awaitTermination()
            return job.archive

    return once


def texts(world: World, topic: str) -> list[tuple[Any, ...]]:
    kept = "SELECT body, enc FROM messages.stored WHERE topic = %s ORDER BY id"
    return world.execute(kept, [topic]).fetchall()


def test_bodies_of_all_kinds_are_archived_compared_and_published_again_as_they_are(
    world: World, published: list[Any], run: Callable[..., Archive]
):
    archive = run()
    found = archive.rows().orderBy("id").select("body", "enc").collect()
    assert [tuple(row) for row in found] == published
    (whole,) = verify(archive)
    assert whole.is_equal
    assert (whole.topic, whole.stored.rows) == (TOPIC, len(BODIES))
    plan = limit_plan(ReplayPlan(TOPIC, "AGAIN", "pipeline.archive"), None, None)
    for _ in range(2):
        assert list(replay.replay(archive, "first", plan)) == [(0, 1), (1, 1)]
        assert texts(world, "AGAIN") == published
    with pytest.raises(log.ArchiveError, match="another replay"):
        list(replay.replay(archive, "first", limit_plan(plan, 2, None)))
    with pytest.raises(log.ArchiveError, match="the archive has no messages of ODRERS"):
        list(verify(archive, [TOPIC, "ODRERS"]))
    world.execute(
        "UPDATE psqlmessages_streammessage SET sender = 'SHOPPER' WHERE payload = 'plain'"
        " AND topic_id = (SELECT id FROM psqlmessages_topic WHERE name = %s)", [TOPIC]
    )  # fmt: skip
    whole, part = verify(archive)
    assert not whole.is_equal
    # Ids are not always consecutive: the range may contain one or two messages.
    there, changed = world.execute(
        "SELECT count(*), max(id) FILTER (WHERE body = 'plain') FROM messages.stored"
        " WHERE topic = %s AND id > %s AND id <= %s", [TOPIC, part.low, part.high]
    ).fetchone()  # fmt: skip
    assert changed is not None
    assert (part.stored.rows, part.archived.rows) == (there, there)


def test_the_mark_moves_once_the_files_are_safe_and_only_then(
    world: World, published: list[Any], run: Callable[..., Archive], monkeypatch
):
    begin = world.owner.query(POSITION, TOPIC)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Archive, "write", fail)
        with pytest.raises(Exception, match="no space left"):
            run()
    assert world.owner.query(POSITION, TOPIC) == begin
    archive = run()
    assert world.owner.query(POSITION, TOPIC) == archive.log.positions[TOPIC] > begin


def test_gaps_fail_unless_allowed(world: World, published: list[Any], run: Callable[..., Archive]):
    last = run().log.positions[TOPIC]
    assert archive_marks.unmark(TOPIC)
    world.owner.ok("publish", "SHOP", TOPIC, "nobody keeps it")
    gone = world.owner.query("SELECT max(id) FROM messages.stored")
    world.execute("DELETE FROM psqlmessages_streammessage")
    world.execute(
        "INSERT INTO messages._last_removed_message SELECT id, %s, now() FROM psqlmessages_topic"
        " WHERE name = %s ON CONFLICT (topic_id) DO UPDATE SET id = excluded.id",
        [gone, TOPIC],
    )
    assert archive_marks.mark(TOPIC)
    world.owner.ok("publish", "SHOP", TOPIC, "marked again")
    with pytest.raises(MessagesGone, match=f"between {last} and {gone}"):
        run()
    archive = run(allows_gaps=True)
    assert archive.rows().where("body = 'marked again'").count() == 1
    assert all(each.is_equal for each in verify(archive))


def test_topics_named_are_marked_also_later_ones_and_a_new_mark_ends_a_query(
    world: World, owner: str, spark: SparkSession, run: Callable[..., Archive], root: str
):
    for topic in (TOPIC, "OTHER"):
        world.owner.ok("publish", "SHOP", topic, "one")
    assert run("OTH*").log.positions.keys() == {"OTHER"}
    assert archive_marks.list_marked() == ["OTHER"]
    with closing(ArchiveJob(spark, root, ("OTH*", "NEW*"))) as job:
        job.prepare(job.topics())
        world.rule(owner, "SHOP", "Topic", "NEW1", "W", 60)
        # Keep its message until the job marks it.
        world.execute("UPDATE psqlmessages_topic SET retention = 1000")
        world.owner.ok("publish", "SHOP", "NEW1", "one")
        query = job.start(job.topics(), f"{root}/_checkpoint", {"availableNow": True})
        query.awaitTermination()
        assert archive_marks.list_marked() == ["NEW1", "OTHER"]
        assert world.owner.query(POSITION, "NEW1") == job.archive.log.positions["NEW1"]
    with closing(ArchiveJob(spark, root, ())) as job:
        marked = job.topics()
        query = job.start(marked, f"{root}/_checkpoint", {"processingTime": "0 seconds"})
        with job.stop_on_mark_change(query, marked) as is_changed:
            archive_marks.mark(TOPIC)
            assert query.awaitTermination(200)
        assert is_changed()
        assert job.topics() == ["NEW1", TOPIC, "OTHER"]


def test_a_topic_marked_by_command_keeps_its_messages(world: World, owner: str, capsys):
    def archive(*words: str) -> str:
        call_command("psqlmessages", "pipeline", "archive", *words)
        return capsys.readouterr().out

    def kept() -> int:
        world.owner.query("SELECT messages._prune_streams()")
        return len(texts(world, TOPIC))

    assert archive("mark", TOPIC) == f"{TOPIC} is marked\n"
    assert archive("mark", TOPIC) == f"{TOPIC} was already marked\n"
    assert archive("marks") == f"{TOPIC}\n"
    world.owner.ok("publish", "SHOP", TOPIC, "one")
    world.owner.ok("unsubscribe", "SHOP", TOPIC)
    assert kept() == 1
    assert archive("unmark", TOPIC) == f"{TOPIC} is no longer marked\n"
    assert (archive("marks"), kept()) == ("", 0)
