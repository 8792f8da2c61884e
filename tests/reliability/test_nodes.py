"""Processes of nodes are killed with -9: who is told, how soon, and what is left of them."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from time import monotonic
from typing import Any

import pytest
from pytest_django import Settings

from project.postgres import Server
from psqlmessages import AsyncNode, Node
from psqlmessages.monitor.admission import Permit
from tests.conftest import TestedServer
from tests.django.processes import start
from tests.reliability.counts import counted, size
from tests.reliability.victims import HUB_NODES, Nursery
from tests.sql.conftest import World
from tests.web.receivers import Box, ok, opened, run
from tests.web.test_monitor_observer import Stage

FAULT = "a node's process is killed"
# The bound that the documents promise is 2 s; a busy machine may take five times as long.
BOUND_SECONDS = 10.0
RULES = (
    "user1 v* Topic T RW 60",
    "user2 HEAR.* Rpc v* W 60",
    "user2 HEAR.* Rpc worker W 60",
    f"{Server.owner} worker Topic ORDERS RW 60",
    f"{Server.owner} PRICES Rpc worker W 60",
    f"{Server.owner} example.monitor.* Topic * O 60",
    # Strangers: of other topics, and of the same topic but for no event of a node.
    "user3 STRANGER Topic OTHER RW 60",
)
KINDS = ("node", "async", "node", "async", "hub")
VICTIMS = [(kind, f"v{number}") for number, kind in enumerate(KINDS)]


class Ears:
    """What listeners of all kinds heard of crashes, and when; `names` are the listeners."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.heard: list[tuple[str, str, float]] = []
        self._lock = threading.Condition()

    def note(self, ear: str, event: str | None, ident: str | None) -> None:
        if event == "crash" and ident is not None:
            with self._lock:
                self.heard.append((ear, ident, monotonic()))
                self._lock.notify_all()

    def wait_for(self, number: int) -> float:
        """Wait until so many were heard by all together; when the last was."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.heard) >= number, 90), self.heard
            return max(at for *_, at in self.heard)


class Sounding(Box):
    """A hub's receiver that tells the ears."""

    def __init__(self, name: str, ears: Ears) -> None:
        super().__init__()
        self.name, self.ears = name, ears

    def deliver(self, frame: Any) -> None:
        super().deliver(frame)
        if frame.header.get("Type") == "Sys":
            self.ears.note(self.name, frame.header.get("Evt"), frame.header.get("Ident"))


def listen(node: Node, ears: Ears) -> None:
    for message in node:
        ears.note(node.ident, message.event, message.ident)


async def listen_in_a_loop(url: str, ears: Ears, who: str, is_open: Any, is_over: Any) -> None:
    """An AsyncNode, a hub of two nodes, or both."""
    async with AsyncExitStack() as stack:
        if who in ("all", "hub"):
            hub = await stack.enter_async_context(opened(url))
            for ident in ("HEAR.HUB1", "HEAR.HUB2"):
                await ok(hub.init(ident, Sounding(ident, ears)))
                ears.names.append(ident)
        if who in ("all", "async"):
            node = await stack.enter_async_context(AsyncNode("HEAR.ASYNC", url))
            node.on_event(lambda m: ears.note("HEAR.ASYNC", m.event, m.ident))
            stack.callback(asyncio.create_task(node.run()).cancel)
            ears.names.append("HEAR.ASYNC")
        is_open.set()
        await asyncio.to_thread(is_over.wait)


@contextmanager
def ears_of(own: TestedServer, who: str) -> Iterator[Ears]:
    """The listeners of a test: none but these evaluates."""
    ears, url = Ears(), own.url("user2")
    is_open, is_over = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    with ExitStack() as stack:
        if who in ("all", "node"):
            node = stack.enter_context(Node("HEAR.NODE", url))
            ears.names.append("HEAR.NODE")
            threads.append(threading.Thread(target=listen, args=(node, ears)))
            stack.callback(node.stop)
        if who != "node":
            looping = listen_in_a_loop(url, ears, who, is_open, is_over)
            threads.append(threading.Thread(target=lambda: asyncio.run(looping)))
            stack.callback(is_over.set)
        for thread in threads:
            thread.start()
        assert who == "node" or is_open.wait(90)
        yield ears
    for thread in threads:
        thread.join(20)


@pytest.fixture
def ruled(own_world: World) -> World:
    """The rules of victims, of those that may hear of them, and of strangers."""
    own_world.rules(*RULES)
    return own_world


def idents_of(victims: list[tuple[str, str]]) -> set[str]:
    """The nodes of these processes: a hub has several."""
    return {
        f"{ident}.{number}" if kind == "hub" else ident
        for kind, ident in victims
        for number in range(HUB_NODES if kind == "hub" else 1)
    }


def ghosts(world: World) -> int:
    """How many nodes anything still shows that listens to T."""
    asker = world.program("user1")
    shown = asker.ok("topic_status_as", "v.asker", "T")["Listeners"]
    asker.ok("init", "v.asker")
    shown += asker.ok("topic_status", "T")["Listeners"]
    shown += asker.query("SELECT listeners FROM messages.topics WHERE topic = 'T'")
    asker.ok("deinit", "v.asker")
    return len(shown)


@pytest.mark.parametrize(
    "who",
    [
        "all",
        # One kind alone finds what another would have found.
        *(pytest.param(who, marks=pytest.mark.nightly) for who in ("node", "async", "hub")),
    ],
)
def test_a_crash_is_told_once_to_each_that_may_hear_of_it(
    own: TestedServer, ruled: World, who: str
) -> None:
    rounds, slowest, left = size(1, 10), 0.0, 0
    stranger, idents = ruled.node("user3", "STRANGER"), idents_of(VICTIMS)
    with Nursery(own.url("user1")) as nursery, ears_of(own, who) as ears:
        for number in range(1, rounds + 1):
            killed = nursery.kill_all(nursery.make(*VICTIMS))
            heard = ears.wait_for(number * len(idents) * len(ears.names))
            slowest = max(slowest, heard - killed)
            left += ghosts(ruled)
        told = Counter((ear, ident) for ear, ident, _ in ears.heard)
    counted(
        FAULT, f"5 processes at once, {who} alive" if who == "all" else f"only a {who} alive",
        processes=rounds * len(VICTIMS), nodes=rounds * len(idents),
        crashes_told=sum(told.values()), told_twice_or_to_strangers=len(stranger.events()),
        ghosts=left, slowest_seconds=slowest,
    )  # fmt: skip
    assert told == {(ear, ident): rounds for ear in ears.names for ident in idents}
    assert left == 0
    assert slowest < BOUND_SECONDS


def test_a_killed_node_returns_at_once(own: TestedServer, ruled: World) -> None:
    rounds, slowest = size(2, 10), 0.0
    victims = [("node", "v0"), ("async", "v1"), ("hub", "v2")]
    with Nursery(own.url("user1")) as nursery, ears_of(own, "node") as ears:
        living = nursery.make(*victims)
        for _ in range(rounds):
            killed = nursery.kill_all(living)
            # Before anybody can have found them dead.
            living = nursery.make(*victims)
            slowest = max(slowest, monotonic() - killed)
        ears.wait_for(rounds * len(idents_of(victims)))
        told = Counter(ident for _, ident, _ in ears.heard)
    counted(
        FAULT, "the same names again, by processes that start at once",
        returned=rounds * len(idents_of(victims)), refused=0, slowest_seconds=slowest,
    )  # fmt: skip
    assert told == dict.fromkeys(idents_of(victims), rounds)
    assert slowest < BOUND_SECONDS


def test_a_process_of_handlers_finds_crashes_and_its_own_is_told(
    own: TestedServer, ruled: World
) -> None:
    process = start(own, "psqlmessages", "run", "worker")
    try:
        assert process.stderr is not None
        assert "listens to ORDERS" in process.stderr.readline()
        with Nursery(own.url("user1")) as nursery:
            # Nobody else lives.
            killed = nursery.kill_all(nursery.make(("node", "v0")))
            ruled.wait_for("SELECT NOT EXISTS (SELECT FROM psqlmessages_client WHERE ident = 'v0')")
            found = monotonic() - killed
        with ears_of(own, "all") as ears:
            killed = monotonic()
            process.kill()
            seconds = ears.wait_for(len(ears.names)) - killed
    finally:
        process.kill()
        process.communicate()
    counted(FAULT, "only a process of handlers alive", processes=1, slowest_seconds=found)
    counted(
        FAULT, "manage.py psqlmessages run", crashes_told=len(ears.heard), slowest_seconds=seconds
    )
    assert sorted((ear, ident) for ear, ident, _ in ears.heard) == sorted(
        (name, "worker") for name in ears.names
    )
    assert max(found, seconds) < BOUND_SECONDS


NOBODY = """
    SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name ^@ 'psqlmessages v')
"""


def test_where_nobody_is_left_the_next_that_comes_tells(own: TestedServer, ruled: World) -> None:
    number = size(6, 50)
    victims = [(("node", "async")[n % 2], f"v{n}") for n in range(number)]
    with Nursery(own.url("user1")) as nursery, ruled.owner.connection.transaction():
        living = nursery.make(*victims)
        # None of them finds another dead, that is still at work when this one is killed.
        ruled.owner.connection.execute("SELECT FROM psqlmessages_session FOR SHARE")
        nursery.kill_all(living)
        ruled.wait_for(NOBODY)
    began = monotonic()
    with ears_of(own, "node") as ears:
        seconds = ears.wait_for(number) - began
        left = ghosts(ruled)
    counted(
        FAULT, "all nodes of a machine at once: the next that comes hears of it",
        nodes=number, crashes_told=len(ears.heard), ghosts=left, slowest_seconds=seconds,
    )  # fmt: skip
    assert sorted(ident for _, ident, _ in ears.heard) == sorted(idents_of(victims))
    assert left == 0
    assert seconds < BOUND_SECONDS


def test_the_monitor_shows_no_ghost(own: TestedServer, ruled: World, settings: Settings) -> None:
    settings.PSQLMESSAGES = {"NODE": "example"}

    async def play(stage: Stage) -> None:
        page = stage.look()
        await stage.until(stage.is_live)

        def listening() -> list[int]:
            # The page's socket has its right looked up again and again.
            page.permitted(Permit(monitor=True, bodies=True))
            rows = [row for frame in stage.frames for row in frame.get("topics", ())]
            return [row["listener_count"] for row in rows if row["topic"] == "T"][-1:] or [0]

        with Nursery(own.url("user1")) as nursery:
            living = await asyncio.to_thread(nursery.make, *VICTIMS)
            await stage.until(lambda: listening() == [len(idents_of(VICTIMS))])
            killed = nursery.kill_all(living)
            await stage.until(lambda: listening() == [0])
            seconds = monotonic() - killed
        counted(
            FAULT, "the monitor's page", processes=len(living), ghosts=0, slowest_seconds=seconds
        )
        assert seconds < BOUND_SECONDS

    async def whole() -> None:
        stage = Stage(own.url())
        try:
            await play(stage)
        finally:
            await stage.end()

    run(whole())
