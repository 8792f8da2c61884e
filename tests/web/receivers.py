"""Receivers of a hub for tests: they keep what they get, and tests wait for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from psqlmessages.client.options import Options
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub
from tests.client.nodes import in_a_loop
from tests.sql.conftest import World

QUICK = Options(backoff_min=0.02, backoff_max=0.2, reconnect_wait=60)


def in_loop(test: Callable[..., Coroutine[Any, Any, object]]) -> Callable[..., None]:
    """Run a test in its own event loop, and close its fixtures in it."""

    @wraps(test)
    async def closing(**fixtures: Any) -> None:
        async with AsyncExitStack() as opened:
            for fixture in fixtures.values():
                if iscoroutinefunction(getattr(fixture, "close", None)):
                    opened.push_async_callback(fixture.close)
            await test(**fixtures)

    return in_a_loop(closing)


class Box:
    def __init__(self) -> None:
        self.frames: list[HubMessage] = []
        self._came = asyncio.Event()
        self._seen = 0

    def deliver(self, message: HubMessage) -> None:
        self.frames.append(message)
        self._came.set()

    async def next(self, is_wanted: Callable[[HubMessage], object]) -> HubMessage:
        """Wait for the next frame that meets a condition."""
        async with asyncio.timeout(60):
            while True:
                while self._seen == len(self.frames):
                    self._came.clear()
                    await self._came.wait()
                self._seen += 1
                if is_wanted(self.frames[self._seen - 1]):
                    return self.frames[self._seen - 1]

    async def message(self, topic: str = "T") -> HubMessage:
        return await self.next(lambda frame: frame.header.get("To") == topic)

    async def event(self, *words: str) -> HubMessage:
        return await self.next(lambda frame: event_words(frame) == list(words))

    @property
    def bodies(self) -> list[str | None]:
        return [frame.body for frame in self.frames if frame.header["Type"] != "Sys"]

    @property
    def events(self) -> list[str]:
        return [" ".join(event_words(frame)) for frame in self.frames if event_words(frame)]


def event_words(frame: HubMessage) -> list[str]:
    return [frame.header[field] for field in ("Evt", "Ident", "Topic") if frame.header.get(field)]


async def ok(answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    got = await answer
    assert got["Err"] == "0", got
    return got


async def err(answer: Coroutine[Any, Any, dict[str, Any]]) -> int:
    got = await answer
    assert got["Err"] != "0", got
    assert got["Errstr"], got
    return int(got["Err"])


async def joined(hub: Hub, ident: str, *topics: str, events: bool = True) -> Box:
    """Register a receiver with a node that listens to topics, or observes them as O*."""
    box = Box()
    await ok(hub.init(ident, box, wants_events=events))
    function = "topic_observe" if ident.startswith("O") else "topic_listen"
    for topic in topics:
        await ok(hub.run(ident, box, function, topic))
    return box


async def crowd(hub: Hub, number: int, *topics: str) -> list[Box]:
    """Register the nodes A.0, A.1 and so on, which listen to topics."""
    return [await joined(hub, f"A.{place}", *topics) for place in range(number)]


@contextmanager
def refused(
    world: World, table: str, condition: str, error: str = "lock_not_available"
) -> Iterator[None]:
    """Refuse new rows of a table, by default as after a lock timeout."""
    owner = world.owner.connection
    owner.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE {error}; END $$;"
        f"CREATE TRIGGER refuse BEFORE INSERT ON {table}"
        f" FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()"
    )
    try:
        yield
    finally:
        owner.execute("DROP FUNCTION refuse() CASCADE")


def kill(world: World, role: str = "user1") -> None:
    pids = "SELECT pid FROM psqlmessages_session WHERE role = %s"
    assert world.end_backends(f"pid IN ({pids})", role) == 1


async def back(*boxes: Box) -> None:
    for box in boxes:
        await box.event("connection_lost")
        assert 0 < (await box.event("reconnected")).header["Away"] < 100


@asynccontextmanager
async def opened(dsn: str, options: Options = QUICK, **given: Any) -> AsyncIterator[Hub]:
    hub = Hub(dsn, options=options, **given)
    try:
        yield hub
    finally:
        await hub.close()
