"""Statements that are ended: each call says so, does nothing, and can be made again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from psqlmessages import AsyncNode, ConnectionLost, Node
from psqlmessages.client.calls import Call
from psqlmessages.client.options import Options
from psqlmessages.rest.faults import Unavailable, refused
from psqlmessages.rest.pool import Pool
from tests.reliability.counts import counted, size
from tests.reliability.holding import cancelling, held, terminating
from tests.sql.conftest import World

RULES = (
    "user1 A Topic T RW 60",
    "user1 A Queue Q RW 60",
    "user1 A2 Topic T W 60",
    "user2 B Topic T R 60",
    "user2 B Queue Q R 60",
    "psqlmessages W Topic T W 60",
    "psqlmessages W Queue Q W 60",
)
# Of psycopg, and what the test calls it.
FAULTS: dict[str, type[Exception]] = {
    "statement timeout": psycopg.errors.QueryCanceled,
    "lock timeout": psycopg.errors.LockNotAvailable,
    "statement cancelled": psycopg.errors.QueryCanceled,
    "session ended": ConnectionLost,
}
PUBLISHED = """
    SELECT m.payload FROM psqlmessages_streammessage AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = 'T'
"""
PUSHED = """
    SELECT e.body FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'Q'
"""
STREAMS_ARE_DUE = "UPDATE messages._stream SET tended_at = '-infinity'"
STREAMS_ARE_TENDED = "SELECT tended_at > '-infinity' FROM messages._stream"


def set_limit(name: str) -> Call[Any]:
    """Let the session of a node wait no longer than a moment."""
    return Call(
        "SELECT set_config(%s, '200ms', false)", (name.replace(" ", "_"),), lambda value: value
    )


@contextmanager
def faulty(world: World, fault: str) -> Iterator[None]:
    """All tables are locked, and what waits is ended in some way."""
    enders = {"statement cancelled": cancelling, "session ended": terminating}
    ender = enders[fault](world) if fault in enders else nullcontext()
    with held(world), ender:
        yield


def found(world: World, query: str) -> list[str]:
    """The bodies that are in the database."""
    return [body for (body,) in world.owner.connection.execute(query)]


@pytest.fixture
def world(own_world: World) -> World:
    """Rules for A, which does all, and a subscription of B."""
    own_world.rules(*RULES)
    own_world.program("user2").read("B", "T", 600)
    return own_world


def calls_of(node: Any, number: int, lease: Any) -> dict[str, Callable[[], Any]]:
    """The calls of a node that send, store and take; bodies hold the number."""
    return {
        "topic_send": lambda: node.topic_send("T", f"live {number}"),
        "publish": lambda: node.publish("T", f"one {number}"),
        "publish_many": lambda: node.publish_many("T", [f"{n} of {number}" for n in range(5)]),
        "push": lambda: node.push("Q", f"one {number}"),
        "push_many": lambda: node.push_many("Q", [f"{n} of {number}" for n in range(5)]),
        "reserve": lambda: node.reserve("Q", 2, timedelta(minutes=5)),
        "pop": lambda: node.pop("Q", 2),
        "commit": lambda: node.commit(lease),
        "rollback": lambda: node.rollback(lease),
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_is_ended_says_so_and_did_nothing(world: World, fault: str) -> None:
    listener = world.node("user2", "B")
    listener.ok("topic_listen", "T")
    told = taken = 0
    with Node("A", world.server.url("user1")) as node:
        node.topic_notify("T")
        node.push_many("Q", [str(number) for number in range(20)])
        (lease,) = node.reserve("Q")
        if fault.endswith("timeout"):
            node._link.run(set_limit(fault))
        for number in range(size(1, 3)):
            for act in calls_of(node, number, lease).values():
                with faulty(world, fault), pytest.raises(FAULTS[fault]) as raised:
                    act()
                assert str(raised.value)
                told += 1
        assert (found(world, PUBLISHED), len(found(world, PUSHED))) == ([], 20)
        for name, act in calls_of(node, 0, lease).items():
            answer = act()
            taken += len(answer) if name == "pop" else 0
    stored = len(found(world, PUBLISHED)) + len(found(world, PUSHED))
    # 1 + 1 + 5 published, 20 + 1 + 5 pushed, one committed, some popped.
    lost = 7 + 26 - 1 - taken - stored
    counted(
        fault, "calls of a Node", ended=told, made_again=len(calls_of(node, 0, lease)), lost=lost
    )
    assert (lost, taken) == (0, 2)


def set_due() -> Call[Any]:
    """Let the next call of a session evaluate, however short ago it has."""
    return Call("SELECT set_config('messages.evaluated', '', false)", (), lambda value: value)


@pytest.mark.parametrize("fault", FAULTS)
def test_in_a_pipeline_the_neighbours_are_unharmed(world: World, fault: str) -> None:
    async def test() -> tuple[list[Any], list[Any]]:
        async with AsyncNode("A", world.server.url("user1")) as node:
            if fault.endswith("timeout"):
                await node._link.run(set_limit(fault))
            await node.push("Q", "first")
            await node._link.run(set_due())
            # What publishes waits. What pushes does not, and looks after the streams at its commit,
            # where PostgreSQL applies no statement_timeout.
            world.owner.connection.execute(STREAMS_ARE_DUE)
            ender = {"statement cancelled": cancelling, "session ended": terminating}.get(fault)
            with (
                held(world, "LOCK TABLE psqlmessages_streammessage IN ACCESS EXCLUSIVE MODE"),
                ender(world, "%publish%") if ender else nullcontext(),
            ):
                both = await asyncio.gather(
                    *(node.publish("T", f"p{number}") for number in range(2)),
                    *(node.push("Q", f"q{number}") for number in range(20)),
                    return_exceptions=True,
                )
                assert world.owner.query(STREAMS_ARE_TENDED) is False
            await node._link.run(set_due())
            await node.publish("T", "after")
            return both[:2], both[2:]

    published, pushed = asyncio.run(test())
    assert all(isinstance(result, FAULTS[fault]) for result in published), published
    committed = sum(isinstance(result, int) for result in pushed)
    lost = committed + 1 - len(found(world, PUSHED))
    counted(
        fault, "calls of an AsyncNode side by side",
        ended=len(published), neighbours_done=committed, lost=max(lost, 0),
    )  # fmt: skip
    assert found(world, PUBLISHED) == ["after"]
    assert world.owner.query(STREAMS_ARE_TENDED) is True
    if fault == "session ended":
        # What was under way on that connection may be done or not: those who asked are told.
        assert lost <= 0
    else:
        assert (committed, lost) == (len(pushed), 0)


def test_a_crash_is_told_while_a_table_of_streams_is_locked(world: World) -> None:
    listener, dying = world.node("user2", "B"), world.node("user1", "A")
    listener.ok("topic_listen", "T")
    dying.ok("topic_notify", "T")
    with held(world, "LOCK TABLE psqlmessages_streammessage IN ACCESS EXCLUSIVE MODE"):
        world.owner.connection.execute(STREAMS_ARE_DUE)
        world.kill(dying)
        # Whose turn it is fails at the streams, and has told the crash before.
        world.program().ok("push", "W", "Q", "it")
        is_tended = world.owner.query(STREAMS_ARE_TENDED)
    told = listener.events().count("crash A")
    counted("a table is locked wholly", "a node dies meanwhile", crashes_told=told)
    assert (is_tended, told) == (False, 1)


def until(is_so: Callable[[], object], seconds: int = 30) -> bool:
    """Wait until something is so, for some seconds at most; whether it is."""
    pause = threading.Event()
    return any(is_so() or pause.wait(0.01) for _ in range(100 * seconds))


@pytest.mark.parametrize("fault", FAULTS)
def test_readers_and_consumers_try_again_by_themselves(
    world: World, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[str] = []
    worked: list[str] = []
    url = world.server.url("user2")
    with Node("B", url) as reader, Node("A", world.server.url("user1")) as worker:
        for node in reader, worker:
            if fault.endswith("timeout"):
                node._link.run(set_limit(fault))
        subscription = reader.subscribe("T", max_rows=5)
        work = threading.Event()

        def run(seen: list[str], messages: Any) -> None:
            for message in messages:
                # What takes a moment is ended amid its messages.
                work.wait(0.005)
                seen.append(message.body)

        threads = [
            threading.Thread(target=run, args=(read, subscription)),
            threading.Thread(target=run, args=(worked, worker.consume("Q", batch=3))),
        ]
        for thread in threads:
            thread.start()
        bodies = [str(number) for number in range(size(60, 300))]
        for start in range(0, len(bodies), 20):
            part = bodies[start : start + 20]
            world.owner.ok("publish_many", "W", "T", part)
            world.owner.ok("push_many", "W", "Q", part)
            ended = len(caplog.records)
            with faulty(world, fault):
                until(lambda: len(caplog.records) > ended, 1)  # noqa: B023
        assert until(lambda: len(read) >= len(bodies) and len(worked) >= len(bodies))
        assert all(thread.is_alive() for thread in threads)
        for node in reader, worker:
            node.stop()
        for thread in threads:
            thread.join(20)
    left = found(world, PUSHED)
    lost = len(set(bodies) - set(read)) + len(set(bodies) - set(worked))
    again = len(read) + len(worked) - 2 * len(bodies)
    counted(
        fault, "a durable reader and a consumer",
        messages=2 * len(bodies), log_lines=len(caplog.records), lost=lost, came_again=again,
    )  # fmt: skip
    assert (lost, left) == (0, [])


def test_the_rest_api_answers_503_and_goes_on(world: World) -> None:
    async def test() -> list[int]:
        pool = Pool(world.server.url("user1"), "rest", 3)
        push = "SELECT messages.push('A', 'Q', %s)"
        statuses = []
        for number in range(6):
            with held(world), cancelling(world):
                try:
                    await pool.fetch(push, (str(number),))
                except psycopg.Error as error:
                    answer = refused(error)
                    assert isinstance(answer, Unavailable)
                    statuses.append(answer.status)
            await pool.fetch(push, (f"{number} again",))
        pool._rest()
        return statuses

    statuses = asyncio.run(test())
    lost = 6 - len(found(world, PUSHED))
    counted("statement cancelled", "calls of the REST API", answered_503=len(statuses), lost=lost)
    assert (statuses, lost) == ([503] * 6, 0)


READ_ONLY = "ALTER ROLE user1 SET default_transaction_read_only = on"
WRITABLE = "ALTER ROLE user1 RESET default_transaction_read_only"


def test_a_server_that_is_read_only_is_named_so_and_left_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    superuser = world.superuser()
    quick = Options(
        backoff_least=timedelta(milliseconds=20),
        backoff_most=timedelta(milliseconds=200),
        reconnect_wait=timedelta(milliseconds=500),
    )
    try:
        with Node("A", world.server.url("user1"), options=quick) as node:
            superuser.connection.execute(READ_ONLY)
            with (
                pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as raised,
                Node("A2", world.server.url("user1")),
            ):
                pass
            superuser.query(
                "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
                " WHERE usename = 'user1'"
            )
            refused_calls = 0
            for _ in range(3):
                with pytest.raises(ConnectionLost):
                    node.publish("T", "lost in a standby")
                refused_calls += 1
            superuser.connection.execute(WRITABLE)
            assert until(lambda: _publishes(node))
    finally:
        superuser.connection.execute(WRITABLE)
    assert "read-only transaction" in str(raised.value)
    assert "read-only transaction" in caplog.text
    counted(
        "the server is read-only", "a Node",
        refused=1 + refused_calls, log_lines=len(caplog.records), is_back=True,
    )  # fmt: skip
    assert found(world, PUBLISHED) == ["back"]
    assert len(caplog.records) < 10


def _publishes(node: Node) -> bool:
    try:
        node.publish("T", "back")
    except ConnectionLost:
        return False
    return True
