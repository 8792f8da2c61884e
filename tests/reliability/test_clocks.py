"""Clocks that are wrong or jump: neither order nor liveness depends on a client's clock."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle, islice

import pytest

from psqlmessages import Node
from tests.conftest import TestedServer
from tests.reliability.clocks import FalseClock, deceived, false_clock
from tests.reliability.counts import counted, size
from tests.reliability.crashes import told
from tests.sql.conftest import World

FAULT = "a clock jumps"
MESSAGES = size(100, 2_000)
RULES = (
    "user1 WRITER Topic NEWS W 3600", "user2 CLIENT Topic NEWS RW 3600",
    "user1 READER Topic NEWS R 3600", "user1 WRITER Queue Q W 60", "user2 CLIENT Queue Q R 60",
    "user2 CLIENT Rpc CALLEE W 60", "user2 CLIENT Rpc SILENT W 60",
    "user1 CALLEE Rpc CLIENT W 60", "user1 SILENT Rpc CLIENT W 60",
    "user2 CLIENT Topic T R 60", "user1 DYING Topic T W 60", "user1 WATCHER Topic T W 60",
    "user2 CLIENT Topic U W 60", "user1 WATCHER Topic U R 60",
)  # fmt: skip
YEARS, HOUR = timedelta(days=20 * 365), timedelta(hours=1)
# How wrong the client's clock is, from one question to the next.
CLOCKS = {
    "years ahead": [YEARS],
    "years behind": [-YEARS],
    "jumping": [YEARS, -YEARS, HOUR, -HOUR, timedelta()],
}
SECONDS = 60


@pytest.fixture
def clock() -> Iterator[FalseClock]:
    with false_clock() as clock:
        yield clock


@contextmanager
def answering(server: TestedServer) -> Iterator[None]:
    """CALLEE, which answers, and SILENT, which does not."""
    with (
        Node("CALLEE", server.url("user1")) as callee,
        Node("SILENT", server.url("user1")),
        ThreadPoolExecutor() as pool,
    ):
        callee.on_rpc(lambda message: [message.body])
        running = pool.submit(callee.run)
        try:
            yield
        finally:
            callee.stop()
            running.result(SECONDS)


@pytest.mark.parametrize(
    "kind",
    [
        # What jumps is also years ahead and behind.
        pytest.param("years ahead", marks=pytest.mark.nightly),
        pytest.param("years behind", marks=pytest.mark.nightly),
        "jumping",
    ],
)
def test_a_client_whose_clock_is_wrong_works_as_any(
    server: TestedServer, world: World, clock: FalseClock, kind: str
) -> None:
    world.rules(*RULES)
    turns = cycle(CLOCKS[kind])
    user1 = server.url("user1")
    clock.put(next(turns))
    with (
        Node("WRITER", user1) as writer,
        Node("READER", user1) as reader,
        answering(server),
        deceived(clock, "CLIENT", server.url("user2")) as client,
    ):
        assert clock.difference_at(client.does("clock")) < timedelta(minutes=1)
        read = reader.subscribe("NEWS")
        client.tell("read", MESSAGES)
        world.wait_for(
            "SELECT EXISTS (SELECT FROM psqlmessages_subscription WHERE ident = 'CLIENT')"
        )
        for first in range(0, MESSAGES, 20):
            clock.put(next(turns))
            writer.publish_many("NEWS", range(first, first + 20))
        bodies = client.answer()
        list(islice(read, MESSAGES))
        writer.push_many("Q", range(MESSAGES))
        results = {}
        for words in (
            ("publish", 0, 20), ("consume", MESSAGES), ("call", 20), ("call_in_vain",),
        ):  # fmt: skip
            clock.put(next(turns))
            results[words[0]] = client.does(*words)
        own = [message.body for message in islice(read, 20)]
        dying = world.node("user1", "DYING")
        dying.ok("topic_notify", "T")
        world.kill(dying)
        heard = client.does("event", "crash DYING")
        with Node("WATCHER", user1) as watcher:
            client.kill()
            crashes = told(watcher, "CLIENT")
    taken, vain = results["consume"], results["call_in_vain"]
    counted(
        FAULT, f"a client's clock, {kind}", messages=2 * MESSAGES,
        lost=2 * MESSAGES - len({*bodies}) - len({*taken}),
        doubled=len(bodies) + len(taken) - len({*bodies}) - len({*taken}),
        out_of_order=sum(body != place for place, body in enumerate(bodies)),
        questions_answered=results["call"], a_timeout_of_1_second=vain,
        crashes_heard=heard, crashes_told=crashes,
    )  # fmt: skip
    assert bodies == sorted(taken) == list(range(MESSAGES))
    assert own == list(range(20))
    assert (results["call"], heard, crashes) == (20, 1, 1)
    assert 1 <= vain < SECONDS
