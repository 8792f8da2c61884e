"""Receivers of a hub for tests: they keep what they get, and tests wait for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any

from psqlmessages.client.gateway import Gateway
from psqlmessages.client.options import Options
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub
from tests.sql.conftest import World

SECONDS = 60
QUICK = Options(
    backoff_least=timedelta(milliseconds=20),
    backoff_most=timedelta(milliseconds=200),
    reconnect_wait=timedelta(seconds=60),
)


def run(coroutine: Coroutine[Any, Any, object]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(100):
            await coroutine

    asyncio.run(limited())


def in_loop(test: Callable[..., Coroutine[Any, Any, object]]) -> Callable[..., None]:
    @wraps(test)
    def run_it(*arguments: Any, **fixtures: Any) -> None:
        run(test(*arguments, **fixtures))

    return run_it


Test = Callable[..., Coroutine[Any, Any, object]]


def within(argument: str, fixture: str, opening: Callable[[Any], Any]) -> Callable[[Test], Any]:
    """Make a decorator that makes tests of coroutine functions.

    One argument of theirs is an asynchronous context manager, opened with the value of a fixture.
    """

    def decorate(test: Test) -> Callable[..., None]:
        taken = set(signature(test).parameters) - {argument}

        @wraps(test)
        def run_it(**fixtures: Any) -> None:
            async def play() -> None:
                async with opening(fixtures[fixture]) as opened_one:
                    given = {name: fixtures[name] for name in taken}
                    await test(**given, **{argument: opened_one})

            run(play())

        names = [Parameter(name, Parameter.KEYWORD_ONLY) for name in taken | {fixture}]
        run_it.__signature__ = Signature(names)  # type: ignore[attr-defined]
        return run_it

    return decorate


class Box:
    """A receiver that keeps every frame."""

    def __init__(self) -> None:
        self.frames: list[HubMessage] = []
        self._came = asyncio.Event()
        self._seen = 0

    def deliver(self, frame: HubMessage) -> None:
        self.frames.append(frame)
        self._came.set()

    async def next(self, is_wanted: Callable[[HubMessage], object]) -> HubMessage:
        """Wait for the next frame of a kind, after those that were waited for before."""
        async with asyncio.timeout(SECONDS):
            while True:
                while self._seen < len(self.frames):
                    self._seen += 1
                    if is_wanted(self.frames[self._seen - 1]):
                        return self.frames[self._seen - 1]
                self._came.clear()
                await self._came.wait()

    async def message(self, topic: str = "T") -> HubMessage:
        return await self.next(lambda frame: frame.header.get("To") == topic)

    async def event(self, *words: str) -> HubMessage:
        return await self.next(lambda frame: event_words(frame) == list(words))

    @property
    def bodies(self) -> list[str | None]:
        return [frame.body for frame in self.frames if frame.header["Type"] != "Sys"]

    @property
    def events(self) -> list[str]:
        """The events so far, as words."""
        return [" ".join(event_words(frame)) for frame in self.frames if event_words(frame)]


def event_words(frame: HubMessage) -> list[str]:
    """An event as its words; no words where it is a message."""
    words = [frame.header.get(field) for field in ("Evt", "Ident", "Topic")]
    return [word for word in words if word]


async def ok(answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    got = await answer
    assert got["Err"] == "0", got
    return got


async def err(answer: Coroutine[Any, Any, dict[str, Any]]) -> int:
    got = await answer
    assert got["Err"] != "0", got
    assert got["Errstr"], got
    return int(got["Err"])


async def joined(
    hub: Hub, ident: str, *topics: str, events: bool = True, box: Box | None = None
) -> Any:
    """Register a receiver with a node that listens to topics, or observes them as O*."""
    box = box or Box()
    await ok(hub.init(ident, box, events=events))
    function = "topic_observe" if ident.startswith("O") else "topic_listen"
    for topic in topics:
        await ok(hub.run(ident, box, function, topic))
    return box


@contextmanager
def refused(
    world: World, table: str, condition: str, error: str = "lock_not_available"
) -> Iterator[None]:
    """Refuse new rows of a table, by default as if somebody held them for too long."""
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
    """End the backend of the role's one session, and wait for its end.

    Nothing here gives way to a hub of this process.
    """
    (pid,) = world.watcher.query(
        "SELECT array_agg(pid) FROM psqlmessages_session WHERE role = %s", role
    )
    assert world.watcher.query("SELECT pg_terminate_backend(%s, 60000)", pid)


async def back(*boxes: Box) -> None:
    """Wait until all have heard that the hub is back."""
    for box in boxes:
        await box.event("connection_lost")
        frame = await box.event("reconnected")
        assert 0 < frame.header["Away"] < 100


@asynccontextmanager
async def opened(dsn: str, options: Options = QUICK, **given: Any) -> AsyncIterator[Hub]:
    hub = Hub(dsn, options=options, **given)
    try:
        yield hub
    finally:
        await hub.close()


in_hub = within("hub", "dsn", opened)


@asynccontextmanager
async def gateway_of(dsn: str, options: Options = QUICK) -> AsyncIterator[Gateway]:
    gateway = Gateway("gateway", dsn, options=options)
    await gateway.open()
    try:
        yield gateway
    finally:
        await gateway.close()
