"""The archive's job on a real database: what it keeps, compares and publishes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command
from django.db import connection
from pytest_django.plugin import DjangoDbBlocker

from psqlmessages import archiving
from psqlmessages.pipeline import archive_replay
from psqlmessages.pipeline.archive import Archive
from psqlmessages.pipeline.archive_job import ArchiveJob
from psqlmessages.pipeline.archive_layout import ArchiveFault
from psqlmessages.pipeline.archive_replay import Plan, plan_between
from psqlmessages.pipeline.archive_verify import verify
from psqlmessages.pipeline.errors import MessagesGone
from tests.sql.conftest import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "ORDERS/2026=%"
TEN_MEGABYTES = "x" * 10_000_000
BODIES = ("", "plain", "snö ☃ 𝄞 \\ \n\t'\"", '{"of":"json"}', "AAECAwQF", TEN_MEGABYTES)
ENCODINGS = (None, None, None, "json", "b64", None)
KEPT = "SELECT body, enc FROM messages.stored WHERE topic = %s ORDER BY id"
POSITION = """
    SELECT position FROM psqlmessages_subscription WHERE ident = 'pipeline.archive' AND topic = %s
"""
FORGET = "DELETE FROM psqlmessages_streammessage WHERE id = (SELECT min(id) FROM messages.stored)"


@pytest.fixture(autouse=True)
def django(django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Django's connection, which commits: Spark reads by others."""
    with django_db_blocker.unblock():
        yield
        connection.close()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


@pytest.fixture
def owner(world: World) -> str:
    """The role of the pipeline, with the rules it needs; KEEPER keeps the topics' messages."""
    role: str = world.owner.query("SELECT session_user::text")
    world.rule(role, "pipeline.*", "Topic", "*", "RW", 60)
    for topic in (TOPIC, "AGAIN", "OTHER"):
        world.rule(role, "SHOP", "Topic", topic, "RW", 60)
        world.owner.ok("subscribe", "SHOP", topic, 3600)
    return role


@pytest.fixture
def published(world: World, owner: str) -> list[tuple[str, str | None]]:
    """Messages of all kinds in a topic that is marked."""
    assert archiving.mark(TOPIC)
    for body, enc in zip(BODIES, ENCODINGS, strict=True):
        world.owner.ok("publish", "SHOP", TOPIC, body, enc)
    return list(zip(BODIES, ENCODINGS, strict=True))


@pytest.fixture
def run(spark: SparkSession, root: str) -> Iterator[Callable[..., Archive]]:
    """Run the job until all is read that is there, as --once does; the archive."""
    jobs: list[ArchiveJob] = []

    def once(*topics: str, allows_gaps: bool = False) -> Archive:
        job = ArchiveJob(spark, root, topics, allows_gaps=allows_gaps)
        jobs.append(job)
        names = job.topics()
        job.prepare(names)
        job.started(names, f"{root}/_checkpoint", {"availableNow": True}).awaitTermination()
        return job.archive

    yield once
    for job in jobs:
        job.close()


def texts(world: World, topic: str) -> list[tuple[Any, ...]]:
    return world.owner.connection.execute(KEPT, [topic]).fetchall()


def test_bodies_of_all_kinds_are_archived_compared_and_published_again_as_they_are(
    world: World, published: list[Any], run: Callable[..., Archive]
) -> None:
    archive = run()
    found = archive.rows().orderBy("id").select("body", "enc").collect()
    assert [tuple(row) for row in found] == published
    (whole,) = verify(archive)
    assert whole.is_equal
    assert (whole.topic, whole.kept.rows) == (TOPIC, len(BODIES))
    plan = plan_between(Plan(TOPIC, "AGAIN", "pipeline.archive"), None, None)
    for _ in range(2):
        assert list(archive_replay.replay(archive, "first", plan)) == [(0, 1), (1, 1)]
        assert texts(world, "AGAIN") == published
    with pytest.raises(ArchiveFault, match="another replay"):
        list(archive_replay.replay(archive, "first", plan_between(plan, 2, None)))
    with pytest.raises(ArchiveFault, match="nothing is archived of ODRERS"):
        list(verify(archive, [TOPIC, "ODRERS"]))
    world.owner.connection.execute(
        "UPDATE psqlmessages_streammessage SET sender = 'SHOPPER' WHERE payload = 'plain'"
        " AND topic_id = (SELECT id FROM psqlmessages_topic WHERE name = %s)", [TOPIC]
    )  # fmt: skip
    whole, part = verify(archive)
    assert not whole.is_equal
    # One message, or two if ids between were drawn in vain: a range is one of ids.
    there, changed = world.owner.connection.execute(
        "SELECT count(*), max(id) FILTER (WHERE body = 'plain') FROM messages.stored"
        " WHERE topic = %s AND id > %s AND id <= %s", [TOPIC, part.low, part.high]
    ).fetchone() or (0, None)  # fmt: skip
    assert changed is not None
    assert (part.kept.rows, part.archived.rows) == (there, there)


def test_the_mark_moves_once_the_files_are_safe_and_only_then(
    world: World, published: list[Any], run: Callable[..., Archive],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
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


def test_messages_that_went_unarchived_are_an_error_until_that_is_allowed(
    world: World, published: list[Any], run: Callable[..., Archive]
) -> None:
    last = run().log.positions[TOPIC]
    assert archiving.unmark(TOPIC)
    world.owner.ok("publish", "SHOP", TOPIC, "nobody keeps it")
    gone = world.owner.query("SELECT max(id) FROM messages.stored")
    world.owner.connection.execute("DELETE FROM psqlmessages_streammessage")
    world.owner.connection.execute(
        "INSERT INTO messages._stream_last SELECT id, %s, now() FROM psqlmessages_topic"
        " WHERE name = %s ON CONFLICT (topic_id) DO UPDATE SET id = excluded.id",
        [gone, TOPIC],
    )
    assert archiving.mark(TOPIC)
    world.owner.ok("publish", "SHOP", TOPIC, "marked again")
    with pytest.raises(MessagesGone, match=f"between {last} and {gone}"):
        run()
    archive = run(allows_gaps=True)
    assert archive.rows().where("body = 'marked again'").count() == 1
    assert all(each.is_equal for each in verify(archive))


def test_topics_named_are_marked_also_later_ones_and_a_new_mark_ends_a_query(
    world: World, owner: str, spark: SparkSession, run: Callable[..., Archive], root: str
) -> None:
    for topic in (TOPIC, "OTHER"):
        world.owner.ok("publish", "SHOP", topic, "one")
    assert run("OTH*").log.positions.keys() == {"OTHER"}
    assert archiving.marked() == ["OTHER"]
    with closing(ArchiveJob(spark, root, ("OTH*", "NEW*"))) as job:
        job.prepare(job.topics())
        world.rule(owner, "SHOP", "Topic", "NEW1", "W", 60)
        # Nobody has marked it yet: it is to be there still when the job comes to it.
        world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 1000")
        world.owner.ok("publish", "SHOP", "NEW1", "one")
        query = job.started(job.topics(), f"{root}/_checkpoint", {"availableNow": True})
        query.awaitTermination()
        assert archiving.marked() == ["NEW1", "OTHER"]
        assert world.owner.query(POSITION, "NEW1") == job.archive.log.positions["NEW1"]
    with closing(ArchiveJob(spark, root, ())) as job:
        marked = job.topics()
        query = job.started(marked, f"{root}/_checkpoint", {"processingTime": "0 seconds"})
        with job.ended_by_change(query, marked) as is_changed:
            archiving.mark(TOPIC)
            assert query.awaitTermination(200)  # type: ignore[arg-type]
        assert is_changed()
        assert job.topics() == ["NEW1", TOPIC, "OTHER"]


def test_a_topic_marked_by_command_keeps_its_messages_whatever_others_have_read(
    world: World, owner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def archive(*words: str) -> str:
        call_command("psqlmessages", "pipeline", "archive", *words)
        return capsys.readouterr().out

    def kept() -> int:
        world.owner.query("SELECT messages._prune_streams()")
        return len(texts(world, TOPIC))

    assert archive("mark", TOPIC) == f"{TOPIC} is marked\n"
    assert archive("mark", TOPIC) == f"{TOPIC} is marked, as it was\n"
    assert archive("marks") == f"{TOPIC}\n"
    world.owner.ok("publish", "SHOP", TOPIC, "one")
    world.owner.ok("unsubscribe", "SHOP", TOPIC)
    assert kept() == 1
    assert archive("unmark", TOPIC) == f"{TOPIC} is not marked any more\n"
    assert (archive("marks"), kept()) == ("", 0)
