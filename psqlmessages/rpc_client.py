"""RPC client: one session per process for the calls of all threads and tasks."""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

from psqlmessages.client.async_node import AsyncNode
from psqlmessages.client.durations import Duration, as_timedelta
from psqlmessages.client.options import Options
from psqlmessages.exceptions import CallTimeout, NodeClosed

_CLOSING_SECONDS = 6.0
# No statement of a call takes long, and no probe runs while one waits for its answer.
OPTIONS = Options(answer_timeout=timedelta(seconds=15))
# Connecting may take at least as long as a probe, as in the call itself.
_LEAST_TIMEOUT = Options().probe_timeout


class RpcClient:
    """A node that only makes calls, with its own thread that reads continuously.

    A session that does not read would hold back the notification queue of the whole server.
    """

    def __init__(self, ident: str, dsn: str) -> None:
        self.ident = ident
        self._dsn = dsn
        self._node: AsyncNode | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._submitting = threading.Lock()
        self._is_closed = False
        # Not the default loop: psycopg does not work with that of Windows.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"psqlmessages {ident}", daemon=True
        )
        self._thread.start()

    def ask(self, node: str, body: Any, timeout: Duration) -> Future[Any]:
        """Start a call; the future gives the body of the answer or the call's error."""
        # A coroutine submitted to a stopped event loop would wait forever.
        with self._submitting:
            if self._is_closed:
                raise NodeClosed(f"{self.ident} is closed")
            return asyncio.run_coroutine_threadsafe(self._ask(node, body, timeout), self._loop)

    def close(self) -> None:
        """Deregister, disconnect and end the thread; pending calls raise NodeClosed."""
        with self._submitting:
            self._is_closed = True
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with suppress(TimeoutError):
            closing.result(_CLOSING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _ask(self, node: str, body: Any, timeout: Duration) -> Any:  # noqa: ASYNC109
        least = max(as_timedelta(timeout, "timeout"), _LEAST_TIMEOUT)
        own = await self._connect(least.total_seconds())
        return await own.call(node, body, timeout=timeout)

    async def _connect(self, seconds: float) -> AsyncNode:
        try:
            async with asyncio.timeout(seconds), self._opening:
                if self._node is not None:
                    return self._node
                if self._is_closed:
                    raise NodeClosed(f"{self.ident} is closed")
                node = AsyncNode(self.ident, self._dsn, options=OPTIONS)
                try:
                    await node.open()
                except BaseException:
                    await node.close()
                    raise
                self._node = node
                self._reading = asyncio.create_task(self._read(node))
                return node
        except TimeoutError:
            raise CallTimeout(f"no session could be opened within {seconds:g} s") from None

    @staticmethod
    async def _read(node: AsyncNode) -> None:
        async for _ in node.messages():
            # The node passes answers to their pending calls; the rest is unneeded events.
            pass

    async def _close(self) -> None:
        async with self._opening:
            if self._node is not None:
                await self._node.close()
        # Let pending calls and the reading task finish.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=1)


_callers: dict[tuple[str, str], RpcClient] = {}
_lock = threading.Lock()
# The clients of the parent process before a fork. They stay untouched: it owns the connections.
_inherited: list[RpcClient] = []
# For tests: answers calls instead of a node.
stand_in: Callable[[str, Any], Any] | None = None


def caller_for(node: str, dsn: str) -> RpcClient:
    """Return the RPC client of this process for a database; the first call creates it."""
    with _lock:
        if (caller := _callers.get((node, dsn))) is None:
            # Every process needs its own name; a rule allows them by the pattern "node.*".
            ident = f"{node}.{os.getpid()}-{secrets.token_hex(4)}"
            caller = _callers[node, dsn] = RpcClient(ident, dsn)
        return caller


def close_callers() -> None:
    """Close the RPC clients of this process; the next call creates a new one."""
    with _lock:
        closing = list(_callers.values())
        _callers.clear()
    for caller in closing:
        caller.close()


def _forget_callers() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held the lock at the fork
    _lock = threading.Lock()
    _inherited.extend(_callers.values())
    _callers.clear()


atexit.register(close_callers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_callers)
