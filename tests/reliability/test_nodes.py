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


class Ears:
    """What listeners of all kinds heard of crashes, and when."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, float]] = []
        self._lock = threading.Condition()

    def note(self, ear: str, header: dict[str, Any]) -> None:
        """Take note of a payload's header."""
        if header.get("Type") == "Sys" and header.get("Evt") == "crash":
            with self._lock:
                self.heard.append((ear, header["Ident"], monotonic()))
                self._lock.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until so many were heard by all together."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.heard) >= number, 90), self.heard

    def latest(self, idents: set[str]) -> float:
        """When the last of the listeners heard of the last of these."""
        return max(at for _, ident, at in self.heard if ident in idents)


class Sounding(Box):
    """A hub's receiver that tells the ears."""

    def __init__(self, name: str, ears: Ears) -> None:
        super().__init__()
        self.name, self.ears = name, ears

    def deliver(self, frame: Any) -> None:
        super().deliver(frame)
        self.ears.note(self.name, frame.header)


@contextmanager
def node_ear(url: str, ident: str, ears: Ears) -> Iterator[None]:
    """A Node that listens in a thread."""
    with Node(ident, url) as node:

        def listen() -> None:
            for message in node:
                header = {"Type": message.type, "Evt": message.event, "Ident": message.ident}
                ears.note(ident, header)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield
        finally:
            node.stop()
            thread.join(20)


@contextmanager
def loop_ears(url: str, ears: Ears, *, is_async: bool, is_hub: bool) -> Iterator[None]:
    """An AsyncNode, a hub of two nodes, or both, in a thread with a loop of its own."""
    opened_all, ended = threading.Event(), threading.Event()
    faults: list[BaseException] = []

    async def listen() -> None:
        async with AsyncExitStack() as stack:
            if is_hub:
                hub = await stack.enter_async_context(opened(url))
                for ident in ("HEAR.HUB1", "HEAR.HUB2"):
                    await ok(hub.init(ident, Sounding(ident, ears)))
            if is_async:
                node = await stack.enter_async_context(AsyncNode("HEAR.ASYNC", url))
                node.on_event(
                    lambda m: ears.note(
                        "HEAR.ASYNC", {"Type": "Sys", "Evt": m.event, "Ident": m.ident}
                    )
                )
                task = asyncio.create_task(node.run())
                stack.callback(task.cancel)
            opened_all.set()
            await asyncio.to_thread(ended.wait)

    def work() -> None:
        try:
            asyncio.run(listen())
        except BaseException as error:  # noqa: BLE001 - raised by the test
            faults.append(error)
            opened_all.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert opened_all.wait(90)
        yield
    finally:
        ended.set()
        thread.join(20)
    assert not faults, faults


@contextmanager
def ears_of(own: TestedServer, who: str) -> Iterator[tuple[Ears, list[str]]]:
    """The listeners of a test, none but these evaluates; and their names."""
    ears, url, names = Ears(), own.url("user2"), []
    with ExitStack() as stack:
        if who in ("all", "node"):
            stack.enter_context(node_ear(url, "HEAR.NODE", ears))
            names.append("HEAR.NODE")
        if who != "node":
            is_async, is_hub = who in ("all", "async"), who in ("all", "hub")
            stack.enter_context(loop_ears(url, ears, is_async=is_async, is_hub=is_hub))
            names += ["HEAR.ASYNC"] * is_async + ["HEAR.HUB1", "HEAR.HUB2"] * is_hub
        yield ears, names


@pytest.fixture
def ruled(own_world: World) -> World:
    """The rules of victims, of those that may hear of them, and of strangers."""
    own_world.rules(*RULES)
    return own_world


def named(kinds: tuple[str, ...] = KINDS) -> list[tuple[str, str]]:
    return [(kind, f"v{number}") for number, kind in enumerate(kinds)]


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


@pytest.mark.parametrize("who", ["all", "node", "async", "hub"])
def test_a_crash_is_told_once_to_each_that_may_hear_of_it(
    own: TestedServer, ruled: World, who: str
) -> None:
    rounds, slowest, left = size(1, 10), 0.0, 0
    stranger = ruled.node("user3", "STRANGER")
    victims = named()
    with Nursery(own.url("user1")) as nursery, ears_of(own, who) as (ears, names):
        for number in range(1, rounds + 1):
            living = nursery.make(*victims)
            killed = monotonic()
            for pid in living.values():
                nursery.kill(pid)
            ears.wait_for(number * len(idents_of(victims)) * len(names))
            slowest = max(slowest, ears.latest(idents_of(victims)) - killed)
            left += ghosts(ruled)
        told = Counter((ear, ident) for ear, ident, _ in ears.heard)
    counted(
        FAULT, f"5 processes at once, {who} alive" if who == "all" else f"only a {who} alive",
        processes=rounds * len(victims), nodes=rounds * len(idents_of(victims)),
        crashes_told=sum(told.values()), told_twice_or_to_strangers=len(stranger.events()),
        ghosts=left, slowest_seconds=slowest,
    )  # fmt: skip
    assert told == {(ear, ident): rounds for ear in names for ident in idents_of(victims)}
    assert left == 0
    assert slowest < BOUND_SECONDS


def test_a_killed_node_returns_at_once(own: TestedServer, ruled: World) -> None:
    rounds, slowest = size(3, 10), 0.0
    victims = named(("node", "async", "hub"))
    with Nursery(own.url("user1")) as nursery, ears_of(own, "node") as (ears, _):
        living = nursery.make(*victims)
        for _ in range(rounds):
            killed = monotonic()
            for pid in living.values():
                nursery.kill(pid)
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


def test_a_process_of_handlers_is_told_too(own: TestedServer, ruled: World) -> None:
    with ears_of(own, "all") as (ears, names):
        process = start(own, "psqlmessages", "run", "worker")
        try:
            assert process.stderr is not None
            assert "listens to ORDERS" in process.stderr.readline()
        finally:
            killed = monotonic()
            process.kill()
            process.communicate()
        ears.wait_for(len(names))
        seconds = ears.latest({"worker"}) - killed
    counted(
        FAULT, "manage.py psqlmessages run", crashes_told=len(ears.heard), slowest_seconds=seconds
    )
    assert sorted(ear for ear, _, _ in ears.heard) == sorted(names)
    assert seconds < BOUND_SECONDS


def test_while_only_a_process_of_handlers_lives_crashes_are_found(
    own: TestedServer, ruled: World
) -> None:
    process = start(own, "psqlmessages", "run", "worker")
    try:
        assert process.stderr is not None
        assert "listens to ORDERS" in process.stderr.readline()
        with Nursery(own.url("user1")) as nursery:
            (pid,) = nursery.make(("node", "v0")).values()
            killed = monotonic()
            nursery.kill(pid)
            ruled.wait_for("SELECT NOT EXISTS (SELECT FROM psqlmessages_client WHERE ident = 'v0')")
            seconds = monotonic() - killed
    finally:
        process.kill()
        process.communicate()
    counted(FAULT, "only a process of handlers alive", processes=1, slowest_seconds=seconds)
    assert seconds < BOUND_SECONDS


NOBODY = """
    SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name ^@ 'psqlmessages v')
"""


def test_where_nobody_is_left_the_next_that_comes_tells(own: TestedServer, ruled: World) -> None:
    number = size(20, 50)
    victims = [(("node", "async")[n % 2], f"v{n}") for n in range(number)]
    with Nursery(own.url("user1")) as nursery, ruled.owner.connection.transaction():
        living = nursery.make(*victims)
        # None of them finds another dead, that is still at work when this one is killed.
        ruled.owner.connection.execute("SELECT FROM psqlmessages_session FOR SHARE")
        for pid in living.values():
            nursery.kill(pid)
        ruled.wait_for(NOBODY)
    began = monotonic()
    with ears_of(own, "node") as (ears, _):
        ears.wait_for(number)
        seconds = monotonic() - began
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
            living = await asyncio.to_thread(nursery.make, *named())
            await stage.until(lambda: listening() == [len(idents_of(named()))])
            killed = monotonic()
            for pid in living.values():
                nursery.kill(pid)
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
