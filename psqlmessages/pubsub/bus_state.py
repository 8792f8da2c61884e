"""State of a bus: handlers, channels, counters, backoff, SQL scripts, notification buffer."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import psycopg
from psycopg import errors, generators, pq
from psycopg.abc import PQGen

from psqlmessages.client.options import Options
from psqlmessages.client.transactions import SqlStatement
from psqlmessages.pubsub import segments
from psqlmessages.pubsub.segments import PART, SegmentAssembler, SegmentDeduplicator
from psqlmessages.retry import Backoff, RateLimitedLogger, error_line
from psqlmessages.wire import MalformedPayload


class Event(NamedTuple):
    """A received message. ``payload`` is a str, a JSON value, or None for a signal.

    ``process_id`` is the process id of the sender's backend.
    """

    process_id: int
    channel: str
    payload: Any


Handler = Callable[[Event], Any]


@dataclass(slots=True)
class BusCounters:
    """Counters since the bus was created; reading them needs no query.

    ``received`` counts notifications; a long message has several. ``published``, ``delivered``,
    ``skipped`` (because of ``skip_self``), ``unfinished`` (dropped before all segments arrived) and
    ``malformed`` (in another format) count messages.
    """

    published: int = 0
    received: int = 0
    delivered: int = 0
    skipped: int = 0
    unfinished: int = 0
    malformed: int = 0
    handler_failures: int = 0
    lost_connections: int = 0
    reconnects: int = 0


# SQL statements

T = TypeVar("T")
ConnectionT = TypeVar("ConnectionT", bound="psycopg.Connection[Any] | psycopg.AsyncConnection[Any]")


# A generator that yields statements, and returns a result of its own. It receives the first column
# of each statement's rows, without nulls.
Script = Generator[SqlStatement, list[str], T]
# Creates a script, which may depend on whether a transaction is open on the buffer's connection.
ScriptFactory = Callable[["BusBuffer[Any]"], Script[T]]

BACKEND_PID: Final = SqlStatement("SELECT pg_backend_pid()")
# Calling pg_notification_queue_usage() lets PostgreSQL remove a dead listener from a full queue.
LISTENING_CHANNELS: Final = SqlStatement(
    "SELECT pg_listening_channels() WHERE pg_notification_queue_usage() >= 0"
)
EXISTING_PIDS: Final = "SELECT pid FROM pg_stat_activity WHERE pid = ANY ($1::int[])"
TRANSACTION_TIME: Final = SqlStatement("SELECT extract(epoch FROM transaction_timestamp())")
# Notifications are not durable, so there is no need to wait for the WAL flush.
COMMIT_ASYNCHRONOUSLY: Final = SqlStatement("SELECT set_config('synchronous_commit', 'off', false)")


def listen(channel: str) -> SqlStatement:
    """Create a LISTEN for a name that ``check_channel_name`` has checked for double quotes."""
    return SqlStatement(f'LISTEN "{channel}"')


def unlisten(channel: str) -> SqlStatement:
    """Create a statement that undoes :func:`listen`."""
    return SqlStatement(f'UNLISTEN "{channel}"')


def notify(channel: str, segments: list[str]) -> SqlStatement:
    """Create a statement that sends all segments of a message, in order."""
    if len(segments) == 1:
        return SqlStatement("SELECT pg_notify($1, $2)", (channel, segments[0]))
    # Several segments are always base64, which has no comma.
    return SqlStatement(
        "SELECT count(pg_notify($1, segment)) FROM unnest(string_to_array($2, ',')) AS segment",
        (channel, ",".join(segments)),
    )


logger = logging.getLogger("psqlmessages")


class BusState:
    """State of a bus (a PubSub or AsyncPubSub): handlers, channels, inbox, timers. Does no I/O.

    ``now`` and all other times are in seconds of a monotonic clock.
    """

    def __init__(
        self, interval: float, assembler: SegmentAssembler, options: Options, *, skip_self: bool
    ) -> None:
        self._interval = interval
        self._assembler = assembler
        self._synchronous_commit = options.synchronous_commit
        self._skip_self = skip_self
        self._deduplicator = SegmentDeduplicator()
        self._handlers: dict[str, tuple[Handler, ...]] = {}
        # The subscribed channels: a dictionary, used as an ordered set.
        self._channels: dict[str, None] = {}
        self._keep_alive_at = 0.0
        self.inbox: deque[Event] = deque()
        self.counters = BusCounters()
        self.backoff = Backoff(options.backoff_min, options.backoff_max)
        self.log = RateLimitedLogger(logger)
        self.is_connected = False
        self.has_been_connected = False

    def on(self, channel: str, handler: Handler) -> None:
        """Add a handler. A handler that is added twice is called twice."""
        self._handlers[channel] = (*self._handlers.get(channel, ()), handler)

    def off(self, channel: str, handler: Handler) -> bool:
        """Undo one call of :meth:`on`; return False if there is no such handler."""
        handlers = list(self._handlers.get(channel, ()))
        if handler not in handlers:
            return False
        handlers.remove(handler)
        self._handlers[channel] = tuple(handlers)
        return True

    def deliveries(self) -> Iterator[tuple[Handler, Event]]:
        """Remove all events from the inbox; yield each handler to call, with its event."""
        while self.inbox:
            event = self.inbox.popleft()
            if event.channel not in self._channels:
                # The event arrived before the channel was unsubscribed.
                continue
            self.counters.delivered += 1
            for handler in self._handlers.get(event.channel, ()):
                yield handler, event

    def on_handler_failed(self, event: Event, error: BaseException) -> None:
        """Count and log a handler's exception."""
        self.counters.handler_failures += 1
        self.log.warning("a handler of channel %s failed", event.channel, exc_info=error)

    def is_subscribed(self, channel: str) -> bool:
        """Return whether the bus has subscribed to a channel."""
        return channel in self._channels

    def _process_notification(
        self, notification: pq.PGnotify, encoding: str, own_process_id: int
    ) -> None:
        # Raises no exception, whatever the content of the notification.
        self.counters.received += 1
        channel = notification.relname.decode(encoding, "replace")
        segment = notification.extra.decode(encoding, "replace")
        process_id = notification.be_pid
        if self._skip_self and process_id == own_process_id:
            # Count each message once, at its last segment.
            if segment[:1] != PART:
                self.counters.skipped += 1
            return
        try:
            text = self._assembler.add(process_id, channel, segment)
            if text is None:
                return
            event = Event(process_id, channel, segments.decode_payload(text))
        except MalformedPayload as error:
            self.counters.malformed += 1
            self.log.warning("a malformed message on channel %s was dropped: %s", channel, error)
        else:
            self.inbox.append(event)
        finally:
            self.counters.unfinished = self._assembler.dropped

    def process_notifications(self, buffer: BusBuffer[Any] | None) -> None:
        """Convert the notifications in a buffer to events in the inbox."""
        if buffer is not None:
            for notification in buffer.take():
                self._process_notification(notification, buffer.encoding, buffer.process_id)

    # Scripts for the connection

    def open_script(self, buffer: BusBuffer[Any]) -> Script[None]:
        """Prepare a new connection: process id, settings, and LISTEN to all channels."""
        yield from buffer.detect_pooler_script()
        if not self._synchronous_commit:
            yield COMMIT_ASYNCHRONOUSLY
        for channel in list(self._channels):
            yield listen(channel)

    def unlisten_script(self) -> Script[None]:
        """Stop listening on a given connection, which the program continues to use."""
        for channel in list(self._channels):
            yield unlisten(channel)

    def subscribe_script(self, channel: str) -> Script[bool]:
        """Listen to a channel; return False if already subscribed."""
        if channel in self._channels:
            return False
        # Added before the LISTEN, because the first messages may arrive together with its result.
        self._channels[channel] = None
        try:
            yield listen(channel)
        except BaseException:
            self._channels.pop(channel, None)
            raise
        return True

    def unsubscribe_script(self, channel: str) -> Script[bool]:
        """Undo :meth:`subscribe_script`; return False if not subscribed."""
        if channel not in self._channels:
            return False
        # Removed before the UNLISTEN, so that messages that arrive with its result are dropped.
        del self._channels[channel]
        try:
            yield unlisten(channel)
        except BaseException:
            self._channels[channel] = None
            raise
        self._assembler.forget(channel)
        return True

    def publish_script(self, channel: str, payload: Any) -> ScriptFactory[None]:
        """Check a message; return a function that creates the script to send it."""
        name, text = segments.check_channel_name(channel), segments.encode_payload(payload)

        def script(buffer: BusBuffer[Any]) -> Script[None]:
            encoded = segments.encode_base64(text)
            if not encoded:
                parts = [text]
            elif not buffer.is_in_transaction:
                parts = segments.cut(encoded)
            else:
                (began_at,) = yield TRANSACTION_TIME
                parts = self._deduplicator.cut(began_at, name, encoded)
            yield notify(name, parts)
            self.counters.published += 1

        return script

    def keep_alive_script(self) -> Script[None]:
        """Check the connection, restore LISTENs, drop unfinished messages of ended senders."""
        channels = yield LISTENING_CHANNELS
        for channel in set(self._channels).difference(channels):
            # The program may have run UNLISTEN * or DISCARD ALL, or rolled back the LISTEN.
            yield listen(channel)
        if senders := self._assembler.senders:
            parameter = "{" + ",".join(map(str, senders)) + "}"
            pids = yield SqlStatement(EXISTING_PIDS, (parameter,))
            self._assembler.drop_missing_senders(map(int, pids))
            self.counters.unfinished = self._assembler.dropped

    def advance_keep_alive(self, now: float) -> bool:
        """If a keep-alive is due, schedule the next one, and return True."""
        if now < self._keep_alive_at:
            return False
        self._keep_alive_at = now + self._interval
        return True

    def next_action_at(self) -> float:
        """Return the time of the next keep-alive or connection attempt."""
        return self._keep_alive_at if self.is_connected else self.backoff.next_at

    def on_connected(self, now: float) -> None:
        """Record a connection that listens to all channels."""
        self.backoff.on_connected(now)
        self._keep_alive_at = now + self._interval
        if self.has_been_connected:
            self.counters.reconnects += 1
            logger.info("PubSub has reconnected")
        self.is_connected = self.has_been_connected = True

    def on_connection_lost(self, reason: object, now: float) -> None:
        """Record a lost connection, and drop unfinished messages."""
        self.is_connected = False
        self.counters.lost_connections += 1
        self._assembler.clear()
        self.counters.unfinished = self._assembler.dropped
        self.backoff.on_connection_lost(now)
        self.log.warning("PubSub lost its connection: %s", error_line(reason))

    def on_reconnect_failed(self, reason: object, now: float) -> None:
        """Record a failed attempt to reconnect."""
        delay = self.backoff.record_failure(now)
        text = "PubSub cannot reconnect, next attempt in %.1f s: %s"
        self.log.warning(text, delay, error_line(reason))


# Buffer

# While the program uses the given connection: how long the bus tries to acquire the connection's
# lock, and the pause before the next attempt.
BUSY_SECONDS: Final = 0.05
_IN_TRANSACTION = (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)


class BusBuffer(Generic[ConnectionT]):
    """The notifications that one connection has received for the bus, and I/O on the connection.

    Notifications of other channels go to psycopg and the program. The bus waits on
    ``descriptor``, a duplicate of the connection's file descriptor, because the program may wait on
    the original at the same time, or close the connection.
    """

    def __init__(self, connection: ConnectionT, is_subscribed: Callable[[str], bool]) -> None:
        self.connection = connection
        self._pgconn = connection.pgconn
        self._is_subscribed = is_subscribed
        self._previous_handler = self._pgconn.notify_handler
        self._notifications: deque[pq.PGnotify] = deque()
        self.process_id = self._pgconn.backend_pid
        self._has_read_process_id = False
        self.descriptor = os.dup(self._pgconn.socket)
        self._pgconn.notify_handler = self._append

    def _append(self, notification: pq.PGnotify) -> None:
        if self._is_subscribed(notification.relname.decode(self.encoding, "replace")):
            self._notifications.append(notification)
        elif self._previous_handler is not None:
            self._previous_handler(notification)

    @property
    def encoding(self) -> str:
        """The Python codec of the connection's encoding, which the program may change."""
        return self.connection.info.encoding

    @property
    def can_read(self) -> bool:
        """Whether the bus may read: no statement or COPY of the program is running."""
        return self._pgconn.transaction_status != pq.TransactionStatus.ACTIVE

    @property
    def is_idle(self) -> bool:
        """Whether no transaction and no pipeline is open."""
        has_pipeline = self._pgconn.pipeline_status != pq.PipelineStatus.OFF
        return not has_pipeline and self._pgconn.transaction_status == pq.TransactionStatus.IDLE

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._pgconn.transaction_status in _IN_TRANSACTION

    def execute(self, statement: SqlStatement) -> PQGen[list[str]]:
        """Execute a statement and return its result; unlike psycopg's cursors, never send BEGIN."""
        if self._pgconn.pipeline_status != pq.PipelineStatus.OFF:
            raise psycopg.NotSupportedError("PubSub cannot use a connection in pipeline mode")
        encoding = self.encoding
        params = [param.encode(encoding) for param in statement.params or ()]
        self._pgconn.send_query_params(statement.sql.encode(encoding), params)
        result = (yield from generators.execute(self._pgconn))[-1]
        if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
            raise errors.error_from_result(result, encoding)
        values = (result.get_value(row, 0) for row in range(result.ntuples))
        return [value.decode(encoding) for value in values if value is not None]

    def detect_pooler_script(self) -> Script[bool]:
        """Read the backend's process id; return True if libpq got a different id from a pooler."""
        if not self._has_read_process_id:
            (pid,) = yield BACKEND_PID
            self.process_id = int(pid)
            self._has_read_process_id = True
        return self.process_id != self._pgconn.backend_pid

    def read(self) -> None:
        """Read available data without waiting; raise OperationalError if disconnected."""
        self._pgconn.consume_input()
        while (notification := self._pgconn.notifies()) is not None:
            self._append(notification)

    def take(self) -> list[pq.PGnotify]:
        """Remove and return the notifications received so far, in order."""
        notifications = list(self._notifications)
        self._notifications.clear()
        return notifications

    def close(self) -> None:
        """Stop buffering; psycopg and the program get all notifications again."""
        self._pgconn.notify_handler = self._previous_handler
        os.close(self.descriptor)
