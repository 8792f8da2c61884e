"""Statements that are ended: each call says so, does nothing, and can be made again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

from psqlmessages import Node
from psqlmessages.exceptions import ConnectionLost
from psqlmessages.rest.errors import ServiceUnavailable, to_api_error
from tests.exchanges.field import working
from tests.reliability import faults, workload
from tests.reliability.counts import report, size
from tests.sql.conftest import World

RULES = (
    "user1 A Topic T RW 60", "user1 A Queue Q RW 60", "user1 A2 Topic T W 60",
    "user2 B Topic T R 60", "user2 B Queue Q R 60", "psqlmessages W Queue Q W 60",
)  # fmt: skip
# The error that a call raises.
FAULTS = {
    "statement timeout": errors.QueryCanceled, "lock timeout": errors.LockNotAvailable,
    "statement cancelled": errors.QueryCanceled, "session terminated": ConnectionLost,
}  # fmt: skip
EVERY_FAULT = [
    pytest.param(fault, marks=[pytest.mark.nightly] * fault.startswith("statement"))
    for fault in FAULTS
]
STREAMS = "LOCK TABLE psqlmessages_streammessage IN ACCESS EXCLUSIVE MODE"
# A call does not wait long for the node to reconnect.
IMPATIENT = replace(workload.QUICK, reconnect_wait=timedelta(milliseconds=500))
ENDERS = {"statement cancelled": "pg_cancel_backend", "session terminated": "pg_terminate_backend"}


def limited(dsn: str, fault: str) -> str:
    """Return a DSN with a short timeout, if the fault is a timeout."""
    if not fault.endswith("timeout"):
        return dsn
    return make_conninfo(dsn, options=f"-c {fault.replace(' ', '_')}=200ms")


@contextmanager
def faulty(world: World, fault: str) -> Iterator[None]:
    """Lock all tables, and end the calls that wait."""
    how = ENDERS.get(fault)
    with faults.tables_locked(world), faults.cancel_waiting(world, how) if how else nullcontext():
        yield


@pytest.fixture
def world(own_world: World) -> World:
    """Rules for A and B, and a subscription of B."""
    own_world.rules(*RULES)
    own_world.program("user2").read("B", "T", 600)
    return own_world


def calls_of(node: Any, number: int, lease: Any) -> dict[str, Callable[[], Any]]:
    """Return calls of a node that send, store and take; the bodies contain the number."""
    return {
        "topic_send": lambda: node.topic_send("T", f"live {number}"),
        "publish": lambda: node.publish("T", f"one {number}"),
        "publish_many": lambda: node.publish_many("T", [f"{n} of {number}" for n in range(5)]),
        "push": lambda: node.push("Q", f"one {number}"), "pop": lambda: node.pop("Q", 2),
        "push_many": lambda: node.push_many("Q", [f"{n} of {number}" for n in range(5)]),
        "reserve": lambda: node.reserve("Q", 2, timedelta(minutes=5)),
        "commit": lambda: node.commit(lease), "rollback": lambda: node.rollback(lease),
    }  # fmt: skip


@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_a_call_that_is_ended_says_so_and_did_nothing(world: World, fault: str):
    world.node("user2", "B").ok("topic_listen", "T")
    failed = taken = 0
    with Node("A", limited(world.server.url("user1"), fault), options=IMPATIENT) as node:
        node.topic_notify("T")
        node.push_many("Q", [str(number) for number in range(20)])
        (lease,) = node.reserve("Q")
        for number in range(size(1, 3)):
            for act in calls_of(node, number, lease).values():
                with faulty(world, fault), pytest.raises(FAULTS[fault]) as raised:
                    act()
                assert str(raised.value)
                assert isinstance(to_api_error(raised.value), ServiceUnavailable)
                failed += 1
        assert (workload.stored_messages(world), len(workload.stored_elements(world))) == ([], 20)
        faults.until(lambda: workload.has_reconnected(node))
        for name, act in calls_of(node, 0, lease).items():
            answer = act()
            taken += len(answer) if name == "pop" else 0
    stored = len(workload.stored_messages(world)) + len(workload.stored_elements(world))
    # 1 + 1 + 5 published, 20 + 1 + 5 pushed, one committed, some popped.
    lost = 7 + 26 - 1 - taken - stored
    report(
        fault, "calls of a Node", calls_failed=failed,
        calls_repeated=len(calls_of(node, 0, lease)), lost=lost,
    )  # fmt: skip
    assert (lost, taken) == (0, 2)


@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_readers_and_consumers_try_again_by_themselves(world: World, fault: str, caplog):
    pause = threading.Event()
    readers = ("stream of Node", "Node.consume")
    with workload.Workload(world, *readers, rewrite_dsn=lambda dsn: limited(dsn, fault)) as work:
        for _ in range(size(2, 10)):
            work.wait_for_writes(20)
            ended = len(caplog.records)
            with faulty(world, fault):
                # Wait for a log line, at most for one second, which is shorter than a lease.
                for _ in range(20):
                    if len(caplog.records) > ended or pause.wait(0.05):
                        break
    assert caplog.records
    work.report(fault, "a stream reader and a consumer", log_lines=len(caplog.records))


WRITABLE = "ALTER ROLE user1 RESET default_transaction_read_only"


def test_a_server_that_is_read_only_is_named_so_and_left_again(world: World, caplog):
    superuser = world.superuser()
    calls = 3
    try:
        with Node("A", world.server.url("user1"), options=IMPATIENT) as node:
            node.push("Q", "before")
            superuser.connection.execute("ALTER ROLE user1 SET default_transaction_read_only = on")
            with pytest.raises(errors.ReadOnlySqlTransaction, match="read-only transaction"):
                Node("A2", world.server.url("user1")).open()
            world.end_backends("usename = 'user1'")
            for _ in range(calls):
                with pytest.raises(ConnectionLost):
                    node.publish("T", "lost in a standby")
            superuser.connection.execute(WRITABLE)
            faults.until(lambda: workload.has_reconnected(node))
            node.publish("T", "back")
    finally:
        superuser.connection.execute(WRITABLE)
    assert "read-only transaction" in caplog.text
    report(
        "the server is read-only", "a Node", refused=1 + calls, log_lines=len(caplog.records),
        reconnected=True,
    )  # fmt: skip
    assert workload.stored_messages(world) == ["back"]
    assert len(caplog.records) < 10


# Deadlocks
COUNTS = "LOCK TABLE psqlmessages_queuecount IN ACCESS EXCLUSIVE MODE"
HELD = "SELECT FROM psqlmessages_element FOR UPDATE"
POSITION = "SELECT FROM psqlmessages_subscription WHERE ident = 'R.NODE' FOR UPDATE"
DEADLOCKS = {
    "a reader of a stream": ("stream of Node", POSITION, STREAMS),
    "a consumer": ("Node.consume", COUNTS, HELD),
}


@pytest.mark.parametrize("who", DEADLOCKS)
def test_in_a_deadlock_it_tries_again(world: World, who: str):
    reader, holds, wants = DEADLOCKS[who]
    before, rounds = faults.count_logged(world.server), size(2, 20)
    with workload.Workload(world, reader) as work:
        # If the writer waits, there is no deadlock.
        while faults.count_logged(world.server) - before < rounds:
            work.wait_for_writes(20)
            with faults.forced_deadlock(world, holds=holds, wants=wants):
                pass
    work.report("deadlock", who, deadlocks=faults.count_logged(world.server) - before)


@pytest.mark.django_db(transaction=True)
def test_in_a_deadlock_an_exchange_does_it_again(world: World):
    before, rounds, bodies = faults.count_logged(world.server), size(1, 20), list[str]()
    with faults.running_exchange(world) as exchanges:
        for number in range(rounds):
            part = [f"{number}.{n}" for n in range(100)]
            exchanges.default.push_many("a", part)
            bodies += part
            with faults.forced_deadlock(world, holds=COUNTS, wants=HELD), working():
                exchanges.until_idle(60)
        assert faults.copies(exchanges) == [sorted(bodies)] * 2
    ended = faults.count_logged(world.server) - before
    report("deadlock", "an exchange", elements=len(bodies), deadlocks=ended, lost=0, duplicated=0)
    assert ended >= rounds
