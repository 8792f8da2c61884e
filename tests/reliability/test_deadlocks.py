"""Forced deadlocks: PostgreSQL ends one of two, and in the end all is done once."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from psqlmessages import Node
from tests.exchanges.field import Bed, working
from tests.exchanges.field import Field as Exchanges
from tests.reliability.counts import counted, size
from tests.reliability.opponents import QUICK, Opponent, deadlocks
from tests.reliability.projects import django_at
from tests.sql.conftest import World

FAULT = "deadlock"
# It finds deadlocks sooner than others.
SERVER_SETTINGS = QUICK
RULES = (
    "psqlmessages W Topic T W 60",
    "psqlmessages W Queue Q W 60",
    "user2 B Topic T R 60",
    "user2 C Queue Q R 60",
)
PUBLISHED = """
    SELECT m.payload FROM psqlmessages_streammessage AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = 'T'
"""
ELEMENTS = "SELECT count(*) FROM psqlmessages_element"
MESSAGES = "LOCK TABLE psqlmessages_streammessage IN ACCESS EXCLUSIVE MODE"
# Who takes has elements and counts them.
COUNTS = "LOCK TABLE psqlmessages_queuecount IN ACCESS EXCLUSIVE MODE"
HELD = "SELECT FROM psqlmessages_element FOR UPDATE"
SUBSCRIPTION = "SELECT FROM psqlmessages_subscription WHERE ident = 'B' FOR UPDATE"
STAGED = "LOCK TABLE messages.staged, psqlmessages_topic IN ACCESS EXCLUSIVE MODE"


def faults(seen: list[str], number: int) -> tuple[int, int]:
    """How many of so many messages were lost, and how many were had again."""
    different = len(set(seen))
    return number - different, len(seen) - different


def test_a_reader_of_a_stream_reads_again(own_world: World) -> None:
    world = own_world
    world.rules(*RULES)
    seen: list[str] = []
    before = deadlocks(world)
    rounds = size(3, 20)

    with Node("B", world.server.url("user2")) as node:
        messages = node.subscribe("T")

        def read() -> None:
            seen.extend(message.body for message in islice(messages, 10))

        for number in range(rounds):
            # Who reads has the table, and waits for its own position.
            with Opponent(world, holds=SUBSCRIPTION, wants=MESSAGES) as opponent:
                world.owner.ok("publish_many", "W", "T", [f"{number}.{n}" for n in range(10)])
                reading = threading.Thread(target=read)
                reading.start()
            reading.join(30)
            assert opponent.has_met
        node.stop()
        assert list(messages) == []
    ended = deadlocks(world) - before
    lost, doubled = faults(seen, 10 * rounds)
    counted(
        FAULT, "a reader of a stream",
        messages=10 * rounds, deadlocks=ended, lost=lost, doubled=doubled,
    )  # fmt: skip
    assert (lost, doubled) == (0, 0)
    assert ended >= rounds


def test_a_consumer_tries_again(own_world: World) -> None:
    world = own_world
    world.rules(*RULES)
    seen: list[str] = []
    before = deadlocks(world)
    rounds = size(3, 20)
    with Node("C", world.server.url("user2")) as node:
        messages = node.consume("Q", batch=10)

        def take() -> None:
            seen.extend(message.body for message in islice(messages, 10))

        for number in range(rounds):
            world.owner.ok("push_many", "W", "Q", [f"{number}.{n}" for n in range(10)])
            with Opponent(world, holds=COUNTS, wants=HELD) as opponent:
                taking = threading.Thread(target=take)
                taking.start()
            taking.join(30)
            assert opponent.has_met
        node.stop()
        assert list(messages) == []
    ended = deadlocks(world) - before
    lost, doubled = faults(seen, 10 * rounds)
    left = world.owner.query(ELEMENTS)
    counted(
        FAULT, "a consumer",
        messages=10 * rounds, deadlocks=ended, lost=lost, doubled=doubled, left=left,
    )  # fmt: skip
    assert (lost, doubled, left) == (0, 0, 0)
    assert ended >= rounds


@pytest.mark.django_db(transaction=True)
def test_an_exchange_does_it_again(own_world: World) -> None:
    world = own_world
    before = deadlocks(world)
    rounds = size(3, 20)
    with django_at(world.server):
        bed = Bed(world.server)
        exchanges = Exchanges({"default": bed})
        bodies: list[str] = []
        try:
            exchanges.define(x={"src": "a", "dst": ["b", "c"]})
            for number in range(rounds):
                part = [f"{number}.{n}" for n in range(100)]
                bed.push_many("a", part)
                bodies += part
                with Opponent(world, holds=COUNTS, wants=HELD) as opponent, working():
                    exchanges.until_idle(60)
                assert opponent.has_met
            found = [bed.bodies(queue) for queue in "bc"]
        finally:
            exchanges.close()
    ended = deadlocks(world) - before
    lost = sum(len(set(bodies) - set(each)) for each in found)
    doubled = sum(len(each) - len(set(each)) for each in found)
    counted(FAULT, "an exchange", elements=len(bodies), deadlocks=ended, lost=lost, doubled=doubled)
    assert (lost, doubled) == (0, 0)
    assert ended >= rounds


def test_a_commit_of_the_sink_is_made_again(
    own_world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("pyarrow")
    from psqlmessages.pipeline import committing, staging
    from tests.pipeline.test_sink_commits import batches, writer

    world = own_world
    world.rules("user1 pipeline Topic T W 60", *RULES)
    world.program("user2").read("B", "T")
    path = tmp_path_factory.mktemp("dsn") / "user1"
    path.touch(mode=0o600)
    path.write_text(world.server.url("user1"))
    before = deadlocks(world)
    rounds = size(2, 10)
    stream = writer({"topic": "T", "dsnFile": str(path)})
    bodies: list[str] = []
    try:
        for number in range(rounds):
            part = [f"{number}.{n}" for n in range(10)]
            staged = stream.write(batches(*part))
            bodies += part
            with Opponent(world, holds=MESSAGES, wants=STAGED) as opponent:
                stream.commit([staged], number)
            assert opponent.has_met
    finally:
        committing.close()
        staging.close()
    ended = deadlocks(world) - before
    found = [body for (body,) in world.owner.connection.execute(PUBLISHED)]
    lost, doubled = len(set(bodies) - set(found)), len(found) - len(set(found))
    counted(
        FAULT, "a commit of Spark's sink",
        rows=len(bodies), deadlocks=ended, lost=lost, doubled=doubled,
    )  # fmt: skip
    assert (lost, doubled) == (0, 0)
    assert ended >= rounds
