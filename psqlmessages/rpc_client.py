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

from psqlmessages.client.async_node import AsyncNode
from psqlmessages.client.durations import Duration, as_timedelta
from psqlmessages.client.options import Options
from psqlmessages.exceptions import CallTimeout, MessagesError, NodeClosed, NotInitialized

_CLOSING_SECONDS = 6.0
# Less than the default: the statements of calls are short, and while a statement runs, no probe
# detects a lost connection.
OPTIONS = Options(answer_timeout=timedelta(seconds=15))
_MIN_CONNECT_TIMEOUT = Options().probe_timeout


class RpcClient:
    """A node that only makes calls, with its own thread and event loop.

    The thread always reads notifications. Otherwise the notification queue of the server would
    fill, and then no transaction with a notification could commit.
    """

    def __init__(self, ident: str, dsn: str) -> None:
        self.ident = ident
        self._dsn = dsn
        self._node: AsyncNode | None = None
        # References to running tasks, because an event loop has only weak references.
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._open_lock = asyncio.Lock()
        self._submit_lock = threading.Lock()
        self._is_closed = False
        # Not the default event loop, because psycopg does not work with that of Windows.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"psqlmessages {ident}", daemon=True
        )
        self._thread.start()

    def submit(self, callee: str, body: Any, timeout: Duration) -> Future[Any]:
        """Start a call; the result of the future is the body of the answer."""
        # Without the lock, ``close`` could stop the loop first: the future would never be done.
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
            node = await self._open_node(connect_timeout.total_seconds())
            try:
                return await node.call(callee, body, timeout=timeout)
            except NotInitialized:
                # The server has ended the node after a change of rules. The call did nothing.
                self._drop_node(node)
            node = await self._open_node(connect_timeout.total_seconds())
            return await node.call(callee, body, timeout=timeout)
        except MessagesError as error:
            # Each process has another ident, so the missing rule must have a pattern.
            pattern = f"{self.ident.rpartition('.')[0]}.*"
            error.caller = error.caller._replace(ident=pattern, type="Rpc", dest=callee)
            raise

    async def _open_node(self, seconds: float) -> AsyncNode:
        """Return the open node; open one first if there is none. Wait at most ``seconds``."""
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

    def _drop_node(self, node: AsyncNode) -> None:
        """Close a node that the server has ended; the next call opens a new node."""
        if self._node is node:
            self._node = None
            self._closing = asyncio.create_task(node.close())

    @staticmethod
    async def _read(node: AsyncNode) -> None:
        async for _ in node.messages():
            # Ignore messages and events. The node passes answers to pending calls.
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
# In a forked process: the clients of the parent process. The parent uses their connections, which
# garbage collection would close.
_inherited: list[RpcClient] = []
# The function that answers calls in tests instead of a node. Only psqlmessages.testing sets it.
answer_in_tests: Callable[[str, Any], Any] | None = None


def get_client(caller: str, dsn: str) -> RpcClient:
    """Return this process's RPC client for a calling node and a database; create it if missing."""
    with _lock:
        if (client := _clients.get((caller, dsn))) is None:
            # Every process needs its own ident. Rules name the idents by the pattern "NODE.*".
            ident = f"{caller}.{os.getpid()}-{secrets.token_hex(4)}"
            client = _clients[caller, dsn] = RpcClient(ident, dsn)
        return client


def close_clients() -> None:
    """Close the RPC clients of this process; the next ``call`` creates a new client."""
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
