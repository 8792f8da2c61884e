"""A hub whose connection is lost: all nodes return, or are told that they cannot."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.core.exceptions import RequestAborted
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.client import async_session, gateway
from psqlmessages.relay.hub import Hub, close_hubs, get_hub
from psqlmessages.retry import MAX_LOCK_WAIT_SECONDS, MIN_LOCK_WAIT_SECONDS, LockWaitBudget
from tests.sql.conftest import Program, World
from tests.web import receivers

MANY = 40
IDENTS = "SELECT array_agg(ident) FROM psqlmessages_client"


@pytest.fixture
def dsn(world: World) -> str:
    world.rules(
        f"{Server.owner} A* Topic T RW 60", "user1 A* Topic T* RW 60", "user1 A* Topic U RW 60",
        "user1 B* Topic T RW 60", "user1 O* Topic T* O 60", "user2 OUT Topic T* RW 60",
        "user2 OUT Topic U RW 60",
    )  # fmt: skip
    return world.server.url("user1")


@receivers.in_loop
async def test_all_nodes_return_and_get_events(world: World, hub: Hub):
    boxes = [await receivers.joined(hub, f"A{number}", "T") for number in range(MANY)]
    boxes.append(await receivers.joined(hub, "O1", "T*"))
    await receivers.ok(hub.run("A1", boxes[1], "topic_notify", "T.1"))
    receivers.kill(world)
    await receivers.back(*boxes)
    assert hub.is_connected
    out = world.node("user2", "OUT", notify="T")
    out.ok("topic_send", "T", "again")
    for box in boxes:
        assert (await box.message()).body == "again"
        # They receive no events about the end of each other.
        after = box.events[box.events.index("connection_lost") :]
        assert not [text for text in after if text.startswith(("crash", "topic_un"))]
    out.ok("topic_listen", "T.1")
    await receivers.ok(hub.run("A1", boxes[1], "topic_send", "T.1", "there"))
    counters = hub.counters
    assert (counters.lost_connections, counters.reconnects) == (1, 1)
    assert counters.nodes == MANY + 1


@receivers.in_loop
async def test_rights_revoked_in_an_outage_are_reported_and_others_restored(world: World, hub: Hub):
    a1, a2 = await receivers.joined(hub, "A1", "T", "U"), await receivers.joined(hub, "A2", "T")
    b1, o1 = await receivers.joined(hub, "B1", "T"), await receivers.joined(hub, "O1", "T*")
    await receivers.ok(hub.run("A1", a1, "topic_notify", "T.1"))
    receivers.kill(world)
    rules = world.owner.connection
    rules.execute("DELETE FROM messages.auth WHERE ident IN ('A*', 'B*') AND dest LIKE 'T%'")
    rules.execute("UPDATE messages.auth SET dest = 'X' WHERE ident = 'O*'")
    await receivers.back(a1, a2, b1, o1)
    await b1.event("disconnect", "B1")
    await a1.event("topic_unlisten", "A1", "T")
    await a1.event("topic_unnotify", "A1", "T.1")
    await a2.event("topic_unlisten", "A2", "T")
    await o1.event("topic_unobserve", "O1", "T*")
    assert await receivers.err(hub.run("B1", b1, "topic_listen", "T")) == 53
    assert hub.counters.nodes == 3
    world.node("user2", "OUT", notify="U").ok("topic_send", "U", "x")
    assert (await a1.message("U")).body == "x"
    assert a2.bodies == o1.bodies == []
    # The next reconnect does not restore a revoked topic, but one that was joined later.
    world.rules("user1 A* Topic T* RW 60")
    await receivers.ok(hub.run("A2", a2, "topic_listen", "T"))
    receivers.kill(world)
    await receivers.back(a1, a2)
    assert (await receivers.ok(hub.run("A1", a1, "topic_status", "T")))["Listeners"] == ["A2"]


@receivers.in_loop
async def test_a_receiver_that_leaves_meanwhile_does_not_return(world: World, hub: Hub):
    stays, leaves, ends = [await receivers.joined(hub, ident, "T") for ident in ("A1", "A2", "A3")]
    receivers.kill(world)
    leaving = asyncio.create_task(hub.leave(leaves))
    # Whether the call was sent is unknown; the node is gone in either case.
    assert (await hub.deinit("A3", ends))["Err"] in ("0", "59")
    await leaving
    await receivers.back(stays)
    assert world.owner.query(IDENTS) == ["A1"]
    assert not [event for event in leaves.events + ends.events if "reconnected" in event]


@receivers.in_loop
async def test_a_node_that_cannot_return_keeps_no_other_away(world: World, hub: Hub):
    boxes = [await receivers.joined(hub, f"A{number}", "T") for number in range(MANY)]
    receivers.kill(world)
    # A1 is taken, and A7 fails.
    thief = world.node("user1", "A1")
    with receivers.refused(world, "psqlmessages_client", "NEW.ident = 'A7'", "'no'"):
        await receivers.back(*boxes)
        for number in (1, 7):
            await boxes[number].event("disconnect", f"A{number}")
        answer = await hub.init("A7", boxes[7])
    assert answer == {"Err": "56", "Errstr": "the request failed"}
    thief.ok("topic_notify", "T")
    thief.ok("topic_send", "T", "from the thief")
    assert (await boxes[2].message()).body == "from the thief"
    assert boxes[1].bodies == []
    assert world.owner.query("SELECT count(*) FROM psqlmessages_membership") == MANY - 1
    assert hub.counters.nodes == MANY - 2


@receivers.in_loop
async def test_a_call_cut_off_is_answered(world: World, hub: Hub, monkeypatch):
    # The call waits for the lock until the connection is lost.
    monkeypatch.setattr(LockWaitBudget, "timeout_seconds", lambda *_: 60.0)
    a1, a2 = await receivers.joined(hub, "A1", "T"), await receivers.joined(hub, "A2", "T")
    with world.owner.connection.transaction():
        world.owner.query("SELECT FROM psqlmessages_topic WHERE name = 'T' FOR UPDATE")
        waiting = asyncio.create_task(hub.run("A1", a1, "topic_unlisten", "T"))
        queued = asyncio.create_task(hub.run("A2", a2, "topic_status", "T"))
        locked = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
        await asyncio.to_thread(world.wait_for, locked)
        receivers.kill(world)
        assert (await waiting) == {
            "Err": "59", "Errstr": "the relay has no connection to PostgreSQL",
        }  # fmt: skip
    assert (await queued)["Listeners"] == ["A1", "A2"]


def test_each_loop_has_a_hub_and_takes_it_along_as_it_ends(
    transactional_db: None, settings: Settings, world: World, dsn: str, monkeypatch
):
    """Warnings are errors here: no connection is left open, and no task is pending."""
    settings.PSQLMESSAGES = {"NODE": "shop"}
    monkeypatch.setattr(async_session, "_CLOSING_SECONDS", 60.0)
    one = "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name LIKE '%%shop.hub'"

    async def use(ident: str) -> Hub:
        hub = get_hub()
        box = await receivers.joined(hub, ident, "T")
        if ident == "A1":
            assert await asyncio.to_thread(lambda: asyncio.run(use("A2"))) is not hub
            assert (await hub.run("A1", box, "topic_status", "T"))["Listeners"] == ["A1"]
            await asyncio.to_thread(world.wait_for, one)
        return hub

    asyncio.run(use("A1"))
    assert world.owner.query(IDENTS) is None


def test_at_the_end_only_errors_of_unfinished_requests_are_ignored(caplog):
    def fail(error: Exception) -> None:
        raise error

    async def use_hub() -> None:
        get_hub()

    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(use_hub())
        for error in (RequestAborted(), RuntimeError(), ValueError()):
            loop.call_soon(fail, error)
        close_hubs()
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


HUBS = "SELECT FROM pg_stat_activity WHERE usename = 'user1' AND application_name LIKE '%%hub'"
DISCONNECTED = f"SELECT NOT EXISTS ({HUBS})"


@receivers.in_loop
async def test_an_idle_hub_disconnects_and_connects_when_used(world: World, dsn: str):
    async with receivers.opened(dsn, idle_timeout=timedelta(milliseconds=200)) as hub:
        for turn in range(2):
            await hub.leave(await receivers.joined(hub, "A1", "T"))
            if turn:
                # A hub that is used in time stays connected, and the timeout starts again.
                box = await receivers.joined(hub, "A1", "T")
                await asyncio.sleep(0.4)
                assert hub.is_connected
                left_at = monotonic()
                await hub.leave(box)
            await asyncio.to_thread(world.wait_for, DISCONNECTED)
            assert not hub.is_connected
        assert monotonic() - left_at >= 0.2
        assert hub.counters.receivers == hub.counters.nodes == 0


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The duration of each lock wait that timed out."""
    waits: list[float] = []
    waited = LockWaitBudget.record_timeout

    def note(patience: LockWaitBudget, seconds: float, subject: str | None = None) -> None:
        waits.append(seconds)
        waited(patience, seconds, subject)

    monkeypatch.setattr(LockWaitBudget, "record_timeout", note)
    return waits


@pytest.fixture
def holder(world: World, dsn: str) -> Program:
    """A node of another role, which may listen to the topics."""
    return world.node("user2", "OUT")


@contextmanager
def held(holder: Program) -> Iterator[None]:
    """Hold the topic T in a transaction that has called topic_listen."""
    with holder.connection.transaction():
        holder.ok("topic_listen", "T")
        yield


async def talker(hub: Hub) -> receivers.Box:
    box = await receivers.joined(hub, "A1", "U")
    await receivers.ok(hub.run("A1", box, "topic_notify", "U"))
    return box


async def passes(hub: Hub, box: receivers.Box) -> None:
    """Check that A1 still receives what it sends."""
    await receivers.ok(hub.run("A1", box, "topic_send", "U", "meanwhile"))
    assert (await box.message("U")).body == "meanwhile"


async def until_free(ask: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
    """Repeat a call while it is answered with error 56, as pages do."""
    async with asyncio.timeout(60):
        while (answer := await ask())["Err"] == "56":
            pass
    assert answer["Err"] == "0", answer


@receivers.in_loop
async def test_a_join_of_a_held_topic_is_refused(hub: Hub, holder: Program, waits: list[float]):
    a1, boxes = await talker(hub), await receivers.crowd(hub, MANY)
    leaver = await receivers.joined(hub, "A3", "T")
    with held(holder):
        joins = [hub.run(f"A.{n}", box, "topic_listen", "T") for n, box in enumerate(boxes)]
        answers = await asyncio.gather(*joins, passes(hub, a1))
        assert {answer["Err"] for answer in answers[:MANY]} == {"56"}
        assert await receivers.err(hub.run("A1", a1, "topic_notify", "T")) == 56
        await receivers.ok(hub.run("A1", a1, "topic_listen", "T.1"))
        await receivers.ok(hub.init("A2", receivers.Box()))
        assert len(waits) > MANY
        assert len([seconds for seconds in waits if seconds > MIN_LOCK_WAIT_SECONDS]) == 1
        await hub.leave(leaver)
        assert await receivers.err(hub.init("A3", leaver)) == 56, "the name is not free yet"
    await until_free(lambda: hub.init("A3", leaver))
    await until_free(lambda: hub.run("A.1", boxes[1], "topic_listen", "T"))
    assert hub.counters.lost_connections == 0


@receivers.in_loop
async def test_while_a_topic_is_held_the_others_of_a_lost_session_return(
    world: World, hub: Hub, holder: Program, waits: list[float], monkeypatch
):
    monkeypatch.setattr(gateway, "_RESTORE_SECONDS", 1.0)
    holder.ok("topic_notify", "U")
    a1, boxes = await talker(hub), await receivers.crowd(hub, MANY, "T")
    with held(holder):
        receivers.kill(world)
        await receivers.back(a1, *boxes)
        await passes(hub, a1)
        for number, box in enumerate(boxes):
            assert (await box.event("disconnect", f"A.{number}")).header["Err"] == "56"
        assert await receivers.err(hub.init("A.1", boxes[1])) == 56
    await until_free(lambda: hub.init("A.1", boxes[1]))
    await until_free(lambda: hub.run("A.1", boxes[1], "topic_listen", "T"))
    holder.ok("topic_notify", "T")
    holder.ok("topic_send", "T", "again")
    assert (await boxes[1].message()).body == "again"
    assert len(waits) > MANY
    # The restoration waits once for all of them.
    most = gateway._RESTORE_SECONDS + MANY * MAX_LOCK_WAIT_SECONDS / 4
    assert sum(waits) < most < MANY * MAX_LOCK_WAIT_SECONDS / 2


@receivers.in_loop
async def test_a_join_that_fails_as_a_session_returns_is_to_be_tried_again(world: World, hub: Hub):
    a1 = await receivers.joined(hub, "A1", "U", "T")
    await receivers.joined(hub, "A2", "T")
    with receivers.refused(world, "psqlmessages_membership", "NEW.header LIKE '%\"T\"%'"):
        receivers.kill(world)
        await receivers.back(a1)
        assert (await a1.event("topic_unlisten", "A1", "T")).header["Err"] == "56"
        assert (await receivers.ok(hub.run("A1", a1, "topic_status", "U")))["Listeners"] == ["A1"]
    await until_free(lambda: hub.run("A1", a1, "topic_listen", "T"))


def test_waits_for_however_many_topics_take_a_share_of_the_time_and_bounded_memory():
    now = waited = 0.0
    patience = LockWaitBudget(clock=lambda: now)
    for number in range(20_000):
        seconds = patience.timeout_seconds([f"T.{number}"])
        patience.record_timeout(seconds, f"T.{number}")
        now += seconds + 0.05
        waited += seconds
    assert waited < 0.15 * now
    assert len(patience._locked_until) == 1000
