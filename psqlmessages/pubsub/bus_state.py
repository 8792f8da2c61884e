"""State of a bus: subscriptions, notifications, timers. No I/O, no clock."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from psycopg import errors, generators, pq
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo

from psqlmessages.client.options import Options
from psqlmessages.pubsub import segments
from psqlmessages.pubsub.segments import PART, SegmentAssembler, SegmentDeduplicator
from psqlmessages.retry import Backoff, RateLimitedLogger
from psqlmessages.wire import MalformedPayload

# Events: what a bus hands to its handlers, and what it counts.


class Event(NamedTuple):
    """A message: the process id of the backend that sent it, its channel, what was published.

    ``payload`` is None for a signal, else str or what JSON can hold.
    """

    process_id: int
    channel: str
    payload: Any


Handler = Callable[[Event], Any]


@dataclass(slots=True)
class BusCounters:
    """What a bus has seen since it was made; read without a query.

    ``received`` counts notifications, of which a long message has several; ``delivered`` and
    ``skipped`` (by ``skip_self``) count messages, ``unfinished`` those dropped before their last
    segment came, ``malformed`` what is not of the format.
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


# Statements: every SQL statement of a bus, and how one is carried out on a connection.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BusStatement:
    """A statement and its parameters; its answer is the first column as text."""

    sql: str
    params: tuple[str, ...] = ()


# What a bus does on its connection: yields statements, takes their answers, returns a result.
Script = Generator[BusStatement, list[str], T]

BACKEND: Final = BusStatement("SELECT pg_backend_pid()")
# To ask how full the queue is frees one that was full, when its slow listener has gone.
LISTENED: Final = BusStatement(
    "SELECT pg_listening_channels() WHERE pg_notification_queue_usage() >= 0"
)
BEGAN_AT: Final = BusStatement("SELECT extract(epoch FROM transaction_timestamp())")
# A notification is not durable: waiting for the WAL to be flushed would buy nothing.
COMMIT_AT_ONCE: Final = BusStatement("SELECT set_config('synchronous_commit', 'off', false)")


def listen(channel: str) -> BusStatement:
    """Listen to a channel whose name is checked: it holds no double quote."""
    return BusStatement(f'LISTEN "{channel}"')


def unlisten(channel: str) -> BusStatement:
    """Undo :func:`listen`."""
    return BusStatement(f'UNLISTEN "{channel}"')


def notify(channel: str, segments: list[str]) -> BusStatement:
    """Send all segments of a message, in their order."""
    if len(segments) == 1:
        return BusStatement("SELECT pg_notify($1, $2)", (channel, segments[0]))
    # No segment of several holds a comma.
    return BusStatement(
        "SELECT count(pg_notify($1, segment)) FROM unnest(string_to_array($2, ',')) AS segment",
        (channel, ",".join(segments)),
    )


def living_senders(process_ids: Iterable[int]) -> BusStatement:
    """Ask which of these backends there are."""
    return BusStatement(
        "SELECT pid FROM pg_stat_activity WHERE pid = ANY ($1::int[])",
        ("{" + ",".join(map(str, process_ids)) + "}",),
    )


def carry_out(pgconn: pq.abc.PGconn, statement: BusStatement, encoding: str) -> PQGen[list[str]]:
    """Carry out a statement, without the BEGIN that psycopg's cursors put in front.

    So it is a transaction of its own, unless one is open: then it is part of that.
    """
    if pgconn.pipeline_status != pq.PipelineStatus.OFF:
        raise psycopg.NotSupportedError("a bus cannot use a connection in pipeline mode")
    params = [param.encode(encoding) for param in statement.params]
    pgconn.send_query_params(statement.sql.encode(encoding), params)
    result = (yield from generators.execute(pgconn))[-1]
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise errors.error_from_result(result, encoding)
    values = (result.get_value(row, 0) for row in range(result.ntuples))
    return [value.decode(encoding) for value in values if value is not None]


logger = logging.getLogger("psqlmessages")

# A connection that breaks again sooner does not make the next delays short.
_STABLE_SECONDS: Final = 5.0


class Subscriptions:
    """The state of one bus between its connection and its handlers.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(
        self, interval: float, assembly: SegmentAssembler, options: Options, *, skip_self: bool
    ) -> None:
        self._interval = interval
        self._assembly = assembly
        self._synchronous_commit = options.synchronous_commit
        self._skip_self = skip_self
        self._transaction = SegmentDeduplicator()
        self._handlers: dict[str, tuple[Handler, ...]] = {}
        # A dictionary as a set that keeps its order.
        self._channels: dict[str, None] = {}
        self._opened_at = 0.0
        self._due_at = 0.0
        self.inbox: deque[Event] = deque()
        self.counters = BusCounters()
        self.backoff = Backoff(options.backoff_least, options.backoff_most)
        self.log = RateLimitedLogger(logger)
        self.is_connected = False
        self.has_been_connected = False

    # Handlers

    def on(self, channel: str, handler: Handler) -> None:
        """Add a handler; one that is there is called twice."""
        self._handlers[channel] = (*self._handlers.get(channel, ()), handler)

    def off(self, channel: str, handler: Handler) -> bool:
        """Remove a handler once; False where it was not there."""
        handlers = list(self._handlers.get(channel, ()))
        if handler not in handlers:
            return False
        handlers.remove(handler)
        self._handlers[channel] = tuple(handlers)
        return True

    def deliveries(self) -> Iterator[tuple[Handler, Event]]:
        """Take the events that came, each with the handlers to call for it."""
        while self.inbox:
            event = self.inbox.popleft()
            if event.channel not in self._channels:
                # It came before the channel was unsubscribed.
                continue
            self.counters.delivered += 1
            for handler in self._handlers.get(event.channel, ()):
                yield handler, event

    def handler_failed(self, event: Event, error: BaseException) -> None:
        """Take note of a handler that raised."""
        self.counters.handler_failures += 1
        self.log.warning("a handler of channel %s failed", event.channel, exc_info=error)

    # What came

    def wants(self, channel: str) -> bool:
        """Whether a channel is subscribed to."""
        return channel in self._channels

    def feed(self, notification: pq.PGnotify, encoding: str, own_process_id: int) -> None:
        """Take in one notification; whatever it holds, it raises nothing."""
        self.counters.received += 1
        channel = notification.relname.decode(encoding, "replace")
        segment = notification.extra.decode(encoding, "replace")
        process_id = notification.be_pid
        if self._skip_self and process_id == own_process_id:
            self.counters.skipped += segment[:1] != PART
            return
        try:
            text = self._assembly.add(process_id, channel, segment)
            if text is None:
                return
            event = Event(process_id, channel, segments.payload_of(text))
        except MalformedPayload as error:
            self.counters.malformed += 1
            self.log.warning("a malformed message on channel %s was dropped: %s", channel, error)
        else:
            self.inbox.append(event)
        finally:
            self.counters.unfinished = self._assembly.dropped

    # What to do on the connection

    def opening(self) -> Script[None]:
        """Bring a connection of our own to the state of the last."""
        if not self._synchronous_commit:
            yield COMMIT_AT_ONCE
        for channel in list(self._channels):
            yield listen(channel)

    def closing(self) -> Script[None]:
        """Leave a connection that goes on without us."""
        for channel in list(self._channels):
            yield unlisten(channel)

    def subscribing(self, channel: str) -> Script[bool]:
        """Listen to a channel; return False where it was listened to."""
        if channel in self._channels:
            return False
        # What follows the LISTEN may come along with its answer.
        self._channels[channel] = None
        try:
            yield listen(channel)
        except BaseException:
            self._channels.pop(channel, None)
            raise
        return True

    def unsubscribing(self, channel: str) -> Script[bool]:
        """Undo :meth:`subscribing`; return False where it was not listened to."""
        if channel not in self._channels:
            return False
        # What comes along with the answer is not wanted any more.
        del self._channels[channel]
        try:
            yield unlisten(channel)
        except BaseException:
            self._channels[channel] = None
            raise
        self._assembly.forget(channel)
        return True

    def publishing(self, channel: str, text: str, *, is_in_transaction: bool) -> Script[None]:
        """Send flagged text, all of it in one statement."""
        yield (yield from self._notification(channel, text, is_in_transaction=is_in_transaction))
        self.counters.published += 1

    def _notification(
        self, channel: str, text: str, *, is_in_transaction: bool
    ) -> Script[BusStatement]:
        characters = segments.encoded(text)
        if not characters:
            return notify(channel, [text])
        if not is_in_transaction:
            return notify(channel, segments.cut(characters))
        (began_at,) = yield BEGAN_AT
        return notify(channel, self._transaction.cut(began_at, channel, characters))

    def keeping_alive(self) -> Script[None]:
        """See that the connection answers and listens, and that senders in mid-message live."""
        listened = yield LISTENED
        for channel in set(self._channels).difference(listened):
            # Its owner may have said UNLISTEN * or DISCARD ALL, or rolled a LISTEN back.
            yield listen(channel)
        if senders := self._assembly.senders:
            living = yield living_senders(senders)
            self._assembly.saw(map(int, living))
            self.counters.unfinished = self._assembly.dropped

    # When

    def keep_alive_due(self, now: float) -> bool:
        """Whether to see after the connection now; if so, the next time is counted from here."""
        if now < self._due_at:
            return False
        self._due_at = now + self._interval
        return True

    def next_at(self) -> float:
        """When something is due next."""
        return self._due_at if self.is_connected else self.backoff.next_at

    def on_connected(self, now: float) -> None:
        """Take note of a connection on which all is listened to."""
        self._opened_at = now
        self._due_at = now + self._interval
        if self.has_been_connected:
            self.counters.reconnects += 1
            logger.info("the bus is connected again")
        self.is_connected = self.has_been_connected = True

    def on_connection_lost(self, reason: object, now: float) -> None:
        """Take note of a lost connection: what had come in part will not be finished."""
        self.is_connected = False
        self.counters.lost_connections += 1
        self._assembly.clear()
        self.counters.unfinished = self._assembly.dropped
        if now - self._opened_at >= _STABLE_SECONDS:
            self.backoff.succeeded()
        # Even the first attempt waits a moment: all lose a restarted server at once.
        self.backoff.failed(now)
        self.log.warning("the connection of the bus is lost: %s", _one_line(reason))

    def could_not_return(self, reason: object, now: float) -> None:
        """Take note of a failed attempt to reconnect."""
        delay = self.backoff.failed(now)
        self.log.warning(
            "the bus cannot reconnect, next attempt in %.1f s: %s", delay, _one_line(reason)
        )


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())


# Intake: the notifications of a connection that belong to a bus, and when it may be touched.

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

_IDLE = pq.TransactionStatus.IDLE
_OPEN = (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)


class BusNotifications:
    """What comes on a connection; that of other channels is left to psycopg and its owner.

    Waiting is done on a duplicate of the connection's file descriptor: its owner may wait on the
    descriptor itself at the same time, and close it.
    """

    def __init__(self, connection: AnyConnection, is_wanted: Callable[[str], bool]) -> None:
        self._pgconn = connection.pgconn
        self._is_wanted = is_wanted
        self._others = self._pgconn.notify_handler
        self._raw: deque[pq.PGnotify] = deque()
        self._info = connection.info
        self.process_id = self._pgconn.backend_pid
        self._is_identified = False
        self.descriptor = os.dup(self._pgconn.socket)
        self._pgconn.notify_handler = self._keep

    def _keep(self, notification: pq.PGnotify) -> None:
        if self._is_wanted(notification.relname.decode(self.encoding, "replace")):
            self._raw.append(notification)
        elif self._others is not None:
            self._others(notification)

    @property
    def encoding(self) -> str:
        """The name of the connection's encoding; its owner may change it."""
        return self._info.encoding

    @property
    def is_touchable(self) -> bool:
        """Whether its owner is not amid a COPY or the like, which nothing may disturb."""
        return self._pgconn.transaction_status != pq.TransactionStatus.ACTIVE

    @property
    def is_idle(self) -> bool:
        """Whether a statement would be a transaction of its own."""
        is_plain = self._pgconn.pipeline_status == pq.PipelineStatus.OFF
        return is_plain and self._pgconn.transaction_status == _IDLE

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._pgconn.transaction_status in _OPEN

    def identifying(self) -> Script[bool]:
        """See what serves the connection, by its real process id; True where it is a pooler."""
        if not self._is_identified:
            (answer,) = yield BACKEND
            self.process_id = int(answer)
            self._is_identified = True
        return self.process_id != self._pgconn.backend_pid

    def read(self) -> None:
        """Read what the socket has; raises OperationalError where the connection is gone."""
        self._pgconn.consume_input()
        while (notification := self._pgconn.notifies()) is not None:
            self._keep(notification)

    def take(self) -> list[pq.PGnotify]:
        """Take what came so far, in its order."""
        taken = list(self._raw)
        self._raw.clear()
        return taken

    def close(self) -> None:
        """Leave the connection to its owner."""
        self._pgconn.notify_handler = self._others
        os.close(self.descriptor)


def conninfo_of(connection: AnyConnection) -> str:
    """Give the connection string of a connection, with its password: it is not to be logged."""
    password = connection.info.password
    given: dict[str, Any] = dict(connection.info.get_parameters())
    return make_conninfo(**given, **({"password": password} if password else {}))


def is_closed_by_owner(connection: AnyConnection) -> bool:
    """Whether a connection was closed on purpose, and not cut."""
    return connection.closed and not connection.broken
