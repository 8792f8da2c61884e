"""State of a node: notifications, waiters, registration, counters. No I/O."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from math import inf
from time import monotonic
from typing import Any, Final

import psycopg

from psqlmessages import wire
from psqlmessages.client import calls
from psqlmessages.client.calls import Call
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.heartbeat import PROBE, Heartbeat
from psqlmessages.client.messages import (
    RECONNECTED,
    RETURN,
    SYS,
    TOPIC,
    HeaderCache,
    Message,
    Notification,
    PendingCall,
    Replier,
    check,
)
from psqlmessages.client.options import Options
from psqlmessages.client.registration import Registration
from psqlmessages.client.transactions import Steps, Wait
from psqlmessages.client.wakeups import PUBLISHED, WaitLists, WakeupCounters
from psqlmessages.exceptions import (
    CallFailed,
    ConnectionLost,
    IdentTaken,
    InvalidArgument,
    MessagesError,
    NodeClosed,
    NotAuthorized,
    error_for,
)
from psqlmessages.retry import Backoff, RateLimitedLogger, error_line
from psqlmessages.wire import MalformedPayload

# Counters


@dataclass(slots=True)
class NodeCounters:
    """Counters since the node was created; reading them needs no query."""

    calls: int = 0
    received: int = 0
    fetched: int = 0
    malformed: int = 0
    foreign: int = 0
    late_answers: int = 0
    lost_bodies: int = 0
    handler_failures: int = 0
    reply_failures: int = 0
    evaluation_failures: int = 0
    lost_connections: int = 0
    reconnects: int = 0
    gaps: int = 0
    dropped_events: int = 0
    lost_leases: int = 0


logger = logging.getLogger("psqlmessages")

# A connection that breaks sooner does not reset the backoff.
_STABLE_SECONDS = 5.0
_UNHEARD_EVENTS = 1_000


class NodeState:
    """State of a node between its connection and its caller."""

    def __init__(self, ident: str, options: Options) -> None:
        self.ident = ident
        self.options = options
        self.registration = Registration(ident)
        self.heartbeat = Heartbeat(options)
        self.backoff = Backoff(options.backoff_least, options.backoff_most)
        self.counters = NodeCounters()
        self.log = RateLimitedLogger(logger)
        self.wakes = WakeupCounters()
        self.queues = WaitLists(self.wakes)
        self.channel = ""
        self.inbox: deque[Notification] = deque()
        self._headers = HeaderCache()
        self.backend: calls.BackendInfo | None = None
        self._opened_at = 0.0
        self.is_stopped = False
        # Called after a message was taken from the inbox.
        self.on_taken: Callable[[], object] = lambda: None
        self._is_taking = False
        self._pending: dict[str, PendingCall] = {}
        # Distinguishes the tokens of our calls from tokens chosen by a caller of rpc.
        self._prefix = f"{os.urandom(6).hex()}-"
        self._questions = 0

    # Notifications

    def feed(self, channel: str, payload: str) -> None:
        """Process one notification; raises no error, whatever it contains."""
        self.counters.received += 1
        if channel == self.channel and (parts := self._headers.split(payload)) is not None:
            self.inbox.append(Notification(*parts, payload))
        else:
            self._feed_new(channel, payload)

    def _feed_new(self, channel: str, payload: str) -> None:
        if channel != self.channel:
            if self.queues.on_notification(channel, payload):
                return
            self.counters.foreign += 1
            self.log.warning(
                "%s: ignored a notification on the unknown channel %.63r", self.ident, channel
            )
            return
        try:
            parsed = wire.parse(payload)
            check(parsed.header)
        except MalformedPayload as error:
            self._malformed(error)
            return
        header = parsed.header
        self._headers.keep(payload, header)
        if header["Type"] == PROBE:
            if not self.heartbeat.is_echo(header):
                self._malformed(MalformedPayload("a probe that we did not send"))
            return
        if header["Type"] == SYS and header["Evt"] == PUBLISHED:
            self.wakes.published(header.get("Topic", ""))
            return
        notification = Notification(header, parsed.text, payload)
        if header["Type"] == SYS:
            self._on_event(header)
            if self._is_unheard():
                self.counters.dropped_events += 1
                return
        if header["Type"] != RETURN or not self._answered(notification):
            self.inbox.append(notification)

    def take(self) -> Notification | None:
        """Take the oldest notification; None if there is none: another thread may have taken it."""
        self._is_taking = True
        try:
            notification = self.inbox.popleft()
        except IndexError:
            return None
        self.on_taken()
        return notification

    def next_message(self, timeout: Duration | None, replier: Replier) -> Steps[Message | None]:
        """Return the next message; None if none comes within ``timeout``, or at ``stop``."""
        seconds = seconds_of(timeout, "timeout") if timeout is not None else inf
        while not self.is_stopped:
            deadline = inf
            if not self.inbox:
                deadline = monotonic() + seconds
                yield Wait(lambda: self.inbox, deadline)
            notification = self.take() if not self.is_stopped else None
            if notification is not None:
                if notification.is_kept:
                    message = yield from self._with_body(notification, replier)
                else:
                    message = self.message(notification, notification.text, replier)
                if message is not None:
                    return message
            elif monotonic() >= deadline:
                break
        return None

    def _with_body(self, notification: Notification, replier: Replier) -> Steps[Message | None]:
        try:
            text = yield from text_of(notification, self)
        except (MessagesError, psycopg.Error) as error:
            # ``body`` raises the error.
            self.counters.lost_bodies += 1
            self.log.warning("%s: a large body could not be fetched: %s", self.ident, error)
            message = self.message(notification, None, replier)
            if message is not None:
                if not isinstance(error, MessagesError):
                    error = MessagesError(error_line(error))
                message.error = error
            return message
        return self.message(notification, text, replier)

    def message(
        self, notification: Notification, text: str | None, replier: Replier
    ) -> Message | None:
        """Create the message of a notification and its body text; None if the body is malformed."""
        header = notification.header
        content: Any = None
        try:
            if text is not None:
                content = wire.decode(text, header.get("Enc"))
        except MalformedPayload as error:
            self._malformed(error)
            return None
        find, kind, to = header.get, header["Type"], header.get("To", "")
        # Positional: a dozen keyword arguments take as long as everything else here.
        return Message(
            kind,
            find("From", ""),
            to,
            content,
            find("Topic", to if kind == TOPIC else ""),
            find("Evt", ""),
            find("Ident", ""),
            find("Token"),
            find("Id"),
            find("Size", 0),
            away=notification.away,
            replier=replier,
        )

    # Calls and their answers

    @contextmanager
    def asking(
        self, callee: str, on_answer: Callable[[], object] = lambda: None
    ) -> Iterator[PendingCall]:
        """Create a token and collect its answers; ``callee`` is "" for a topic's listeners."""
        self._questions += 1
        pending = PendingCall(f"{self._prefix}{self._questions}", callee, on_answer)
        self._pending[pending.token] = pending
        try:
            yield pending
        finally:
            del self._pending[pending.token]

    def on_stopped(self) -> None:
        """End all pending calls and waits for elements."""
        self.queues.wake_all()
        for pending in list(self._pending.values()):
            pending.add(self.stopped_error("while it waited for an answer"))

    def stopped_error(self, when: str) -> NodeClosed:
        """Create the error of a wait that ``stop`` ended."""
        return NodeClosed(f"node {self.ident} was stopped {when}")

    def reply(self, message: Message, body: Any) -> Steps[None]:
        """Answer a message whose sender gave a token."""
        try:
            yield calls.return_(message.sender, message.token or "", body)
        except (InvalidArgument, TypeError, ValueError, psycopg.Error):
            # The caller still needs an answer: allow reply_error.
            message.is_answered = False
            raise

    def wait_published(self, topic: str, timeout: Duration) -> Steps[bool]:
        """Wait until a subscription should be read; return False at the timeout."""
        self.wakes.is_used = True
        yield Wait(lambda: self.wakes.is_new(topic), monotonic() + seconds_of(timeout, "timeout"))
        return self.wakes.take(topic)

    @property
    def is_asking(self) -> bool:
        """Whether any call is pending."""
        return bool(self._pending)

    def next_answer(self, pending: PendingCall, replier: Replier) -> Steps[Message]:
        """Return the next answer; raise the error that it is or has, or that it is malformed."""
        notification = pending.answers.popleft()
        if isinstance(notification, MessagesError):
            raise notification
        text = yield from text_of(notification, self)
        if notification.header.get("Err", "0") != "0":
            raise error_for(
                int(notification.header["Err"]), text or notification.header.get("Errstr", "")
            )
        message = self.message(notification, text, replier)
        if message is None:
            raise MessagesError(f"{self.ident}: the answer is malformed")
        return message

    # Connection

    def opening(self) -> Generator[Call[Any], Any, None]:
        """Yield the calls that restore all registrations on a new connection; take answers."""
        is_durable = self.options.synchronous_commit
        backend: calls.BackendInfo | None = None
        acting = ""
        for ident, own in self.registration.replay():
            try:
                if backend is None:
                    both = yield calls.open_as(ident, synchronous_commit=is_durable)
                    backend, self.channel = both
                else:
                    self.channel = yield calls.init(ident)
            except IdentTaken:
                if self.backend is not None:
                    # After a network stall the server still considers our earlier connection alive.
                    yield calls.end_backend(self.backend)
                raise
            except NotAuthorized as error:
                if ident == self.ident:
                    raise
                self._dropped(ident, "init", ident, error)
                continue
            acting = ident
            yield from self._register(ident, own)
        if backend is None:
            backend = yield calls.backend_info(synchronous_commit=is_durable)
        if acting != self.registration.acting:
            yield calls.use(self.registration.acting)
        self.backend = backend

    def _register(self, ident: str, own: list[Call[Any]]) -> Generator[Call[Any], Any, None]:
        for call in own:
            try:
                yield call
            except MessagesError as error:
                if error.number is None:
                    raise
                function, topic = call.registers or ("", "")
                self._dropped(ident, function, topic, error)

    def _dropped(self, ident: str, function: str, subject: str, error: MessagesError) -> None:
        self.registration.drop(ident, function, subject)
        logger.warning("%s: could not restore %s(%r): %s", ident, function, subject, error)

    def closing(self) -> Iterator[Call[Any]]:
        """Yield the calls that deregister all nodes."""
        yield from map(calls.deinit, self.registration.idents)

    def is_healthy(self, now: float) -> bool:
        """Return whether there is a connection and no probe is overdue."""
        return self.heartbeat.is_connected and not self.heartbeat.is_overdue(now)

    def on_call_succeeded(self, call: Call[Any], result: Any = None) -> None:
        """Record a successful call."""
        if call.registers is not None:
            self.registration.on_call_succeeded(*call.registers, call.ident)
            if call.registers[0] == "init" and result:
                # After a disconnect by an administrator the channel is a new one.
                self.channel = result

    def on_connected(self, now: float) -> None:
        """Record a new connection with all nodes registered; after a loss, queue "reconnected"."""
        lost_at = self.heartbeat.lost_at
        self._opened_at = now
        self.heartbeat.on_connected(now)
        self.wakes.connected()
        self.queues.wake_all()
        for pending in list(self._pending.values()):
            pending.on_connected()
        if lost_at is not None:
            self.counters.reconnects += 1
            away = timedelta(seconds=now - lost_at)
            logger.info("%s: reconnected after %s", self.ident, away)
            self.inbox.append(Notification({"Type": SYS, "Evt": RECONNECTED}, None, "", away))

    def on_connection_lost(self, reason: object, now: float) -> None:
        """Record the loss of the connection; calls sent on it get no answer."""
        if not self.heartbeat.is_connected:
            return
        self.counters.lost_connections += 1
        self.heartbeat.on_connection_lost(now)
        if now - self._opened_at >= _STABLE_SECONDS:
            self.backoff.succeeded()
        # Delay even the first attempt: all nodes lose a restarted server at the same time.
        self.backoff.failed(now)
        self.log.warning("%s: the connection is lost: %s", self.ident, error_line(reason))
        for pending in list(self._pending.values()):
            pending.on_ended(
                ConnectionLost(f"{self.ident}: the connection was lost during the call")
            )

    def on_reconnect_failed(self, reason: object, now: float) -> None:
        """Record a failed attempt to reconnect."""
        delay = self.backoff.failed(now)
        self.log.warning(
            "%s: cannot reconnect, next attempt in %.1f s: %s",
            self.ident,
            delay,
            error_line(reason),
        )

    def due_calls(self, now: float) -> list[Call[Any]]:
        """Return housekeeping and the probe if they are due.

        Raises ConnectionLost if the last probe got no echo.
        """
        heartbeat = self.heartbeat
        if not self.registration.idents:
            heartbeat.rest(now)
        if heartbeat.is_overdue(now):
            raise ConnectionLost("a probe of its own channel got no echo")
        due: list[Call[Any]] = [calls.evaluate()] if heartbeat.evaluation_due(now) else []
        if (payload := heartbeat.probe_due(now)) is not None:
            due.append(calls.probe(self.channel, payload))
        return due

    @property
    def is_overrun(self) -> bool:
        """Whether the inbox is so full that the connection must be closed."""
        return False

    def evaluation_failed(self, error: object, now: float) -> None:
        """Record that the server refused housekeeping or a probe; the next one may succeed."""
        # The server is alive, as it answered. The probe was not sent, so no echo will come.
        self.heartbeat.rest(now)
        self.counters.evaluation_failures += 1
        self.log.warning("%s: housekeeping or a probe failed: %s", self.ident, error)

    def handler_failed(self, message: Message, error: BaseException) -> str:
        """Record that a handler raised an error; return the text for the caller."""
        if isinstance(error, CallFailed) and message.wants_answer and not message.is_answered:
            # The handler raised it for the caller to read.
            return error.text
        self.counters.handler_failures += 1
        text = "%s: the handler of a message of type %s failed"
        self.log.warning(text, self.ident, message.type, exc_info=error)
        # The text of other errors may contain details that the caller must not see.
        return f"the handler of {self.ident} failed ({type(error).__name__})"

    def reply_failed(self, message: Message, error: Exception) -> None:
        """Record an answer that could not be sent; the caller may be gone."""
        self.counters.reply_failures += 1
        self.log.warning("%s: could not answer %s: %s", self.ident, message.sender, error)

    # Internals

    def _malformed(self, error: MalformedPayload) -> None:
        self.counters.malformed += 1
        self.log.warning("%s: a malformed notification was dropped: %s", self.ident, error)

    def _on_event(self, header: dict[str, Any]) -> None:
        event, ident = header["Evt"], header.get("Ident", "")
        self.registration.on_event(event, ident, header.get("Topic", ""))
        for pending in list(self._pending.values()):
            if pending.callee == ident:
                pending.on_event(event)

    def _is_unheard(self) -> bool:
        """Return whether unread events pile up, because the node only reads streams."""
        is_only_reading = self.wakes.is_used and not self._is_taking
        return is_only_reading and len(self.inbox) >= _UNHEARD_EVENTS

    def _answered(self, notification: Notification) -> bool:
        token = notification.header.get("Token", "")
        if (pending := self._pending.get(token)) is not None:
            pending.add(notification)
            return True
        if token.startswith(self._prefix):
            self.counters.late_answers += 1
            logger.debug(
                "%s: an answer from %s came late", self.ident, notification.header.get("From")
            )
            return True
        return False


# Large bodies: each is fetched together with those queued behind it. No I/O.

_MOST_BODIES: Final = 32
# More would delay the first body and occupy memory.
_MOST_BYTES: Final = 64 * 1024


def text_of(notification: Notification, state: NodeState) -> Steps[str | None]:
    """Return the body text of a notification; raise MessagesError if it is no longer available."""
    if not notification.is_kept:
        return notification.text
    if notification.fetched is None:
        yield from _fetch_some(_fetched_with(notification, state), state)
    if notification.fetched is None:
        yield from _fetch(notification, state)
    return notification.fetched


def _fetch_some(together: list[Notification], state: NodeState) -> Steps[None]:
    if len(together) == 1:
        return
    try:
        texts = yield calls.get_data_many([one.payload for one in together])
    except (MessagesError, psycopg.Error):
        # One of them may cause the error: each is fetched separately when its turn comes.
        return
    for one, text in zip(together, texts, strict=True):
        one.fetched = text
        state.counters.fetched += text is not None


def _fetch(notification: Notification, state: NodeState) -> Steps[None]:
    call = calls.get_data(notification.payload)
    try:
        payload = yield call
    except ConnectionLost:
        # Fetching changes nothing, so retry it on the next connection.
        payload = yield call
    notification.fetched = payload.text
    state.counters.fetched += 1


def _fetched_with(notification: Notification, state: NodeState) -> list[Notification]:
    together, size = [notification], notification.header.get("Size", 0)
    for one in list(islice(state.inbox, _MOST_BODIES - 1)):
        if one.is_kept and one.fetched is None:
            size += one.header.get("Size", 0)
            if size > _MOST_BYTES:
                break
            together.append(one)
    return together
