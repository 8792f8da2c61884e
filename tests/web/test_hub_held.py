"""A hub beside a transaction of another role that holds a topic: the others do not wait."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from psqlmessages.client import gateway_listening
from psqlmessages.client.patience import LEAST_SECONDS, MOST_SECONDS, Patience
from psqlmessages.relay import hub as module
from psqlmessages.relay.hub import Hub
from tests.sql.conftest import Program, World
from tests.web.receivers import (
    QUICK,
    Box,
    back,
    err,
    in_loop,
    joined,
    kill,
    ok,
    opened,
    refused,
)

MANY = 60


@pytest.fixture
def dsn(world: World) -> str:
    """The address of the hub's role."""
    world.rules(
        "user1 A* Topic T* RW 60", "user1 A* Topic U RW 60", "user2 OUT Topic T* RW 60",
        "user2 OUT Topic U RW 60",
    )  # fmt: skip
    return world.server.url("user1")


@pytest.fixture
def holder(world: World, dsn: str) -> Program:
    """A node of another role, which may listen to the topics."""
    return world.node("user2", "OUT")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait in vain was, during which the whole session stood still."""
    waits: list[float] = []
    waited = Patience.waited

    def note(patience: Patience, seconds: float, subject: str | None = None) -> None:
        waits.append(seconds)
        waited(patience, seconds, subject)

    monkeypatch.setattr(Patience, "waited", note)
    return waits


@contextmanager
def held(holder: Program) -> Iterator[None]:
    """Sit in a transaction that has called topic_listen."""
    with holder.connection.transaction():
        holder.ok("topic_listen", "T")
        yield


async def talker(hub: Hub) -> Box:
    """A1, which sends to U and listens to it."""
    box = await joined(hub, "A1", "U")
    await ok(hub.run("A1", box, "topic_notify", "U"))
    return box


async def passes(hub: Hub, box: Box) -> None:
    """See that A1 still gets what it sends."""
    await ok(hub.run("A1", box, "topic_send", "U", "meanwhile"))
    assert (await box.message("U")).body == "meanwhile"


async def crowd(hub: Hub, *topics: str) -> list[Box]:
    """Many nodes that listen to topics."""
    return [await joined(hub, f"A.{number}", *topics) for number in range(MANY)]


async def until_free(ask: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
    """Ask as a page does that tries on while it is answered with 56."""
    async with asyncio.timeout(60):
        while (answer := await ask())["Err"] == "56":
            pass
    assert answer["Err"] == "0", answer


@in_loop
async def test_a_join_of_a_held_topic_is_refused_and_the_others_go_on(
    dsn: str, holder: Program, waits: list[float]
) -> None:
    async with opened(dsn, QUICK) as hub:
        a1, boxes = await talker(hub), await crowd(hub)
        with held(holder):
            joins = [
                hub.run(f"A.{number}", box, "topic_listen", "T") for number, box in enumerate(boxes)
            ]
            answers = await asyncio.gather(*joins, passes(hub, a1))
            assert {answer["Err"] for answer in answers[:MANY]} == {"56"}
            assert await err(hub.run("A1", a1, "topic_notify", "T")) == 56
            await ok(hub.run("A1", a1, "topic_listen", "T.1"))
            await ok(hub.init("A2", Box()))
        await until_free(lambda: hub.run("A.1", boxes[1], "topic_listen", "T"))
        assert hub.counters.lost_connections == 0
    assert len(waits) > MANY
    assert len([seconds for seconds in waits if seconds > LEAST_SECONDS]) == 1


@in_loop
async def test_nodes_that_leave_a_held_topic_end_when_it_is_free(
    world: World,
    dsn: str,
    holder: Program,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = module._LINGERING_SECONDS
    # No round begins by itself until one was counted.
    monkeypatch.setattr(module, "_LINGERING_SECONDS", 3600.0)
    left = "SELECT count(*) FROM psqlmessages_client WHERE ident LIKE 'A.%%'"
    async with opened(dsn, QUICK) as hub:
        a1, boxes = await talker(hub), await crowd(hub, "T")
        with held(holder):
            await asyncio.gather(*(hub.leave(box) for box in boxes))
            await passes(hub, a1)
            # The name is not free yet.
            assert await err(hub.init("A.1", Box())) == 56
            assert world.owner.query(left) == MANY
            tried = len(waits)
            monkeypatch.setattr(module, "_LINGERING_SECONDS", seconds)
            await hub._end_lingering()
            # Some, three times each.
            assert len(waits) - tried == module._LINGERING_FAILURES * module._ATTEMPTS
        await asyncio.to_thread(world.wait_for, f"SELECT ({left}) = 0")
        await ok(hub.init("A.1", Box()))
        assert hub.counters.lost_connections == 0
    assert len(waits) > MANY
    assert sum(waits) < MANY * MOST_SECONDS / 4


@in_loop
async def test_while_a_topic_is_held_the_others_of_a_lost_session_return(
    world: World, dsn: str, holder: Program, waits: list[float]
) -> None:
    holder.ok("topic_notify", "U")
    async with opened(dsn, QUICK) as hub:
        a1, boxes = await talker(hub), await crowd(hub, "T")
        with held(holder):
            kill(world)
            await back(a1, *boxes)
            await passes(hub, a1)
            for number, box in enumerate(boxes):
                told = await box.event("disconnect", f"A.{number}")
                assert told.header["Err"] == "56"
            assert await err(hub.init("A.1", boxes[1])) == 56
        await until_free(lambda: hub.init("A.1", boxes[1]))
        await until_free(lambda: hub.run("A.1", boxes[1], "topic_listen", "T"))
        holder.ok("topic_notify", "T")
        holder.ok("topic_send", "T", "again")
        assert (await boxes[1].message()).body == "again"
    assert len(waits) > MANY
    # All of them wait together once, as the session returns.
    most = gateway_listening._RETURNING_SECONDS + MANY * MOST_SECONDS / 4
    assert sum(waits) < most < MANY * MOST_SECONDS / 2


@in_loop
async def test_a_join_that_fails_as_a_session_returns_is_told_as_one_to_be_tried_again(
    world: World, dsn: str
) -> None:
    async with opened(dsn, QUICK) as hub:
        a1 = await joined(hub, "A1", "U", "T")
        await joined(hub, "A2", "T")
        # Somebody joins between the end of the earlier session and the return.
        with refused(world, "psqlmessages_membership", "NEW.header LIKE '%\"T\"%'"):
            kill(world)
            await back(a1)
            told = await a1.event("topic_unlisten", "A1", "T")
            assert told.header["Err"] == "56"
            assert (await ok(hub.run("A1", a1, "topic_status", "U")))["Listeners"] == ["A1"]
        await until_free(lambda: hub.run("A1", a1, "topic_listen", "T"))


def test_waits_for_however_many_topics_take_a_share_of_the_time_and_bounded_memory() -> None:
    now = waited = 0.0
    patience = Patience(clock=lambda: now)
    for number in range(20_000):
        seconds = patience.seconds([f"T.{number}"])
        patience.waited(seconds, f"T.{number}")
        now += seconds + 0.05
        waited += seconds
    assert waited < 0.15 * now
    assert len(patience._held) == 1000
    # A held topic costs one wait until it is found free.
    now += 100.0
    assert patience.seconds(["T"]) == MOST_SECONDS
    patience.waited(MOST_SECONDS, "T")
    assert patience.seconds(["U", "T"]) == LEAST_SECONDS
    patience.found_free("T")
    assert patience.seconds(["T"]) == MOST_SECONDS
