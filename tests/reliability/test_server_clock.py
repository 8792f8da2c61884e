"""The server's own clock is put forward and back: what is under way keeps its order, and lives."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from time import monotonic

import pytest
import pytest_django

from psqlmessages import Node
from tests.conftest import TestedServer
from tests.exchanges.field import Bed, Field, working
from tests.reliability import clock_flow
from tests.reliability.clock_flow import Flow
from tests.reliability.counts import counted, size
from tests.reliability.own_sites import own_site
from tests.reliability.server_clock import ServerClock, server_clock
from tests.rest.callers import Caller, bearer
from tests.sql.conftest import World
from tests.web.sockets import Visitor

FAULT = "a clock jumps"
PART = 20
PARTS = size(15, 150)
TEN_MINUTES, DAY = timedelta(minutes=10), timedelta(days=1)
NONE = timedelta()
# How wrong it is, from one part of the work to the next.
CLOCKS = {
    "put forward by 10 minutes": (NONE, TEN_MINUTES),
    "put back by 10 minutes": (NONE, -TEN_MINUTES),
    "jumping by 10 minutes": (TEN_MINUTES, NONE, -TEN_MINUTES, NONE),
}
RULES = (
    "user1 WRITER Topic NEWS W 3600", "user2 READER Topic NEWS R 3600",
    "user1 WRITER Queue Q W 3600", "user2 READER Queue Q R 3600",
    "user1 WRITER Topic LIVE W 3600", "user2 READER Topic LIVE R 3600",
    "user1 DYING Topic LIVE W 3600",
)  # fmt: skip
PATIENCE = timedelta(seconds=60)
HOUR = timedelta(hours=1)
# Much further than what leases and subscriptions last.
JUMPS = (HOUR, NONE, -HOUR, NONE, DAY, HOUR, NONE, -DAY, NONE, DAY, -DAY, NONE)
BACK = {"an hour": HOUR, "a day": DAY}
AT_EACH, ROUNDS = size(10, 100), size(1, 3)
# The second they last, one until housekeeping comes, and a busy machine.
SOON_SECONDS = 20
# What is stuck waits for an hour; after so long without anything new, it is.
REST_SECONDS = 30
NOW = "SELECT clock_timestamp()"
SESSIONS = "SELECT count(*) FROM psqlmessages_session"


@pytest.fixture(scope="module")
def clock(own: TestedServer) -> Iterator[ServerClock]:
    with server_clock() as clock:
        clock.deceive(own.server)
        yield clock
        own.server.stop("immediate")


@pytest.fixture
def world(clock: ServerClock, own_world: World) -> World:
    clock.put(NONE)
    own_world.rules(*RULES)
    return own_world


def wrong_by(world: World) -> timedelta:
    """How wrong the server's clock is, to the minute."""
    server: datetime = world.owner.query(NOW)
    return timedelta(minutes=round((server - datetime.now(server.tzinfo)).total_seconds() / 60))


@pytest.mark.parametrize("kind", CLOCKS)
def test_what_is_under_way_goes_on(world: World, clock: ServerClock, kind: str) -> None:
    differences = CLOCKS[kind]
    hour = timedelta(hours=1)
    read: list[int] = []
    done: list[int] = []
    live: list[int] = []
    ghosts = 0
    with (
        Node("WRITER", world.server.url("user1")) as writer,
        Node("READER", world.server.url("user2")) as reader,
    ):
        reader.topic_listen("LIVE")
        writer.topic_notify("LIVE")
        messages = reader.subscribe("NEWS", timeout=hour)
        for part in range(PARTS):
            numbers = range(part * PART, (part + 1) * PART)
            writer.push_many("Q", numbers)
            # Held over the jump.
            taken = reader.reserve("Q", PART, duration=hour)
            difference = differences[part % len(differences)]
            clock.put(difference)
            assert wrong_by(world) == difference
            writer.publish_many("NEWS", numbers)
            writer.topic_send("LIVE", part)
            read += [message.body for message in islice(messages, PART)]
            assert all(reader.commit(*taken))
            done += [element.body for element in taken]
            live += [heard(reader, "LIVE")]
            ghosts += abs(world.owner.query(SESSIONS) - 2)
        told = crashes(world, clock, reader, differences)
    total = PART * PARTS
    counted(
        FAULT, f"the server's clock, {kind}", messages=2 * total,
        lost=2 * total - len({*read}) - len({*done}),
        doubled=len(read) + len(done) - len({*read}) - len({*done}),
        out_of_order=sum(body != place for place, body in enumerate(read)),
        live_messages=len(live), sessions_ended_wrongly=ghosts, crashes_told=told,
    )  # fmt: skip
    assert read == sorted(done) == list(range(total))
    assert live == list(range(PARTS))
    assert (ghosts, told) == (0, len(differences))


def heard(node: Node, topic: str) -> int:
    """Wait for the next message of a topic."""
    for message in node.messages(timeout=PATIENCE):
        if message.type == "Topic" and message.to == topic:
            return int(message.body)
    raise AssertionError("nothing came")


def crashes(
    world: World, clock: ServerClock, reader: Node, differences: tuple[timedelta, ...]
) -> int:
    """Let a node die at each jump; how often its crash was told."""
    told = 0
    for difference in differences:
        dying = world.node("user1", "DYING")
        dying.ok("topic_notify", "LIVE")
        clock.put(difference)
        world.kill(dying)
        told += any(
            (message.event, message.ident) == ("crash", "DYING")
            for message in reader.messages(timeout=PATIENCE)
        )
    # Whatever was told twice comes before this.
    world.node("user1", "DYING").ok("topic_notify", "LIVE")
    for message in reader.messages(timeout=PATIENCE):
        told += message.event == "crash"
        if message.event == "topic_notify":
            return told
    raise AssertionError("nothing came")


def test_put_forward_it_ends_leases_and_delays_but_no_subscription(
    world: World, clock: ServerClock
) -> None:
    writer, reader = world.program("user1"), world.program("user2")
    reader.read("READER", "NEWS", 60)
    writer.ok("push", "WRITER", "Q", "leased")
    writer.ok("push", "WRITER", "Q", "delayed", None, None, None, 3600)
    (leased,) = reader.elements("reserve", "READER", "Q", 1, 3600)
    assert leased.body == "leased"
    assert reader.elements("pop", "READER", "Q", 10) == []
    early: list[str] = []
    for ahead in (DAY, 2 * DAY, 2 * DAY + HOUR):
        clock.put(ahead)
        writer.ok("publish", "WRITER", "NEWS", str(ahead))
        # Housekeeping sees the clock.
        writer.ok("evaluate")
        early += [row.body for row in reader.elements("pop", "READER", "Q", 10)]
    streamed = reader.got("READER", "NEWS", 60)
    is_committed = reader.ok("commit", "READER", [leased.lease])["Done"]
    counted(
        FAULT, "the server's clock, put forward by days: who is not reading at that moment",
        messages=3, lost=3 - len(streamed), leases_and_delays_ended_early=len(early),
    )  # fmt: skip
    assert streamed == [str(ahead) for ahead in (DAY, 2 * DAY, 2 * DAY + HOUR)]
    # The lease is over, and its holder is told so.
    assert (sorted(early), is_committed) == (["delayed", "leased"], [False])


CAN_BE_TAKEN = """
    SELECT array_agg(body ORDER BY body) FROM psqlmessages_element
    WHERE available_at <= clock_timestamp()
"""
IS_OVER = """
    SELECT NOT EXISTS (SELECT FROM psqlmessages_elementkey WHERE expires_at > clock_timestamp())
        AND NOT EXISTS (SELECT FROM psqlmessages_subscription WHERE pinged_at > clock_timestamp())
"""


@pytest.mark.parametrize("back", BACK)
def test_put_back_nothing_lasts_longer_than_it_was_to(
    world: World, clock: ServerClock, back: str
) -> None:
    writer, reader = world.program("user1"), world.program("user2")

    def pushed(body: str, **more: object) -> dict[str, object]:
        given = [more.get(name) for name in ("headers", "mature", "delay")]
        return writer.ok("push", "WRITER", "Q", body, None, *given, 0, more.get("key"))

    clock.put(BACK[back])
    reader.read("READER", "NEWS", 60)
    pushed("leased")
    reader.elements("reserve", "READER", "Q", 1, 1)
    pushed("failed")
    (failed,) = reader.elements("reserve", "READER", "Q", 1, 60)
    reader.ok("rollback", "READER", 1.0, [failed.lease])
    pushed("renewed")
    (renewed,) = reader.elements("reserve", "READER", "Q", 1, 60)
    reader.elements("renew", "READER", "Q", 1, [renewed.lease])
    pushed("delayed", delay=1)
    world.owner.connection.execute("UPDATE psqlmessages_queue SET key_timeout = 1")
    first = pushed("once", key="k")["Id"]
    writer.ok("evaluate")
    clock.put(NONE)
    began, end = monotonic(), monotonic() + PATIENCE.total_seconds()
    while len(taken := world.owner.query(CAN_BE_TAKEN) or []) < 5 and monotonic() < end:
        # Housekeeping is what a call brings with it.
        reader.ok("evaluate")
    waited = monotonic() - began
    assert sorted(taken) == ["delayed", "failed", "leased", "once", "renewed"]
    assert waited < SOON_SECONDS
    world.wait_for(IS_OVER)
    assert pushed("twice", key="k")["Id"] != first
    counted(
        FAULT,
        f"the server's clock, put back by {back}: leases and delays of 1 second",
        elements=5,
        seconds_until_all_could_be_taken=waited,
    )


@pytest.mark.django_db(transaction=True)
def test_readers_that_stay_connected_miss_nothing(
    own: TestedServer,
    world: World,
    clock: ServerClock,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    with own_site(own, tmp_path_factory.mktemp("site"), django_db_blocker) as site:
        bed = Bed(own)
        exchanges = Field({"default": bed})
        exchanges.define(x={"src": "exchange", "dst": ["exchanged"]})
        world.rules(*clock_flow.RULES)
        rest = Caller(site, bearer(site, "rita", "web.rest"))
        site.user("wanda", idents=["web.wanda"])
        visitor = Visitor(site, cookie=site.login("wanda"))
        visitor.ok("init", ident="web.wanda")
        visitor.ok("topic_listen", topic="NEWS")
        flow = Flow(world, bed, rest, visitor)
        with working(), flow.running():
            for difference in JUMPS * ROUNDS:
                clock.put(difference)
                flow.publish_more(AT_EACH)
            flow.rest()
            at_the_end = flow.missing()
            waited = flow.until_nothing_is_missing(REST_SECONDS)
            lost, doubled = flow.missing(), flow.doubled()
        exchanges.close()
        rest.close()
    for reader, number in lost.items():
        counted(
            FAULT, f"the server's clock, by an hour and a day, under load: {reader}",
            jumps=len(JUMPS) * ROUNDS, messages=flow.published, late=at_the_end[reader] - number,
            lost=number, doubled=doubled[reader], seconds_until_all_were_there=waited.get(reader),
        )  # fmt: skip
    assert flow.errors == []
    assert {name: number for name, number in lost.items() if number} == {}
    # Each once, and in order.
    for reader, got in flow.got.items():
        assert not reader.startswith("stream") or got == list(range(flow.published)), reader
