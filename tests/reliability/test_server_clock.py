"""The server's own clock is put forward and back: what is under way keeps its order, and lives."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from time import monotonic
from typing import Any
from urllib.parse import quote

import pytest
import pytest_django

from project.postgres import Server
from psqlmessages import Node
from tests.conftest import TestedServer
from tests.exchanges.field import Bed, Field, working
from tests.reliability.clocks import FalseClock, false_clock
from tests.reliability.counts import counted, size
from tests.reliability.own_sites import own_site
from tests.reliability.work import EXACT, Reader, Work
from tests.rest.callers import Caller, at, bearer
from tests.sql.conftest import Program, World
from tests.web.sockets import Visitor

FAULT = "a clock jumps"
# It is started anew, with a library preloaded.
SERVER_SETTINGS = {"cluster_name": "wrong-clock"}
NONE, MINUTES = timedelta(), timedelta(minutes=10)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
JUMPS = (MINUTES, -MINUTES, HOUR, NONE, -HOUR, DAY, HOUR, NONE, -DAY, NONE, DAY, -DAY, NONE)
FEW = (MINUTES, -DAY, DAY, NONE)
BACK = {"an hour": HOUR, "a day": DAY}
RULES = (
    "user1 WRITER Topic NEWS W 3600", "user2 READER Topic NEWS R 3600",
    "user1 WRITER Queue Q W 3600", "user2 READER Queue Q R 3600",
    "user1 DYING Topic NEWS W 3600",
)  # fmt: skip
WEB_RULES = (
    f"{Server.owner} web.* Topic LIVE R 3600", f"{Server.owner} web.* Queue rest R 3600",
)  # fmt: skip
PATIENCE = timedelta(seconds=60)
# Much shorter than the jumps: what the clock says about it is wrong.
LEASE = timedelta(seconds=30)
# The second they last, one until housekeeping comes, and a busy machine.
SOON_SECONDS = 20
# What is stuck waits for an hour; after half a minute without anything new, it is.
LIMITS: Any = {"lease": LEASE, "rest_seconds": 30}


@pytest.fixture(scope="module")
def clock(own: TestedServer) -> Iterator[FalseClock]:
    with false_clock() as clock:
        clock.deceive(own.server)
        yield clock
        own.server.stop("immediate")


@pytest.fixture
def world(clock: FalseClock, own_world: World) -> World:
    clock.put(NONE)
    own_world.rules(*RULES)
    return own_world


def test_work_goes_on_and_crashes_are_told_once(world: World, clock: FalseClock) -> None:
    jumps = size(len(FEW), len(JUMPS))
    told = 0
    with (
        Work(world, *EXACT, "live messages of Node", **LIMITS) as work,
        Node("READER", world.server.url("user2")) as reader,
    ):
        reader.topic_listen("NEWS")
        for jump in (FEW, JUMPS)[jumps > len(FEW)]:
            dying = world.node("user1", "DYING")
            dying.ok("topic_notify", "NEWS")
            clock.put(jump)
            world.kill(dying)
            told += sum(is_crash(message) for message in until_crash(reader))
            work.go_on(size(20, 200))
        # Whatever was told twice comes before this.
        world.node("user1", "DYING").ok("topic_notify", "NEWS")
        for message in reader.messages(timeout=PATIENCE):
            told += is_crash(message)
            if message.event == "topic_notify" and message.ident == "DYING":
                break
        clients = world.owner.query("SELECT count(*) FROM psqlmessages_session")
    counted(
        FAULT, "the server's clock, by minutes, an hour and a day, under load", jumps=jumps,
        **work.counts(), crashes_told=told,
    )  # fmt: skip
    work.check()
    assert told == jumps
    # W, P, READER, DYING and each reader that is a node: none was ended wrongly.
    assert clients == 4 + len(work.nodes)
    assert all(node.counters.reconnects == 0 for node in work.nodes.values())


def is_crash(message: Any) -> bool:
    return (message.event, message.ident) == ("crash", "DYING")


def until_crash(node: Node) -> Iterator[Any]:
    """The messages up to the next crash."""
    for message in node.messages(timeout=PATIENCE):
        yield message
        if is_crash(message):
            return


@pytest.mark.nightly  # a site and an exchange; their database is the same as that of the others
@pytest.mark.django_db(transaction=True)
def test_a_site_and_an_exchange_miss_nothing(
    own: TestedServer,
    world: World,
    clock: FalseClock,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    with own_site(own, tmp_path_factory.mktemp("site"), django_db_blocker) as site:
        bed = Bed(own)
        exchanges = Field({"default": bed})
        exchanges.define(x={"src": "exchange", "dst": ["exchanged"]})
        world.rules(*RULES, *WEB_RULES)
        caller = Caller(site, bearer(site, "rita", "web.rest"))
        site.user("wanda", idents=["web.wanda"])
        visitor = Visitor(site, cookie=site.login("wanda"))
        visitor.ok("init", ident="web.wanda")
        visitor.ok("topic_listen", topic="LIVE")
        more = (
            Reader("REST reserve", by_rest(caller), "rest", may_repeat=True),
            Reader(
                "live messages by WebSocket",
                by_websocket(visitor),
                is_live=True,
                stop=visitor.close,
            ),
            Reader("exchange", None, "exchange", found=lambda: bed.bodies("exchanged")),
        )
        with (
            working(),
            Work(world, "stream of Node", more=more, **LIMITS) as work,
        ):
            for jump in JUMPS:
                clock.put(jump)
                work.go_on(size(20, 100))
        counted(
            FAULT, "the server's clock, the same: REST, a WebSocket and an exchange",
            jumps=len(JUMPS), **work.counts(),
        )  # fmt: skip
        work.check()
        exchanges.close()
        caller.close()


def by_rest(caller: Caller) -> Any:
    def take(work: Work, reader: Reader) -> None:
        reader.is_ready.set()
        while not work.is_over.is_set():
            answer = caller.take("rest", to=2, reserve=True, duration=LEASE.seconds)
            if answer.status == 504:
                continue
            assert answer.status == 200, answer
            path = at("rest", "commit", quote(answer.lease, safe=""))
            assert caller.call("PATCH", path).status == 200
            reader.numbers.append(int(answer.data))

    return take


def by_websocket(visitor: Visitor) -> Any:
    def listen(work: Work, reader: Reader) -> None:
        reader.is_ready.set()
        while not work.is_over.is_set():
            reader.numbers.append(int(visitor.message()["Body"]))

    return listen


def test_put_forward_it_ends_leases_and_delays_but_no_subscription(
    world: World, clock: FalseClock
) -> None:
    writer, reader = world.program("user1"), world.program("user2")
    reader.read("READER", "NEWS", 60)
    writer.ok("push", "WRITER", "Q", "leased")
    writer.ok("push", "WRITER", "Q", "delayed", None, None, None, 3600)
    (leased,) = reader.elements("reserve", "READER", "Q", 1, 3600)
    assert leased.body == "leased"
    assert reader.elements("pop", "READER", "Q", 10) == []
    early: list[str] = []
    jumps = (DAY, 2 * DAY, 2 * DAY + HOUR)
    for ahead in jumps:
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
    assert streamed == [str(ahead) for ahead in jumps]
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


@pytest.mark.parametrize(
    "back",
    [
        "an hour",
        pytest.param("a day", marks=pytest.mark.nightly),  # the same again
    ],
)
def test_put_back_nothing_lasts_longer_than_it_was_to(
    world: World, clock: FalseClock, back: str
) -> None:
    writer, reader = world.program("user1"), world.program("user2")

    def reserved(body: str, seconds: float) -> Any:
        push(writer, body)
        (element,) = reader.elements("reserve", "READER", "Q", 1, seconds)
        return element.lease

    clock.put(BACK[back])
    reader.read("READER", "NEWS", 60)
    reserved("leased", 1)
    reader.ok("rollback", "READER", 1.0, [reserved("failed", 60)])
    reader.elements("renew", "READER", "Q", 1, [reserved("renewed", 60)])
    push(writer, "delayed", delay=1)
    world.owner.connection.execute("UPDATE psqlmessages_queue SET key_timeout = 1")
    first = push(writer, "once", key="k")
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
    assert push(writer, "twice", key="k") != first
    counted(
        FAULT, f"the server's clock, put back by {back}: leases and delays of 1 second",
        elements=5, seconds_until_all_could_be_taken=waited,
    )  # fmt: skip


def push(writer: Program, body: str, *, delay: object = None, key: object = None) -> object:
    return writer.ok("push", "WRITER", "Q", body, None, None, None, delay, 0, key)["Id"]
