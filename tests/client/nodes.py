"""Nodes of both kinds, used alike: an AsyncNode has a thread of its own."""

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from psqlmessages import AsyncNode, Message, Options
from tests.sql.conftest import World

SOON = timedelta(seconds=60)
NOW = timedelta(0)
# Reconnects quickly; a slow machine does not count as a lost connection.
QUICK = Options(
    backoff_min=timedelta(milliseconds=20), backoff_max=timedelta(milliseconds=200),
    probe_timeout=SOON, reconnect_wait=SOON,
)  # fmt: skip


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test's coroutine in a loop of its own; a task that is stuck fails it."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(110):
                await test(**fixtures)

        asyncio.run(limited())

    return run


def offered(kind: type) -> dict[str, Any]:
    """Return the public members of a class, and the parameters of each that can be called."""
    return {
        name: callable(member)
        and [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") or name == "__init__"
    }


class Driven:
    """An AsyncNode with the methods of a Node; a subclass drives another asynchronous object."""

    kind: type = AsyncNode

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._driven = self._do(self.kind, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._driven, name)
        if not callable(member):
            return member

        def call(*arguments: Any, **named: Any) -> Any:
            if self._thread is threading.current_thread():  # called by a handler
                return member(*arguments, **named)
            found = self._do(member, *arguments, **named)
            return self._each(found) if inspect.isasyncgen(found) else found

        return call

    def end(self) -> None:
        try:
            self._do(self._driven.close)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._loop.close()

    def _do(self, function: Any, *arguments: Any, **named: Any) -> Any:
        async def done() -> Any:
            found = function(*arguments, **named)
            return await found if inspect.isawaitable(found) else found

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(110)

    def _each(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        end = object()
        while (item := self._do(anext, items, end)) is not end:
            yield item


def end(node: Any) -> None:
    node.end() if isinstance(node, Driven) else node.close()


def next_message(node: Any, message_type: str = "Topic") -> Message:
    return next(m for m in node.messages(timeout=SOON) if m.type == message_type)


def next_event(node: Any, event: str) -> Message:
    return next(m for m in node.messages(timeout=SOON) if m.event == event)


def end_backend(world: World, ident: str = "NODE1") -> None:
    """End the newest backend of a node's connections, found by its name, and wait for it."""
    newest = "SELECT max(backend_start) FROM pg_stat_activity WHERE application_name = %s"
    assert world.end_backends(f"backend_start = ({newest})", f"psqlmessages {ident}") == 1


@contextmanager
def running(node: Any) -> Iterator[None]:
    thread = threading.Thread(target=node.run)
    thread.start()
    try:
        yield
    finally:
        node.stop()
        thread.join(60)
        assert not thread.is_alive()


def when(moment: Callable[[], object], act: Callable[[], object]) -> threading.Thread:
    def wait_and_act() -> None:
        moment()
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread
