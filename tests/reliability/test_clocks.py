"""Clocks that are wrong or jump: neither order nor liveness depends on the client's clock."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest

from psqlmessages import Node
from tests.conftest import TestedServer
from tests.reliability.clock import Clock, Deceived, deceived, false_clock
from tests.reliability.counts import counted, size
from tests.reliability.crashes import told
from tests.sql.conftest import World

FAULT = "a clock jumps"
MESSAGES = size(100, 2_000)
DAY = timedelta(days=1)
RULES = (
    "user1 WRITER Topic NEWS W 3600", "user2 CLIENT Topic NEWS RW 3600",
    "user1 READER Topic NEWS R 3600", "user1 WRITER Queue Q W 60", "user2 CLIENT Queue Q R 60",
    "user2 CLIENT Rpc CALLEE W 60", "user2 CLIENT Rpc SILENT W 60",
    "user1 CALLEE Rpc CLIENT W 60", "user1 SILENT Rpc CLIENT W 60",
    "user2 CLIENT Topic T R 60", "user1 DYING Topic T W 60", "user1 WATCHER Topic T W 60",
    "user2 CLIENT Topic U W 60", "user1 WATCHER Topic U R 60",
)  # fmt: skip
# How wrong the client's clock is, from one question to the next.
CLOCKS = {
    "years ahead": ("+20y",),
    "years behind": ("-20y",),
    "jumping": ("+20y", "-20y", "+1h", "-1h", "+0s"),
}
SECONDS = 60


@pytest.fixture
def clock() -> Iterator[Clock]:
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


@pytest.mark.parametrize("kind", CLOCKS)
def test_a_client_whose_clock_is_wrong_works_as_any(
    server: TestedServer, world: World, clock: Clock, kind: str
) -> None:
    world.rules(*RULES)
    differences = CLOCKS[kind]
    turns = iter(differences * 8)

    def does(client: Deceived, *words: object) -> Any:
        clock.set(difference := next(turns))
        assert client.sees(difference)
        return client.does(*words)

    clock.set(differences[0])
    user1 = server.url("user1")
    with (
        Node("WRITER", user1) as writer,
        Node("READER", user1) as reader,
        answering(server),
        deceived(clock, "CLIENT", server.url("user2")) as client,
    ):
        read = reader.subscribe("NEWS")
        client.tell("read", MESSAGES)
        awaited(world, "CLIENT")
        for first in range(0, MESSAGES, 20):
            clock.set(differences[first // 20 % len(differences)])
            writer.publish_many("NEWS", range(first, first + 20))
        bodies = client.answer()
        list(islice(read, MESSAGES))
        published = does(client, "publish", 0, 20)
        own = [message.body for message in islice(read, published)]
        writer.push_many("Q", range(MESSAGES))
        taken = does(client, "consume", MESSAGES)
        answers = does(client, "call", 20)
        vain = does(client, "call_in_vain")
        crash_heard, crash_told = crashes(server, world, client)
    counted(
        FAULT, f"a client's clock, {kind}", messages=2 * MESSAGES,
        lost=2 * MESSAGES - len({*bodies}) - len({*taken}),
        doubled=len(bodies) + len(taken) - len({*bodies}) - len({*taken}),
        out_of_order=sum(body != place for place, body in enumerate(bodies)),
        questions_answered=answers, a_timeout_of_1_second=vain,
        crashes_heard=crash_heard, crashes_told=crash_told,
    )  # fmt: skip
    assert bodies == sorted(taken) == list(range(MESSAGES))
    assert own == list(range(20))
    assert (answers, crash_heard, crash_told) == (20, 1, 1)
    assert 1 <= vain < SECONDS


def awaited(world: World, ident: str) -> None:
    """Wait until somebody has subscribed."""
    world.wait_for("SELECT EXISTS (SELECT FROM psqlmessages_subscription WHERE ident = %s)", ident)


def crashes(server: TestedServer, world: World, client: Deceived) -> tuple[int, int]:
    """Let another node die, and then the client: how often each heard of the other's crash."""
    dying = world.program("user1")
    dying.ok("init", "DYING")
    dying.ok("topic_notify", "T")
    world.kill(dying)
    heard = client.does("event", "crash DYING")
    with Node("WATCHER", server.url("user1")) as watcher:
        client.kill()
        return heard, told(watcher, "CLIENT")
