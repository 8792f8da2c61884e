"""State of a node: messages, pending calls, registration, counters. No I/O."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf
from time import monotonic
from typing import Any

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
    HeaderCache,
    Message,
    Notification,
    PendingCall,
    Replier,
    check_header,
    fetch_text,
    message_of,
    split_call,
)
from psqlmessages.client.options import Options
from psqlmessages.client.refused_calls import refused_calls
from psqlmessages.client.registration import Registration
from psqlmessages.client.transactions import Steps, Wait
from psqlmessages.client.wakeups import PUBLISHED, WaitLists, WakeupCounters
from psqlmessages.exceptions import (
    Caller,
    CallFailed,
    ConnectionLost,
    IdentTaken,
    MessagesError,
    NodeClosed,
    NotAuthorized,
    error_for,
    failure_text,
)
from psqlmessages.retry import Backoff, RateLimitedLogger, error_line
from psqlmessages.wire import MalformedPayload


@dataclass(slots=True)
class NodeCounters:
    """Counters since the node was created; reading them needs no query.

    ``received`` counts notifications, ``fetched`` large bodies, ``foreign`` notifications on
    unknown channels, ``late_answers`` answers to calls that had ended, ``lost_bodies`` large
    bodies of messages that could not be fetched, ``evaluation_failures`` failed housekeeping and
    probes, ``gaps`` expired subscriptions, ``dropped_events`` events that the program never reads.
    """

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

# Opening a node retries for this long if its name is taken. If the process that used the name was
# killed, the server may not know that yet.
IDENT_WAIT_SECONDS = 0.5
IDENT_RETRY_SECONDS = 0.02
# If the program reads only streams or queues, events are dropped when the inbox has this size.
_MAX_UNREAD_EVENTS = 1_000


class NodeState:
    """State of a node: unread messages, pending calls, registration, heartbeat, counters.

    The session passes notifications to it, and runs the calls that its generators yield.
    """

    def __init__(self, ident: str, options: Options) -> None:
        self.ident = ident
        # The PostgreSQL role of the connection; a placeholder until there is one.
        self.role = Caller().role
        self.options = options
        self.registration = Registration(ident)
        self.heartbeat = Heartbeat(options)
        self.backoff = Backoff(options.backoff_min, options.backoff_max)
        self.counters = NodeCounters()
        self.log = RateLimitedLogger(logger)
        self.wakeups = WakeupCounters()
        self.wait_lists = WaitLists(self.wakeups)
        self.channel = ""
        # The session disconnects if the inbox has more messages. Only a Gateway sets a limit.
        self.inbox_maximum = inf
        self.inbox: deque[Notification] = deque()
        self._headers = HeaderCache()
        self.backend: calls.BackendInfo | None = None
        self.is_stopped = False
        # Called after notifications or local events were put in the inbox.
        self.on_received: Callable[[], object] = lambda: None
        self._has_unreported = False
        # Called after a message was taken from the inbox.
        self.on_taken: Callable[[], object] = lambda: None
        # Called in the loop of an AsyncNode when it is stopped.
        self.on_stop: Callable[[], object] = lambda: None
        # Whether the program has read messages from the inbox, not only streams or queues.
        self._reads_messages = False
        self._pending: dict[str, PendingCall] = {}
        # Distinguishes the tokens of ``call`` from those that the program passes to ``rpc``.
        self._token_prefix = f"{os.urandom(6).hex()}-"
        self._call_count = 0

    # Notifications

    def receive(self, notifications: Sequence[tuple[str, str]]) -> None:
        """Process notifications, each a channel and a payload, and call ``on_received``."""
        self.store(notifications)
        if self._has_unreported:
            self._has_unreported = False
            self.on_received()

    def store(self, notifications: Sequence[tuple[str, str]]) -> None:
        """Process notifications; the next ``receive`` calls ``on_received``."""
        if notifications:
            self.heartbeat.received_at = monotonic()
            self._has_unreported = True
            for channel, payload in notifications:
                self.feed(channel, payload)

    def feed(self, channel: str, payload: str) -> None:
        """Process one notification; raise no error, even if the notification is malformed."""
        self.counters.received += 1
        if channel == self.channel:
            if (parts := self._headers.split(payload)) is not None:
                self.inbox.append(Notification(*parts, payload))
                return
            if (parts := split_call(payload)) is not None:
                self._feed_message(Notification(*parts, payload))
                return
        self._feed_uncached(channel, payload)

    def _feed_message(self, notification: Notification) -> None:
        if notification.header["Type"] != RETURN or not self._deliver_answer(notification):
            self.inbox.append(notification)

    def _feed_uncached(self, channel: str, payload: str) -> None:
        """Process a notification on another channel, or one whose header must be parsed."""
        if channel != self.channel:
            if self.wait_lists.on_notification(channel, payload):
                return
            self.counters.foreign += 1
            text = "%s: ignored a notification on the unknown channel %.63r"
            self.log.warning(text, self.ident, channel)
            return
        try:
            parsed = wire.parse(payload)
            check_header(parsed.header)
        except MalformedPayload as error:
            self._on_malformed(error)
            return
        header = parsed.header
        self._headers.add(payload, header)
        if header["Type"] == PROBE:
            if not self.heartbeat.accept_echo(header):
                self._on_malformed(MalformedPayload("a probe that we did not send"))
            return
        if header["Type"] == SYS and header["Evt"] == PUBLISHED:
            self.wakeups.on_published(header.get("Topic", ""))
            return
        notification = Notification(header, parsed.text, payload)
        if header["Type"] == SYS:
            self._on_event(header)
            is_unread = self.wakeups.has_readers and not self._reads_messages
            if is_unread and len(self.inbox) >= _MAX_UNREAD_EVENTS:
                self.counters.dropped_events += 1
                return
        self._feed_message(notification)

    def take(self) -> Notification | None:
        """Take the oldest notification; return None if another thread has taken the last one."""
        self._reads_messages = True
        try:
            notification = self.inbox.popleft()
        except IndexError:
            return None
        self.on_taken()
        return notification

    def take_message(self, replier: Replier) -> Message | None:
        """Take the oldest message; None if that needs a wait or a fetch, or after ``stop``."""
        if not self.inbox or self.inbox[0].is_large or self.is_stopped:
            return None
        if (notification := self.take()) is None:
            return None
        return self.create_message(notification, notification.text, replier)

    def next_message(self, timeout: Duration | None, replier: Replier) -> Steps[Message | None]:
        """Return the next message; None if none comes within ``timeout``, or at ``stop``."""
        seconds = seconds_of(timeout, "timeout") if timeout is not None else inf
        deadline = monotonic() + seconds
        while not self.is_stopped:
            if not self.inbox:
                yield Wait(lambda: self.inbox, deadline)
            notification = self.take() if not self.is_stopped else None
            if notification is None:
                if monotonic() >= deadline:
                    return None
                continue
            if notification.is_large:
                message = yield from self._fetch_message(notification, replier)
            else:
                message = self.create_message(notification, notification.text, replier)
            if message is not None:
                return message
        return None

    def _fetch_message(self, notification: Notification, replier: Replier) -> Steps[Message | None]:
        """Create a message; if its large body cannot be fetched, ``body`` raises the error."""
        try:
            text = yield from fetch_text(notification, self.inbox)
        except (MessagesError, psycopg.Error) as error:
            self.counters.lost_bodies += 1
            self.log.warning("%s: a large body could not be fetched: %s", self.ident, error)
            if not isinstance(error, MessagesError):
                error = MessagesError(error_line(error))
            message = message_of(notification, None, replier)
            message.error = error
            return message
        self.counters.fetched += 1
        return self.create_message(notification, text, replier)

    def create_message(
        self, notification: Notification, text: str | None, replier: Replier
    ) -> Message | None:
        """Create a message with the decoded ``text`` as body; None if the text is malformed."""
        try:
            return message_of(notification, text, replier)
        except MalformedPayload as error:
            self._on_malformed(error)
            return None

    # Calls and their answers

    def begin_call(self, callee: str) -> PendingCall:
        """Create a pending call with a new token; ``callee`` is "" if a topic is called."""
        self._call_count += 1
        pending = PendingCall(f"{self._token_prefix}{self._call_count}", callee)
        if self.is_stopped:
            pending.fail(self.stopped_error("before the call"))
        self._pending[pending.token] = pending
        return pending

    def end_call(self, pending: PendingCall) -> None:
        """Collect no more answers to a call."""
        del self._pending[pending.token]

    def pending_calls(self) -> list[PendingCall]:
        """Return the calls that wait for answers, oldest first."""
        return list(self._pending.values())

    def end_waits(self) -> None:
        """End all pending calls and waits of an AsyncNode that was stopped."""
        self.on_stop()
        self.wait_lists.wake_all()
        for pending in self.pending_calls():
            pending.add(self.stopped_error("while it waited for an answer"))

    def stopped_error(self, when: str) -> NodeClosed:
        """Create the error of a wait that ``stop`` ended."""
        return NodeClosed(f"node {self.ident} was stopped {when}")

    def wait_published(self, topic: str, timeout: Duration) -> Steps[bool]:
        """Wait until a subscription should be read; return False at the timeout or ``stop``."""
        self.wakeups.has_readers = True
        deadline = monotonic() + seconds_of(timeout, "timeout")
        yield Wait(lambda: self.wakeups.has_new(topic), deadline)
        return self.wakeups.mark_seen(topic)

    def next_answer(self, pending: PendingCall, replier: Replier) -> Steps[Message]:
        """Return the oldest received answer; raise the error that came instead."""
        notification = pending.answers.popleft()
        if isinstance(notification, MessagesError):
            raise notification
        text = yield from fetch_text(notification, self.inbox)
        self.counters.fetched += notification.is_large
        header = notification.header
        if header.get("Err", "0") != "0":
            raise error_for(int(header["Err"]), text or header.get("Errstr", ""))
        if (message := self.create_message(notification, text, replier)) is None:
            raise MessagesError(f"{self.ident}: the answer is malformed")
        return message

    # Connection

    def restore_calls(self) -> Generator[Call[Any], Any, None]:
        """Yield the calls that set up a new connection and restore all registrations."""
        set_up = partial(calls.set_up_session, synchronous_commit=self.options.synchronous_commit)
        backend: calls.BackendInfo | None = None
        acting = ""
        for ident in self.registration.idents:
            try:
                if backend is None:
                    backend, self.channel = yield set_up(ident)
                else:
                    self.channel = yield calls.init(ident)
            except IdentTaken:
                if self.backend is not None:
                    # After a network outage, the server may still have our earlier connection. End
                    # it, so that the next attempt succeeds.
                    yield calls.end_backend(self.backend)
                raise
            except NotAuthorized as error:
                self._record_refused_call(ident, error)
                if ident == self.ident:
                    raise
                self._drop_registration(ident, "init", ident, error)
                continue
            acting = ident
            yield from self._join_topics(ident)
        if backend is None:
            backend, _ = yield set_up(None)
        if acting != self.registration.acting_node:
            yield calls.use(self.registration.acting_node)
        self.backend = backend

    def _join_topics(self, ident: str) -> Generator[Call[Any], Any, None]:
        for call in self.registration.join_calls(ident):
            try:
                yield call
            except MessagesError as error:
                if error.number is None:
                    raise
                self._record_refused_call(ident, error, call)
                function, topic = call.registration_change or ("", "")
                self._drop_registration(ident, function, topic, error)

    def _drop_registration(
        self, ident: str, function: str, subject: str, error: MessagesError
    ) -> None:
        """Forget and log a join that was not restored; for "init", forget the whole node."""
        self.registration.drop(ident, function, subject)
        logger.warning("%s: could not restore %s(%r): %s", ident, function, subject, error)

    def deregister_calls(self) -> Iterator[Call[Any]]:
        """Yield the calls that deregister all nodes."""
        yield from map(calls.deinit, self.registration.idents)

    def on_call_succeeded(self, call: Call[Any], result: Any = None) -> None:
        """Record a successful call."""
        if call.registration_change is not None:
            self.registration.on_call_succeeded(*call.registration_change, call.ident)
            if call.registration_change[0] == "init" and result:
                # The session has a new channel if an administrator had disconnected its nodes.
                self.channel = result

    def on_call_failed(self, call: Call[Any], error: Exception) -> None:
        """Record a call that failed."""
        ident = call.ident or self.registration.acting_node or self.ident
        self._record_refused_call(ident, error, call)

    def _record_refused_call(
        self, ident: str, error: Exception, call: Call[Any] | None = None
    ) -> None:
        refused_calls.record(ident, error, *((call.sql, call.params) if call else ()))
        if isinstance(error, MessagesError):
            error.caller = Caller(self.role, ident)

    def on_connected(self, now: float) -> None:
        """Record a new connection, and add the event "reconnected" to the inbox after a loss."""
        lost_at = self.heartbeat.lost_at
        self.backoff.on_connected(now)
        self.heartbeat.on_connected(now)
        self.wakeups.on_connected()
        self.wait_lists.wake_all()
        for pending in self.pending_calls():
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
        self.backoff.on_connection_lost(now)
        self.log.warning("%s: the connection is lost: %s", self.ident, error_line(reason))
        for pending in self.pending_calls():
            pending.fail(ConnectionLost(f"{self.ident}: the connection was lost during the call"))

    def on_reconnect_failed(self, reason: object, now: float) -> None:
        """Record a failed attempt to reconnect."""
        delay = self.backoff.record_failure(now)
        text = "%s: cannot reconnect, next attempt in %.1f s: %s"
        self.log.warning(text, self.ident, delay, error_line(reason))

    def due_calls(self, now: float) -> list[Call[Any]]:
        """Return the due housekeeping and probe calls; an overdue echo raises ConnectionLost."""
        heartbeat = self.heartbeat
        if not self.registration.idents:
            # Without a node there is no channel.
            heartbeat.cancel_probe(now)
        if heartbeat.is_overdue(now):
            raise ConnectionLost("a notification to the channel of the node did not arrive")
        due: list[Call[Any]] = []
        if heartbeat.check_housekeeping_due(now):
            due.append(calls.evaluate())
        if heartbeat.check_probe_due(now):
            payload = heartbeat.create_echo_payload()
            if payload is None:
                due.append(calls.probe(self.channel, self._on_probe_answered))
            else:
                due.append(calls.probe_by_notify(self.channel, payload))
        return due

    def _on_probe_answered(self, is_listening: bool) -> None:
        if not is_listening:
            raise ConnectionLost("the backend does not listen on the channel of the node")
        self.heartbeat.on_probe_answered(monotonic())

    def on_due_call_failed(self, error: object, now: float) -> None:
        """Record that housekeeping or a probe failed although the connection works."""
        self.heartbeat.cancel_probe(now)
        self.counters.evaluation_failures += 1
        self.log.warning("%s: housekeeping or a probe failed: %s", self.ident, error)

    def on_handler_failed(self, message: Message, error: BaseException) -> str:
        """Record that a handler raised an error; return the text for the sender of the message."""
        if isinstance(error, CallFailed) and message.wants_answer and not message.is_answered:
            # The handler has raised CallFailed to choose the text.
            return error.text
        self.counters.handler_failures += 1
        text = "%s: the handler of a message of type %s failed"
        self.log.warning(text, self.ident, message.type, exc_info=error)
        return failure_text(self.ident, error)

    def on_reply_failed(self, message: Message, error: Exception) -> None:
        """Record that an answer could not be sent; the caller may be gone."""
        self.counters.reply_failures += 1
        self.log.warning("%s: could not answer %s: %s", self.ident, message.sender, error)

    def _on_malformed(self, error: MalformedPayload) -> None:
        self.counters.malformed += 1
        self.log.warning("%s: a malformed notification was dropped: %s", self.ident, error)

    def _on_event(self, header: dict[str, Any]) -> None:
        event, ident = header["Evt"], header.get("Ident", "")
        self.registration.on_event(event, ident, header.get("Topic", ""))
        for pending in self.pending_calls():
            if pending.callee == ident:
                pending.on_event(event)

    def _deliver_answer(self, notification: Notification) -> bool:
        """Pass an answer to its pending call; return False if the program chose its token."""
        token = notification.header.get("Token", "")
        if (pending := self._pending.get(token)) is not None:
            pending.add(notification)
            return True
        if token.startswith(self._token_prefix):
            self.counters.late_answers += 1
            sender = notification.header.get("From")
            logger.debug("%s: an answer from %s came late", self.ident, sender)
            return True
        return False
