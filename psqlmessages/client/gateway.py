"""Gateway: many nodes on one session, for programs that act for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from math import inf
from operator import itemgetter
from time import monotonic
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors

from psqlmessages.client import calls, gateway_calls
from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.calls import BackendInfo, Call
from psqlmessages.client.gateway_calls import CHANGES, FUNCTIONS, REGISTRATIONS, Answer
from psqlmessages.client.messages import CONNECTION_LOST, SYS, Notification
from psqlmessages.client.node_state import NodeCounters, NodeState
from psqlmessages.client.options import Options, conninfo
from psqlmessages.client.registration import ENDS, Registration
from psqlmessages.exceptions import ConnectionLost, IdentTaken, MessagesError
from psqlmessages.retry import MIN_WAIT_SECONDS, LockWaitBudget

# State of a gateway: its nodes, and how they are registered again. No I/O.

T = TypeVar("T")
Script = Generator[Call[Any], Any, T]

# Registrations per transaction, which blocks rule changes for a fraction of a second.
_CHUNK: Final = 50
_CLOSING_SECONDS: Final = 5.0
# After a restart of PostgreSQL all sessions return at the same time, and the first one removes all
# dead sessions. Waiting for their locks for seconds is no reason to give up a node.
_RETURNING_SECONDS: Final = 5.0
_OVERRUN: Final = 4
_BACKENDS: Final = 10
_IDENT_TAKEN: Final = "8"
_ENDED_BY: Final = {begun: ended for ended, begun in ENDS.items()}


class GatewayState(NodeState):
    """State of a gateway between its connection and its caller.

    If a registration cannot be restored, an event follows the local event ``reconnected``. It
    names the node in ``Nodes`` and the error in ``Err``; after error 56 a retry may succeed.
    """

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        self.registration = Registration()
        self.lock_budget = LockWaitBudget()
        self._returning = LockWaitBudget()
        self.on_registration_changed: Callable[[str, str, str], None] | None = None
        self._overrun_at = _OVERRUN * options.inbox_limit
        self._ended: list[Notification] = []
        # Our connections that the server may still consider alive.
        self._backends: list[BackendInfo] = []

    @property
    def pid(self) -> int:
        """Process id of the newest connection's backend; 0 before the first connection."""
        return self._backends[-1].pid if self._backends else 0

    @property
    def is_overrun(self) -> bool:
        """Whether the inbox is so full that the connection must be closed."""
        return len(self.inbox) > self._overrun_at

    def on_call_succeeded(self, call: Call[Any], result: Any = None) -> None:
        """Record a successful call."""
        super().on_call_succeeded(
            call, result.get("Channel", "") if isinstance(result, dict) else ""
        )
        if call.registers is not None and self.on_registration_changed is not None:
            self.on_registration_changed(call.ident, *call.registers)

    def on_connection_lost(self, reason: object, now: float) -> None:
        """Record the loss of the connection, and queue a local event."""
        was_connected = self.heartbeat.is_connected
        super().on_connection_lost(reason, now)
        if was_connected:
            self.inbox.append(Notification({"Type": SYS, "Evt": CONNECTION_LOST}, None, ""))

    def on_connected(self, now: float) -> None:
        """Record a new connection; after a loss, queue an event and one per failed registration."""
        super().on_connected(now)
        self.inbox.extend(self._ended)
        self._ended.clear()

    def closing(self) -> Iterator[Call[Any]]:
        """Yield the calls that deregister all nodes."""
        for chunk in _chunks(self.registration.idents):
            yield gateway_calls.register_many("deinit", chunk, _CLOSING_SECONDS)

    def _on_event(self, header: dict[str, Any]) -> None:
        """Do nothing: the caller decides, as the event may concern an earlier registration."""

    # Reconnecting

    def opening(self) -> Script[None]:
        """Yield the calls that restore all registrations on a new connection; take answers."""
        self._backends.append(
            (yield calls.backend_info(synchronous_commit=self.options.synchronous_commit))
        )
        del self._backends[:-_BACKENDS]
        self._returning = LockWaitBudget(max_wait=_RETURNING_SECONDS, burst=_RETURNING_SECONDS)
        if self.registration.idents:
            yield from self._end_earlier_session()
        for chunk in _chunks(self.registration.idents):
            answers = yield from self._each(
                partial(gateway_calls.register_many, "init"), chunk, str
            )
            for ident, answer in zip(chunk, answers, strict=True):
                yield from self._returned(ident, answer)
        yield from self._join_again()
        del self._backends[:-1]

    def _end_earlier_session(self) -> Script[None]:
        """Run housekeeping to end the earlier session before its nodes return and get events."""
        try:
            yield calls.evaluate()
        except (MessagesError, psycopg.Error) as error:
            if isinstance(error, MessagesError) and error.number is None:
                raise
            self.log.warning("%s: housekeeping failed: %s", self.ident, error)

    def _returned(self, ident: str, answer: Answer) -> Script[None]:
        if answer["Err"] == "0":
            self.channel = answer["Channel"]
            return
        if answer["Err"] == _IDENT_TAKEN and (yield from self._end_earlier_backends()):
            raise IdentTaken(answer["Errstr"])
        if ident in self.registration:
            self._end(ident, "init", ident, answer)

    def _end_earlier_backends(self) -> Script[bool]:
        """Terminate our earlier connections that still exist; return whether there were any."""
        were_there = False
        for backend in self._backends[:-1]:
            were_there = (yield calls.end_backend(backend)) or were_there
        return were_there

    def _join_again(self) -> Script[None]:
        joins = self.registration.joins()
        # Each topic_observe blocks all other topic changes until its commit, so it runs alone.
        observed = [join for join in joins if join[1] == "topic_observe"]
        others = [join for join in joins if join[1] != "topic_observe"]
        for chunk in (*_chunks(others), *([join] for join in observed)):
            answers = yield from self._each(gateway_calls.join_many, chunk, itemgetter(2))
            for (ident, function, topic), answer in zip(chunk, answers, strict=True):
                if answer["Err"] != "0" and self.registration.has(ident, function, topic):
                    self._end(ident, function, topic, answer)

    def _each(
        self,
        make: Callable[[Sequence[T], float], Call[list[Answer]]],
        values: Sequence[T],
        subject_of: Callable[[T], str],
    ) -> Script[list[Answer]]:
        """Run one call for many values; if the server aborts its transaction, run one for each."""
        subjects = [subject_of(value) for value in values]
        seconds = self._returning.seconds(subjects)
        is_alone = len(values) == 1
        try:
            answers: list[Answer] = yield make(values, seconds)
        except (MessagesError, psycopg.Error) as error:
            if isinstance(error, MessagesError) and error.number is None:
                raise
            if isinstance(error, errors.LockNotAvailable):
                self._returning.record_timeout(seconds, subjects[0] if is_alone else None)
            if is_alone:
                self.log.warning("%s: a registration failed: %s", self.ident, error)
                return [{"Err": "56", "Errstr": str(error)}]
            answers = []
            for value in values:
                answers += yield from self._each(make, [value], subject_of)
            return answers
        self._returning.record_success(*subjects)
        return answers

    def _end(self, ident: str, function: str, subject: str, answer: Answer) -> None:
        self.registration.drop(ident, function, subject)
        self.log.warning(
            "%s: could not restore %s(%r) of %s: %s",
            *(self.ident, function, subject, ident, answer.get("Errstr")),
        )
        header = {"Type": SYS, "Evt": _ENDED_BY.get(function, "disconnect"), "Ident": ident}
        if function != "init":
            header["Topic"] = subject
        header["Err"] = answer["Err"]
        self._ended.append(Notification({**header, "Nodes": [ident]}, None, ""))


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


_BATCH = 100


class Gateway:
    """One session that many nodes share; each call names the node that acts.

    ``name`` appears in the log and as ``application_name``; it is not registered as a node. Tasks
    may share a gateway; sends that they make at the same time share round trips. After a lost
    connection the gateway registers all nodes again.
    """

    def __init__(self, name: str, dsn: str = "", *, options: Options | None = None) -> None:
        self.name = name
        options = options or Options()
        self._state = GatewayState(name, options)
        self._session = AsyncNodeSession(conninfo(dsn, name), self._state, options)
        self._taken = 0
        self._changing = asyncio.Lock()
        self._reconnect_seconds = options.reconnect_wait.total_seconds()

    async def open(self) -> None:
        """Connect; raise ServerUnreachable without a retry if that fails."""
        await self._session.open()

    async def close(self) -> None:
        """Deregister all nodes, disconnect and end all waits immediately."""
        await self._session.close()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection on which all nodes are registered."""
        return self._state.heartbeat.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether the gateway is closed or closing; it does not reconnect then."""
        return self._state.is_stopped

    @property
    def echo_seconds(self) -> float | None:
        """Seconds from NOTIFY to receipt of the last probe; None before the first one."""
        return self._state.heartbeat.echo_seconds

    @property
    def counters(self) -> NodeCounters:
        """Counters since the gateway was created."""
        return self._state.counters

    @property
    def pid(self) -> int:
        """Process id of the connection's backend."""
        return self._state.pid

    @property
    def idents(self) -> tuple[str, ...]:
        """Names of the registered nodes."""
        return self._state.registration.idents

    @property
    def arrived(self) -> int:
        """Number of messages and events received so far, whether taken or not."""
        return self._taken + len(self._state.inbox)

    def on_registration_changed(self, callback: Callable[[str, str, str], None]) -> None:
        """Set a callback for successful registration changes: ident, function, ident or topic.

        It runs before later notifications arrive, and also if the caller was cancelled. A crash is
        reported as deinit.
        """
        self._state.on_registration_changed = callback

    async def run(
        self, ident: str, function: str, *arguments: str | None, can_wait: bool = True
    ) -> Answer:
        """Call a function of the SQL core as a node; return its answer, also if that is an error.

        ``init``, ``deinit``, ``crash`` and ``use`` take no arguments. The answer of ``get_data`` is
        the message's header, with the text of the body as ``Body``. Raises ConnectionLost or
        NodeClosed without a connection, ValueError for values that PostgreSQL cannot store, and
        psycopg's errors if the server aborts the call. LockNotAvailable: other sessions hold a lock
        that a change needs for too long, or, without ``can_wait``, at this moment.
        """
        try:
            if function in REGISTRATIONS and not arguments:
                return await self._change(ident, function, ident, can_wait=can_wait)
            if function in CHANGES and len(arguments) == 1 and arguments[0] is not None:
                return await self._change(ident, function, arguments[0], can_wait=can_wait)
            if function in FUNCTIONS:
                return await self._session.run(gateway_calls.call_as(ident, function, *arguments))
        except MessagesError as error:
            if error.number is None:
                raise
            return {"Err": str(error.number), "Errstr": error.text}
        raise TypeError(f"a gateway has no function {function}{arguments!r:.100}")

    async def _change(self, ident: str, function: str, subject: str, *, can_wait: bool) -> Answer:
        lock_budget = self._state.lock_budget
        deadline = monotonic() + self._reconnect_seconds
        # One change at a time: otherwise all would wait for the lock that blocks the first one.
        async with self._changing:
            if not self.is_connected and monotonic() >= deadline:
                # It has waited for the connection already, together with the calls before it.
                raise ConnectionLost(f"{self.name} is not connected")
            seconds = lock_budget.seconds((subject,)) if can_wait else MIN_WAIT_SECONDS
            if function in REGISTRATIONS:
                call = gateway_calls.registration(function, ident, seconds)
            else:
                call = gateway_calls.join_or_leave(ident, function, subject, seconds)
            try:
                answer = await self._session.run(call)
            except errors.LockNotAvailable:
                lock_budget.record_timeout(seconds, subject)
                raise
            lock_budget.record_success(subject)
            return answer

    def forget(self, ident: str, function: str = "init", topic: str = "") -> None:
        """Do not restore a node, or one of its topics, after a lost connection."""
        self._state.registration.drop(ident, function, topic or ident)

    def has(self, ident: str, function: str, topic: str) -> bool:
        """Whether a node has called ``topic_listen``, ``_notify`` or ``_observe`` for a topic."""
        return self._state.registration.has(ident, function, topic)

    async def batches(self) -> AsyncIterator[list[Notification]]:
        """Yield received messages in their order until the gateway is closed; for a single task.

        They include the local events ``connection_lost`` and ``reconnected``, and then an event for
        each registration that could not be restored.
        """
        inbox: Any = self._state.inbox
        while not self._state.is_stopped:
            await self._session.wait(lambda: inbox, inf)
            batch = [inbox.popleft() for _ in range(min(_BATCH, len(inbox)))]
            self._taken += len(batch)
            self._session.on_taken(len(batch))
            if batch:
                yield batch
