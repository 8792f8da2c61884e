"""Gateway: many nodes on one session, for programs that serve many users."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from operator import itemgetter
from time import monotonic
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors

from psqlmessages.client import calls, gateway_calls
from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.calls import BackendInfo, Call
from psqlmessages.client.gateway_calls import FUNCTIONS, JOIN_OR_LEAVE, NODE_FUNCTIONS, Answer
from psqlmessages.client.messages import CONNECTION_LOST, SYS, Notification
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.options import Options, complete_conninfo
from psqlmessages.client.registration import JOIN_BY_LEAVE, Registration
from psqlmessages.exceptions import ConnectionLost, IdentTaken, MessagesError
from psqlmessages.retry import MIN_LOCK_WAIT_SECONDS, LockWaitBudget

# State of a gateway: its nodes, and how a reconnect restores them. No I/O.

T = TypeVar("T")
# A generator that yields calls, receives their results, and returns its own.
Calls = Generator[Call[Any], Any, T]

# Registrations per transaction. A rule change waits until the transaction ends, so keep it short.
_CHUNK_SIZE: Final = 50
_CLOSING_SECONDS: Final = 5.0
# After a restart of PostgreSQL all sessions reconnect at the same time, and the first one removes
# all dead sessions. Wait for its locks longer than usual, so that no node is given up.
_RESTORE_SECONDS: Final = 5.0
# A gateway disconnects if its inbox has this many times ``inbox_limit`` messages.
_INBOX_MAXIMUM_FACTOR: Final = 4
_MAX_BACKENDS: Final = 10
_IDENT_TAKEN: Final = "8"
_LEAVE_FUNCTIONS: Final = {join: leave for leave, join in JOIN_BY_LEAVE.items()}


class GatewayState(NodeState):
    """State of a gateway: that of a node, but with any number of registered nodes.

    If the connection is lost, the inbox gets the local event ``connection_lost``. After a reconnect
    it gets ``reconnected``, and then an event for each registration that could not be restored:
    ``Nodes`` is a list with the node, ``Err`` the error number (56: a retry may succeed).
    """

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        self.registration = Registration()
        self.lock_budget = LockWaitBudget()
        self._restore_budget = LockWaitBudget()
        self.on_registration_changed: Callable[[str, str, str], None] | None = None
        self.inbox_maximum = _INBOX_MAXIMUM_FACTOR * options.inbox_limit
        self._failure_events: list[Notification] = []
        # Our connections that the server may still consider alive, newest last.
        self.backends: list[BackendInfo] = []

    def on_call_succeeded(self, call: Call[Any], result: Any = None) -> None:
        """Record a successful call."""
        channel = result.get("Channel", "") if isinstance(result, dict) else ""
        super().on_call_succeeded(call, channel)
        if call.registration_change is not None and self.on_registration_changed is not None:
            self.on_registration_changed(call.ident, *call.registration_change)

    def on_connection_lost(self, reason: object, now: float) -> None:
        """Record the loss of the connection, and queue a local event."""
        was_connected = self.heartbeat.is_connected
        super().on_connection_lost(reason, now)
        if was_connected:
            self.inbox.append(Notification({"Type": SYS, "Evt": CONNECTION_LOST}, None, ""))

    def on_connected(self, now: float) -> None:
        """Record a new connection; after a loss, queue "reconnected" and the failure events."""
        super().on_connected(now)
        self.inbox.extend(self._failure_events)
        self._failure_events.clear()

    def deregister_calls(self) -> Iterator[Call[Any]]:
        """Yield the calls that deregister all nodes."""
        for chunk in _chunks(self.registration.idents):
            yield gateway_calls.init_or_deinit_many("deinit", chunk, _CLOSING_SECONDS)

    def _on_event(self, header: dict[str, Any]) -> None:
        """Do nothing: the user of the gateway processes events, and ignores outdated ones."""

    def restore_calls(self) -> Calls[None]:
        """Yield the calls that restore all registrations on a new connection."""
        backend, _ = yield calls.set_up_session(
            None, synchronous_commit=self.options.synchronous_commit
        )
        self.backends.append(backend)
        del self.backends[:-_MAX_BACKENDS]
        self._restore_budget = LockWaitBudget(max_wait=_RESTORE_SECONDS, burst=_RESTORE_SECONDS)
        if self.registration.idents:
            try:
                # This ends the lost session, so that its nodes can register again.
                yield calls.evaluate()
            except (MessagesError, psycopg.Error) as error:
                if isinstance(error, MessagesError) and error.number is None:
                    raise
                self.log.warning("%s: housekeeping failed: %s", self.ident, error)
        for chunk in _chunks(self.registration.idents):
            init_many = partial(gateway_calls.init_or_deinit_many, "init")
            answers = yield from self._run_for_each(init_many, chunk, str)
            for ident, answer in zip(chunk, answers, strict=True):
                yield from self._on_init_answer(ident, answer)
        yield from self._restore_joins()
        del self.backends[:-1]

    def _on_init_answer(self, ident: str, answer: Answer) -> Calls[None]:
        if answer["Err"] == "0":
            self.channel = answer["Channel"]
            return
        if answer["Err"] == _IDENT_TAKEN:
            # The server may still have earlier connections of ours: terminate them, and reconnect.
            has_ended_any = False
            for backend in self.backends[:-1]:
                has_ended_any |= yield calls.end_backend(backend)
            if has_ended_any:
                raise IdentTaken(answer["Errstr"])
        if ident in self.registration.idents:
            self._give_up(ident, "init", ident, answer)

    def _restore_joins(self) -> Calls[None]:
        joins = self.registration.joins()
        # Each topic_observe blocks all other topic changes until its commit, so it runs alone.
        observations = [join for join in joins if join[1] == "topic_observe"]
        other_joins = [join for join in joins if join[1] != "topic_observe"]
        for chunk in (*_chunks(other_joins), *([join] for join in observations)):
            answers = yield from self._run_for_each(gateway_calls.join_many, chunk, itemgetter(2))
            for (ident, function, topic), answer in zip(chunk, answers, strict=True):
                if answer["Err"] != "0" and self.registration.has_join(ident, function, topic):
                    self._give_up(ident, function, topic, answer)

    def _run_for_each(
        self,
        create_call: Callable[[Sequence[T], float], Call[list[Answer]]],
        values: Sequence[T],
        subject_of: Callable[[T], str],
    ) -> Calls[list[Answer]]:
        """Run one call for all values; if the server aborts the call, run one for each value.

        If the server aborts the call for one value, the answer of this value has error 56.
        ``subject_of`` returns the node or topic that the call locks for a value.
        """
        subjects = [subject_of(value) for value in values]
        seconds = self._restore_budget.timeout_seconds(subjects)
        is_single = len(values) == 1
        try:
            answers: list[Answer] = yield create_call(values, seconds)
        except (MessagesError, psycopg.Error) as error:
            if isinstance(error, MessagesError) and error.number is None:
                raise
            if isinstance(error, errors.LockNotAvailable):
                self._restore_budget.record_timeout(seconds, subjects[0] if is_single else None)
            if is_single:
                self.log.warning("%s: a registration failed: %s", self.ident, error)
                return [{"Err": "56", "Errstr": str(error)}]
            answers = []
            for value in values:
                answers += yield from self._run_for_each(create_call, [value], subject_of)
            return answers
        self._restore_budget.record_success(*subjects)
        return answers

    def _give_up(self, ident: str, function: str, subject: str, answer: Answer) -> None:
        """Forget a registration that could not be restored; log it, and create its event."""
        self.registration.drop(ident, function, subject)
        text = "%s: could not restore %s(%r) of %s: %s"
        self.log.warning(text, self.ident, function, subject, ident, answer.get("Errstr"))
        event = _LEAVE_FUNCTIONS.get(function, "disconnect")
        topic = {} if function == "init" else {"Topic": subject}
        header = {"Type": SYS, "Evt": event, "Ident": ident, **topic, "Err": answer["Err"]}
        self._failure_events.append(Notification({**header, "Nodes": [ident]}, None, ""))


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _CHUNK_SIZE):
        yield values[start : start + _CHUNK_SIZE]


class Gateway:
    """One session that many nodes share; each call names the node that makes it.

    ``name`` appears in the log and in ``application_name``; it is not registered as a node. Tasks
    may share a gateway; sends that they make at the same time share round trips. After a lost
    connection the gateway reconnects, and registers all nodes again.
    """

    def __init__(self, name: str, dsn: str = "", *, options: Options | None = None) -> None:
        self.name = name
        options = options or Options()
        self._state = GatewayState(name, options)
        self._session = AsyncNodeSession(complete_conninfo(dsn, name), self._state, options)
        # Received messages and events, oldest first. For the local events see GatewayState.
        self.inbox = self._state.inbox
        self._change_lock = asyncio.Lock()
        self._reconnect_seconds = options.reconnect_wait.total_seconds()

    async def open(self) -> None:
        """Connect without a retry; raise ServerUnreachable, or ConnectionShared for a pooler."""
        await self._session.open()

    async def close(self) -> None:
        """Deregister all nodes, disconnect and fail waiting calls immediately."""
        await self._session.close()

    async def wait_closed(self) -> None:
        """Wait until the gateway is closed."""
        await self._session.wait_closed()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection on which all nodes are registered."""
        return self._state.heartbeat.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether the gateway is closed or closing, so that it does not reconnect."""
        return self._state.is_stopped

    @property
    def echo_seconds(self) -> float | None:
        """Seconds that the last probe of the connection took; None before the first one."""
        return self._state.heartbeat.probe_seconds

    @property
    def pid(self) -> int:
        """Process id of the newest connection's backend; 0 before the first connection."""
        backends = self._state.backends
        return backends[-1].pid if backends else 0

    def set_registration_callback(self, callback: Callable[[str, str, str], None]) -> None:
        """Set a callback for successful registration changes.

        The arguments of the callback are the node, the function ("deinit" also for ``crash``), and
        the topic, or again the node if the function has no topic. The callback is called before
        later notifications are processed, and even if the task that made the change was cancelled.
        """
        self._state.on_registration_changed = callback

    async def run(
        self, ident: str, function: str, *arguments: str | None, can_wait: bool = True
    ) -> Answer:
        """Call a function of the SQL core as a node; return its answer, even if that is an error.

        ``init``, ``deinit``, ``crash`` and ``use`` take no arguments. The answer of ``get_data`` is
        the message's header, with the text of the body as ``Body``. Raises ConnectionLost or
        NodeClosed without a connection, TypeError or ValueError for wrong arguments, and psycopg's
        errors if the server aborts the call. LockNotAvailable means that another session holds a
        lock that the change needs; the call waits 1 ms for a lock, or longer if ``can_wait``.
        """
        try:
            if function in NODE_FUNCTIONS and not arguments:
                return await self._change(ident, function, ident, can_wait=can_wait)
            if function in JOIN_OR_LEAVE and len(arguments) == 1 and arguments[0] is not None:
                return await self._change(ident, function, arguments[0], can_wait=can_wait)
            if function in FUNCTIONS:
                return await self._session.run(gateway_calls.call_as(ident, function, *arguments))
        except MessagesError as error:
            if error.number is None:
                raise
            return {"Err": str(error.number), "Errstr": error.text}
        raise TypeError(f"a gateway has no function {function}{arguments!r:.100}")

    async def _change(self, ident: str, function: str, subject: str, *, can_wait: bool) -> Answer:
        """Change the registration of a node; ``subject`` is the topic, or ``ident`` without one."""
        lock_budget = self._state.lock_budget
        deadline = monotonic() + self._reconnect_seconds
        # One change at a time, so that the lock timeout of one shortens the waits of the next ones.
        async with self._change_lock:
            if not self.is_connected and monotonic() >= deadline:
                # The time for a reconnect has passed while this call waited for its turn.
                raise ConnectionLost(f"{self.name} is not connected")
            seconds = lock_budget.timeout_seconds((subject,)) if can_wait else MIN_LOCK_WAIT_SECONDS
            call = gateway_calls.change_registration(ident, function, subject, seconds)
            try:
                answer = await self._session.run(call)
            except errors.LockNotAvailable:
                lock_budget.record_timeout(seconds, subject)
                raise
            lock_budget.record_success(subject)
            return answer

    def forget(self, ident: str, function: str = "init", topic: str = "") -> None:
        """Do not restore a node, or its join of a topic, after a lost connection."""
        self._state.registration.drop(ident, function, topic or ident)

    def set_inbox_callback(self, callback: Callable[[], None]) -> None:
        """Set a callback that takes from the inbox after each read; it must not raise errors."""
        self._state.on_received = callback

    def mark_taken(self, number: int) -> None:
        """Resume reading if the inbox was full before ``number`` notifications were taken."""
        self._session.on_taken(number)
