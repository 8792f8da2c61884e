"""WebSocket hub: one listening session for all sockets of this process."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Coroutine
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

from django.core.exceptions import RequestAborted

from psqlmessages import health
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.options import Options
from psqlmessages.conf import get_settings
from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.orm import direct_dsn
from psqlmessages.relay.dispatch import Dispatcher, HubCounters, NodeRegistry
from psqlmessages.relay.frames import Receiver
from psqlmessages.relay.hub_answers import (
    ABORTED,
    ABORTED_ANSWER,
    CALL_ERRORS,
    UNREACHABLE_ANSWER,
    UNREACHABLE_ERRORS,
    call_as_answer,
    error_answer,
    log,
)

IDLE_TIMEOUT: Final = timedelta(seconds=60)
OPTIONS: Final = Options(
    probe_interval=timedelta(seconds=2),
    answer_timeout=timedelta(seconds=30),
    reconnect_wait=timedelta(seconds=3),
)
# After a failed attempt to connect, refuse ``init`` for this long: an attempt may take seconds.
_CONNECT_PAUSE_SECONDS: Final = 1.0
# Attempts in a row to deregister a node, in case of a deadlock or a lock timeout.
_DEREGISTER_ATTEMPTS: Final = 3
# Interval of later attempts: the notification queue may stay full, or a topic locked. Until an
# attempt succeeds, other nodes see this node as connected.
_RETRY_SECONDS: Final = 1.0
# A round of retries stops after this many failures: long locks must not keep the session busy.
_RETRY_FAILURES: Final = 10


class Hub:
    """The nodes of this process's receivers, on one session.

    It connects at the first ``init`` and disconnects ``idle_timeout`` after the last node has left.
    Answers have the form of SQL's answers; without a connection to PostgreSQL the answer is error
    59. A hub belongs to one event loop: :func:`get_hub` returns the hub of the running loop.
    """

    def __init__(
        self,
        dsn: str,
        *,
        name: str = "hub",
        options: Options = OPTIONS,
        idle_timeout: timedelta = IDLE_TIMEOUT,
    ) -> None:
        self.pid = os.getpid()
        self._dsn = dsn
        self._name = name
        self._options = options
        self._idle_timeout = idle_timeout
        self._registry = NodeRegistry()
        self._counters = HubCounters()
        self._gateway: Gateway | None = None
        self._dispatcher: Dispatcher | None = None
        self._connection_lock = asyncio.Lock()
        self._next_connect_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._deregistrations: dict[str, asyncio.Task[Answer]] = {}
        # The nodes to deregister again, each with the function to call: deinit or crash.
        self._failed_deregistrations: dict[str, str] = {}
        self._idle_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None

    # Status

    @property
    def is_connected(self) -> bool:
        """Whether the hub is connected and all nodes are registered."""
        return self._gateway is not None and self._gateway.is_connected

    @property
    def echo_seconds(self) -> float | None:
        """Seconds that the last probe of the connection took; None if there was no probe."""
        return self._gateway.echo_seconds if self._gateway is not None else None

    @property
    def counters(self) -> HubCounters:
        """Counters since the hub was created, and the present numbers of receivers and nodes."""
        registry = self._registry
        return replace(self._counters, receivers=len(registry.receivers), nodes=len(registry))

    # Calls of receivers

    async def init(
        self,
        ident: str,
        receiver: Receiver,
        *,
        wants_events: bool = True,
        wants_bodies: bool = True,
    ) -> Answer:
        """Register a node for a receiver; error 8 if another receiver of this hub has the node.

        Without ``wants_events`` the node gets no events about other nodes. Without ``wants_bodies``
        a large message may have the body None: the hub fetches the body only if another node that
        receives the message wants bodies.
        """
        # The deregistration of an earlier node of this name must not end the new one.
        while ident in self._deregistrations:
            await asyncio.wait({self._deregistrations[ident]})
        if (function := self._failed_deregistrations.pop(ident, None)) is not None:
            answer = await asyncio.shield(self._start_deregistration(ident, function))
            if answer["Err"] in ABORTED:
                return answer
        try:
            gateway, dispatcher = await self._connect()
        except UNREACHABLE_ERRORS as error:
            log.warning("%s: cannot connect: %s", self._name, error)
            return UNREACHABLE_ANSWER
        except CALL_ERRORS as error:
            log.warning("%s: cannot open a session: %s", self._name, error)
            return ABORTED_ANSWER
        entry = self._registry.claim(
            ident, receiver, dispatcher.received_count, wants_events=wants_events
        )
        if entry.receiver is not receiver:
            # The answer of SQL if another session has the node.
            return error_answer(8, f"Client {ident} already exists with pid {gateway.pid}")
        entry.wants_bodies = wants_bodies
        # If the call is cancelled, the receiver keeps its claim, and leave() ends the node.
        answer = await call_as_answer(gateway, ident, "init")
        is_current = self._registry.entry(ident) is entry
        if answer["Err"] != "0" and is_current and not entry.is_registered:
            self._registry.release(ident)
            self._disconnect_when_idle()
        return answer

    def may_join(self, ident: str, function: str, topic: str, limit: int) -> bool:
        """Whether a node has joined this topic, or fewer than ``limit`` topics, by a function."""
        return self._registry.may_join(ident, function, topic, limit)

    async def run(
        self, ident: str, receiver: Receiver, function: str, *arguments: str | None
    ) -> Answer:
        """Call an SQL function as a node; error 53 if the node does not belong to this receiver."""
        if self._gateway is None or not self._registry.belongs_to(ident, receiver):
            return error_answer(53, f"{ident} is not a node of this session")
        return await call_as_answer(self._gateway, ident, function, *arguments)

    async def deinit(self, ident: str, receiver: Receiver) -> Answer:
        """Deregister a node of a receiver; Already: 1 if the node is not one of this receiver."""
        if self._gateway is None or not self._registry.belongs_to(ident, receiver):
            return {"Err": "0", "Already": 1}
        return await asyncio.shield(self._start_deregistration(ident, "deinit"))

    async def leave(self, receiver: Receiver, *, has_crashed: bool = False) -> None:
        """Deregister all nodes of a receiver, which gets no more messages.

        For each of these nodes, other nodes get the event ``disconnect``, or with ``has_crashed``
        the event ``crash``. The work continues if the caller is cancelled.
        """
        function = "crash" if has_crashed else "deinit"
        idents = self._registry.idents_of(receiver)
        deregistrations = [self._start_deregistration(ident, function) for ident in idents]
        await asyncio.shield(asyncio.gather(*deregistrations))

    async def close(self) -> None:
        """End all nodes and disconnect. The next ``init`` connects again."""
        await self._disconnect()
        for timer in (self._idle_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._retry_timer = None
        if self._tasks:
            await asyncio.wait(self._tasks)

    # The connection

    async def _connect(self) -> tuple[Gateway, Dispatcher]:
        """Return the connected gateway and its dispatcher; connect if there is none."""
        async with self._connection_lock:
            if self._gateway is not None and self._dispatcher is not None:
                return self._gateway, self._dispatcher
            if monotonic() < self._next_connect_at:
                raise ServerUnreachable("the last attempt failed a moment ago")
            gateway = Gateway(self._name, self._dsn, options=self._options)
            gateway.set_registration_callback(self._on_call_succeeded)
            dispatcher = Dispatcher(
                gateway, self._registry, self._counters, self._on_disconnected, self._spawn
            )
            try:
                await gateway.open()
            except BaseException as error:
                if isinstance(error, Exception):
                    self._next_connect_at = monotonic() + _CONNECT_PAUSE_SECONDS
                await gateway.close()
                raise
            self._gateway, self._dispatcher = gateway, dispatcher
            self._spawn(self._close_at_end(gateway))
            return gateway, dispatcher

    async def _close_at_end(self, gateway: Gateway) -> None:
        """Close a gateway when its session ends, or when the event loop cancels its tasks."""
        try:
            await gateway.wait_closed()
        finally:
            await gateway.close()

    def _disconnect_when_idle(self) -> None:
        """If there are no nodes, start the timer that disconnects."""
        if self._registry or self._gateway is None:
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(
            self._idle_timeout.total_seconds(), lambda: self._spawn(self._disconnect(if_idle=True))
        )

    async def _disconnect(self, *, if_idle: bool = False) -> None:
        async with self._connection_lock:
            if if_idle and self._registry:
                return
            gateway, self._gateway = self._gateway, None
            self._registry = NodeRegistry()
            self._failed_deregistrations.clear()
            if gateway is not None:
                await gateway.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=self._name)
        # The event loop itself only has weak references to its tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Nodes

    def _start_deregistration(
        self, ident: str, function: str, *, can_wait: bool = True
    ) -> asyncio.Task[Answer]:
        """Take a node from its receiver immediately, and start to deregister it."""
        self._registry.release(ident)
        if self._gateway is not None:
            # Otherwise a reconnect would register the node again.
            self._gateway.forget(ident)
        task = self._spawn(self._deregister(ident, function, can_wait))
        self._deregistrations[ident] = task
        self._disconnect_when_idle()
        return task

    async def _deregister(self, ident: str, function: str, can_wait: bool) -> Answer:
        answer = UNREACHABLE_ANSWER
        try:
            for attempt in range(_DEREGISTER_ATTEMPTS):
                if (gateway := self._gateway) is None:
                    break
                answer = await call_as_answer(
                    gateway, ident, function, can_wait=can_wait and not attempt
                )
                if answer["Err"] not in ABORTED:
                    break
            else:
                self._failed_deregistrations[ident] = function
                self._retry_later()
        finally:
            del self._deregistrations[ident]
        return answer

    def _retry_later(self) -> None:
        """Start the timer of the next attempts, unless it is already running."""
        if self._retry_timer is None:
            self._retry_timer = asyncio.get_running_loop().call_later(
                _RETRY_SECONDS, lambda: self._spawn(self._retry_deregistrations())
            )

    async def _retry_deregistrations(self) -> None:
        """Deregister nodes again, the oldest failure first; stop after _RETRY_FAILURES failures."""
        failures = 0
        for ident, function in tuple(self._failed_deregistrations.items()):
            if failures == _RETRY_FAILURES:
                break
            # During an earlier turn of this loop, init() may have deregistered the node.
            if self._failed_deregistrations.pop(ident, None) is not None:
                answer = await self._start_deregistration(ident, function, can_wait=False)
                if answer["Err"] in ABORTED:
                    failures += 1
        self._retry_timer = None
        if self._failed_deregistrations:
            self._retry_later()

    def _on_call_succeeded(self, ident: str, function: str, subject: str) -> None:
        """Update the registry after a successful call, before later notifications are delivered."""
        entry = self._registry.entry(ident)
        if function != "init":
            received_count = self._dispatcher.received_count if self._dispatcher is not None else 0
            self._registry.on_call_succeeded(ident, function, subject, received_count)
        elif entry is not None:
            entry.is_registered = True
        elif self._gateway is not None:
            # Its receiver has left: the call that deregisters the node is already on its way.
            self._gateway.forget(ident)

    def _on_disconnected(self, ident: str) -> None:
        """Release a node that an administrator has disconnected."""
        # The deinit has no effect, unless the node was registered again at the same moment.
        self._start_deregistration(ident, "deinit")


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def get_hub() -> Hub:
    """Return the hub of the running event loop in this process."""
    loop = asyncio.get_running_loop()
    if (hub := _hubs.get(loop)) is None:
        # Delete the hubs of closed loops: the tasks of an open hub keep its loop in memory.
        for closed_loop in [other for other in _hubs if other.is_closed()]:
            del _hubs[closed_loop]
        node = get_settings().NODE
        hub = _hubs[loop] = Hub(direct_dsn(), name=f"{node}.hub" if node else "hub")
    return hub


def _has_lost_connection() -> bool:
    """Return whether the hub of this event loop has nodes but no connection for them."""
    hub = _hubs.get(asyncio.get_running_loop())
    return hub is not None and hub.counters.nodes > 0 and not hub.is_connected


health.register("websockets", _has_lost_connection)


def close_hubs() -> None:
    """Close the hubs of stopped event loops, such as Daphne's when its process ends."""
    for loop, hub in list(_hubs.items()):
        # After a fork, the connections still belong to the parent process.
        if hub.pid == os.getpid() and not (loop.is_closed() or loop.is_running()):
            loop.set_exception_handler(_ignore_unfinished_requests)
            loop.run_until_complete(hub.close())


def _ignore_unfinished_requests(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report the errors of a loop, except those of requests that the server left unfinished.

    Such requests continue while `close_hubs` runs the loop. They fail because their client has
    left, or because Python starts no threads at its end.
    """
    if not isinstance(context.get("exception"), (RequestAborted, RuntimeError)):
        loop.default_exception_handler(context)


atexit.register(close_hubs)
