"""Staging: rows copied in by several connections become messages or elements once, all or none."""

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.sql.simultaneous import blocked

COPY = "COPY messages.staged (staging, place, bodies, encs, headers, keys) FROM STDIN"
LEFT = "SELECT coalesce(sum(cardinality(bodies)), 0) FROM messages.staged"
BODIES = "SELECT array_agg(body ORDER BY id) FROM messages."
STORED = {"publish": BODIES + "list_stored('{T}')", "push": BODIES + "list_queued('{Q}')"}


class Loader:
    """A writer that stages and commits batches into topic T and queue Q."""

    def __init__(self, world: World, role: str = "user1") -> None:
        self.world = world
        self.program = world.program(role)

    def stage(self, *rows: str | Sequence[Any], by: Program | None = None) -> UUID:
        """Copy rows in, two in a chunk: bodies, or (body, enc, headers, key); their name."""
        staging = uuid4()
        whole = [(row, None, None, None) if isinstance(row, str) else row for row in rows]
        with (by or self.program).connection.cursor().copy(COPY) as copy:
            for place in range(0, len(whole), 2):
                chunk = zip(*whole[place : place + 2], strict=True)
                arrays = (list(each) for each in chunk)
                copy.write_row((staging, place, *(a if any(a) else None for a in arrays)))
        return staging

    def publish(self, batch: int, rows: int, *stagings: UUID, query: str = "q") -> dict[str, Any]:
        return self.program.call("publish_staged", "LOAD", "T", query, batch, list(stagings), rows)

    def push(self, batch: int, rows: int, *stagings: UUID, query: str = "q") -> dict[str, Any]:
        return self.program.call("push_staged", "LOAD", "Q", query, batch, list(stagings), rows)

    def stored(self, kind: str = "push") -> list[str]:
        """What is kept of T, or waits in Q."""
        return self.world.owner.query(STORED[kind]) or []

    def left(self) -> int:
        return int(self.world.owner.query(LEFT))


@pytest.fixture
def loader(world: World) -> Iterator[Loader]:
    """A writer with its rights; nothing was staged or committed before, nothing is removed."""
    world.execute("TRUNCATE messages.staged, messages._batch")
    world.execute("UPDATE messages._stream SET maintained_at = 'infinity'")
    world.rules("user1 LOAD Topic T W 10", "user1 LOAD Queue Q W 1", "user2 SUB Topic T R 10")
    yield Loader(world)
    world.execute("UPDATE messages._stream SET maintained_at = clock_timestamp()")


BOTH = pytest.mark.parametrize("kind", ["publish", "push"])


@BOTH
def test_rows_of_several_writers_come_in_their_order(loader: Loader, kind: str):
    first, second = loader.stage("a", "b"), loader.stage("c", "d", "e")
    answer = getattr(loader, kind)(0, 5, second, first)
    assert (answer["Err"], answer["Rows"]) == ("0", 5)
    assert loader.stored(kind) == ["c", "d", "e", "a", "b"]
    assert loader.left() == 0


@BOTH
def test_a_batch_is_committed_once_and_in_order(loader: Loader, kind: str):
    commit = getattr(loader, kind)
    commit(3, 1, loader.stage("one"))
    assert commit(3, 1, loader.stage("again")) == {"Err": "0", "Already": 1}
    assert loader.left() == 0
    assert commit(2, 1, loader.stage("of a checkpoint put back"))["Err"] == "65"
    assert loader.left() == 1
    assert commit(4, 1, loader.stage("two"))["Rows"] == 1
    assert commit(0, 1, loader.stage("of another query"), query="other")["Rows"] == 1
    assert loader.stored(kind) == ["one", "two", "of another query"]


@BOTH
def test_nothing_is_done_where_rows_are_missing(loader: Loader, kind: str):
    commit, staging = getattr(loader, kind), loader.stage("one")
    assert commit(0, 2, staging)["Err"] == "64"
    assert loader.stored(kind) == []
    # Nor is the batch taken for one that was committed, nor by a commit that is rolled back.
    with loader.program.connection.transaction(force_rollback=True):
        assert commit(0, 1, staging)["Rows"] == 1
    assert commit(0, 1, staging)["Rows"] == 1
    # A staging that is named twice counts once, one that was removed not at all.
    first, second, third = loader.stage("a"), loader.stage("b"), loader.stage("c", "d")
    assert loader.program.ok("unstage", str(third))["Rows"] == 2
    assert commit(1, 2, second, first, second, third)["Rows"] == 2
    assert loader.stored(kind) == ["one", "b", "a"]


@BOTH
def test_a_batch_committed_twice_at_once_is_committed_once(loader: Loader, kind: str):
    staging, copy = loader.stage("one"), loader.stage("one")
    second = Loader(loader.world)
    with loader.program.connection.transaction():
        assert getattr(loader, kind)(0, 1, staging)["Rows"] == 1
        second.program.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            getattr(second, kind)(0, 1, copy)
    assert getattr(second, kind)(0, 1, copy)["Already"] == 1
    assert loader.stored(kind) == ["one"]


@pytest.mark.parametrize("key", [None, "k"])
def test_rows_removed_while_a_push_waits_are_not_pushed(loader: Loader, key: str | None):
    staging = loader.stage(("one", None, None, key))
    loader.world.rules("user2 OTHER Queue Q W 1")
    maker, remover = loader.world.program("user2"), loader.world.program("user1")
    maker.execute("BEGIN")
    maker.ok("push", "OTHER", "Q", "makes the queue")

    def push() -> None:
        with pytest.raises(psycopg.Error, match="0 of 1 staged rows") as caught:
            loader.push(0, 1, staging)
        assert caught.value.sqlstate == "PM064"

    with blocked(loader.world, loader.program, push):
        assert remover.ok("unstage", [str(staging)])["Rows"] == 1
        maker.execute("COMMIT")
    # Nor is the batch taken for one that was committed.
    assert loader.push(0, 1, loader.stage(("again", None, None, key)))["Rows"] == 1
    assert loader.stored() == ["makes the queue", "again"]


@BOTH
def test_rows_and_batches_of_another_role_are_not_there(loader: Loader, kind: str):
    loader.world.rules("user2 LOAD Topic T W 10", "user2 LOAD Queue Q W 1")
    other = Loader(loader.world, "user2")
    theirs = other.stage("theirs")
    assert getattr(loader, kind)(0, 1, theirs)["Errstr"].startswith("0 of 1 staged rows")
    assert loader.program.ok("unstage", str(theirs))["Rows"] == 0
    # Nor what another role puts under a name of one's own.
    for batch, key in enumerate((None, "k")):
        mine = loader.stage((f"mine {batch}", None, None, key))
        with other.program.connection.cursor().copy(COPY) as copy:
            copy.write_row((mine, 0, ["theirs"], None, None, ["k2"]))
        assert getattr(loader, kind)(batch, 1, mine)["Rows"] == 1
    assert (loader.stored(kind), loader.left()) == (["mine 0", "mine 1"], 3)
    assert getattr(other, kind)(0, 1, theirs)["Rows"] == 1


@BOTH
def test_a_body_over_the_limit_is_refused_and_stays_staged(loader: Loader, kind: str):
    loader.world.execute("UPDATE messages._settings SET max_body_bytes = 8192")
    try:
        assert getattr(loader, kind)(0, 1, loader.stage("x" * 8193))["Err"] == "51"
    finally:
        loader.world.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")
    assert loader.left() == 1


def test_invalid_rows_are_refused_and_a_null_body_is_empty(loader: Loader):
    assert loader.push(0, 2, loader.stage("fine", ("x", None, None, "k" * 201)))["Err"] == "54"
    assert loader.push(0, 2, loader.stage("fine", ("x", None, "[]", None)))["Err"] == "63"
    assert loader.stored() == []
    assert loader.push(0, 1, loader.stage(("x", None, None, "k" * 200)))["Rows"] == 1
    loader.publish(0, 2, loader.stage((None, "b64", None, None), "x"), query="other")
    loader.push(1, 2, loader.stage((None, "b64", None, None), "y"))
    assert (loader.stored("publish"), loader.stored()) == (["", "x"], ["x", "", "y"])


def test_subscribers_are_woken_once_and_read_each_message_once(loader: Loader):
    subscriber = loader.world.program("user2")
    subscriber.ok("connect_stream", "SUB")
    subscriber.got("SUB", "T")
    subscriber.payloads()
    loader.publish(0, 4, loader.stage("a", "b"), loader.stage(('"c"', "json", None, None), "d"))
    found = [(row.payload, row.enc) for row in subscriber.read("SUB", "T")]
    assert found == [("a", None), ("b", None), ('"c"', "json"), ("d", None)]
    # As is a reader that waits for elements.
    loader.world.rules("user2 GET Queue Q R 1")
    subscriber.ok("queue_listen", "GET", "Q")
    loader.push(1, 1, loader.stage("a"))
    assert [header["Evt"] for header in subscriber.headers()] == ["published", "pushed"]


def test_readers_wait_for_a_batch_that_is_being_committed(loader: Loader):
    loader.world.execute("UPDATE psqlmessages_topic SET retention = 1000")
    subscriber = loader.world.program("user2")
    subscriber.got("SUB", "T")
    staging = loader.stage("a")
    with loader.program.connection.transaction():
        loader.publish(0, 1, staging)
        loader.world.owner.query("SELECT messages.publish('LOAD', 'T', 'x')")
        assert subscriber.got("SUB", "T") == []
    assert subscriber.got("SUB", "T") == ["a"]


def test_elements_have_their_headers_and_encoding(loader: Loader):
    loader.push(0, 2, loader.stage(("e30=", "b64", '{"lane": 1, "x-hop-count": 3}', None), "plain"))
    select = "SELECT body, enc, headers::json, hops, state FROM messages.queued ORDER BY id"
    first = ("e30=", "b64", {"lane": 1, "x-hop-count": 3}, 3, "available")
    assert loader.world.execute(select).fetchall() == [first, ("plain", None, {}, 0, "available")]


def test_a_key_that_was_pushed_before_or_stands_twice_is_pushed_once(loader: Loader):
    push = "SELECT messages.push('LOAD', 'Q', %s, key => %s)"
    known = loader.program.query(push, "known", "k1")["Id"]
    rows = [(f"body {key}", None, None, key) for key in ("k2", "k1", "k2", "")]
    assert loader.push(0, 4, loader.stage(*rows))["Rows"] == 2
    assert loader.stored() == ["known", "body k2", "body "]
    again = loader.program.query(push, "again", "k2")
    id_ = loader.world.owner.query("SELECT id FROM psqlmessages_element WHERE body = 'body k2'")
    assert (again["Id"], again["Already"], known < id_) == (id_, 1, True)


def test_rights_can_be_checked_beforehand(loader: Loader):
    nothing = (None, None, None, None)
    calls = (("publish_staged", "LOAD", "T", *nothing), ("push_staged", "LOAD", "Q", *nothing))
    assert [loader.program.call(*each) for each in calls] == [{"Err": "0", "Rows": 0}] * 2
    loader.world.execute("UPDATE messages.auth SET mode = 'R'")
    assert [loader.program.call(*each)["Err"] for each in calls] == ["3", "3"]


def test_old_batches_are_removed(loader: Loader):
    for query in ("once/1", "named", "once/2", "a year ago"):
        loader.publish(0, 1, loader.stage("x"), query=query)
    old, _ = loader.stage("old", "older"), loader.stage("young")
    age = "UPDATE messages.staged SET staged_at = staged_at - interval '25 h' WHERE staging = %s"
    loader.world.execute(age, (old,))
    age = "UPDATE messages._batch SET committed_at = committed_at - %s::interval WHERE query = %s"
    for query, ago in (("once/1", "25 h"), ("named", "25 h"), ("a year ago", "367 days")):
        loader.world.execute(age, (ago, query))
    loader.world.execute("SELECT messages._delete_expired_staged_rows()")
    # Rows after a day; a batch written once after a day, one of a query after a year.
    left = loader.world.owner.query("SELECT array_agg(query ORDER BY query) FROM messages._batch")
    assert (loader.left(), left) == (1, ["named", "once/2"])
