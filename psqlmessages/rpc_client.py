"""RPC client: a session for the calls of all threads and tasks of a process."""

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

import psycopg

from psqlmessages.client.async_node import AsyncNode
from psqlmessages.client.durations import Duration, as_timedelta
from psqlmessages.client.options import Options
from psqlmessages.exceptions import CallTimeout, MessagesError, NodeClosed, NotInitialized

_CLOSING_SECONDS = 6.0
# Shorter than the default, because no probe runs during a statement: only this limit detects that
# the connection is lost. The statements of calls are short.
OPTIONS = Options(answer_timeout=timedelta(seconds=15))
_MIN_CONNECT_TIMEOUT = Options().probe_timeout


class RpcClient:
    """A node that only makes calls, with its own thread and event loop.

    The thread always reads notifications. If a listening session did not read, the notification
    queue of the server would fill up, and no transaction with a notification could commit.
    """

    def __init__(self, ident: str, dsn: str) -> None:
        self.ident = ident
        self._dsn = dsn
        self._node: AsyncNode | None = None
        # Keep references to both tasks, because an event loop has only weak references.
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._open_lock = asyncio.Lock()
        self._submit_lock = threading.Lock()
        self._is_closed = False
        # Not the default loop: psycopg does not work with that of Windows.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"psqlmessages {ident}", daemon=True
        )
        self._thread.start()

    def submit(self, callee: str, body: Any, timeout: Duration) -> Future[Any]:
        """Start a call of the node ``callee``; the future's result is the body of the answer."""
        # Without the lock, ``close`` could stop the loop now, and the future would never be done.
        with self._submit_lock:
            if self._is_closed:
                raise NodeClosed(f"{self.ident} is closed")
            return asyncio.run_coroutine_threadsafe(self._call(callee, body, timeout), self._loop)

    def close(self) -> None:
        """Deregister, disconnect and end the thread; pending calls raise NodeClosed."""
        with self._submit_lock:
            self._is_closed = True
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with suppress(TimeoutError):
            closing.result(_CLOSING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _call(self, callee: str, body: Any, timeout: Duration) -> Any:  # noqa: ASYNC109
        connect_timeout = max(as_timedelta(timeout, "timeout"), _MIN_CONNECT_TIMEOUT)
        try:
            node = await self._connect(connect_timeout.total_seconds())
            try:
                return await node.call(callee, body, timeout=timeout)
            except NotInitialized:
                # A change of rules has disconnected the node, so this call did nothing.
                self._forget(node)
            node = await self._connect(connect_timeout.total_seconds())
            return await node.call(callee, body, timeout=timeout)
        except MessagesError as error:
            # Each process has its own ident, so the rule to add needs a pattern.
            pattern = f"{self.ident.rpartition('.')[0]}.*"
            error.caller = error.caller._replace(ident=pattern, type="Rpc", dest=callee)
            raise

    async def _connect(self, seconds: float) -> AsyncNode:
        """Return the node; open it if it is not open yet."""
        try:
            async with asyncio.timeout(seconds), self._open_lock:
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

    def _forget(self, node: AsyncNode) -> None:
        """Close a node that the server has disconnected; the next call opens another node."""
        if self._node is node:
            self._node = None
            self._closing = asyncio.create_task(self._close_ended(node))

    @staticmethod
    async def _close_ended(node: AsyncNode) -> None:
        # The node runs its calls in order. So after ``evaluate``, each call that was queued before
        # has failed with NotInitialized, too, and ``_call`` repeats such a call on the next node.
        # If ``close`` came first, these calls would fail with NodeClosed.
        with suppress(MessagesError, psycopg.Error):
            await node.evaluate()
        await node.close()

    @staticmethod
    async def _read(node: AsyncNode) -> None:
        async for _ in node.messages():
            # Ignore messages and events: the node itself passes answers to pending calls.
            pass

    async def _close(self) -> None:
        async with self._open_lock:
            if self._node is not None:
                await self._node.close()
        # Let pending calls and the reading task finish.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=1)


_clients: dict[tuple[str, str], RpcClient] = {}
_lock = threading.Lock()
# In a forked process: the clients of the parent process. Garbage collection of these clients would
# close connections that the parent still uses.
_inherited: list[RpcClient] = []
# Set by psqlmessages.testing: the function that answers calls instead of a node.
answer_in_tests: Callable[[str, Any], Any] | None = None


def get_client(base_ident: str, dsn: str) -> RpcClient:
    """Return the RPC client of this process for a database; create it at the first call."""
    with _lock:
        if (client := _clients.get((base_ident, dsn))) is None:
            # Each process needs its own ident; a rule for the pattern "NODE.*" allows all of them.
            ident = f"{base_ident}.{os.getpid()}-{secrets.token_hex(4)}"
            client = _clients[base_ident, dsn] = RpcClient(ident, dsn)
        return client


def close_clients() -> None:
    """Close the RPC clients of this process; the next ``get_client`` creates a new one."""
    with _lock:
        closing = list(_clients.values())
        _clients.clear()
    for client in closing:
        client.close()


def _drop_inherited_clients() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held the lock at the fork
    _lock = threading.Lock()
    _inherited.extend(_clients.values())
    _clients.clear()


atexit.register(close_clients)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_clients)
