"""Subscriptions: what a bus listens to, what came, what is due. No I/O, no clock."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Final

from psycopg import pq

from psqlmessages.client.backoff import Backoff, QuietLog
from psqlmessages.client.options import Options
from psqlmessages.pubsub import segments, statements
from psqlmessages.pubsub.assembly import Assembly
from psqlmessages.pubsub.events import Counters, Event, Handler
from psqlmessages.pubsub.segments import PART
from psqlmessages.pubsub.statements import Script, Statement
from psqlmessages.pubsub.transaction import Transaction
from psqlmessages.wire import MalformedPayload

logger = logging.getLogger("psqlmessages")

# A connection that breaks again sooner does not make the next delays short.
_STABLE_SECONDS: Final = 5.0


class Subscriptions:
    """The state of one bus between its connection and its handlers.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(
        self, interval: float, assembly: Assembly, options: Options, *, skip_self: bool
    ) -> None:
        self._interval = interval
        self._assembly = assembly
        self._synchronous_commit = options.synchronous_commit
        self._skip_self = skip_self
        self._transaction = Transaction()
        self._handlers: dict[str, tuple[Handler, ...]] = {}
        # A dictionary as a set that keeps its order.
        self._channels: dict[str, None] = {}
        self._opened_at = 0.0
        self._due_at = 0.0
        self.inbox: deque[Event] = deque()
        self.counters = Counters()
        self.backoff = Backoff(options.backoff_least, options.backoff_most)
        self.log = QuietLog(logger)
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
            yield statements.COMMIT_AT_ONCE
        for channel in list(self._channels):
            yield statements.listen(channel)

    def closing(self) -> Script[None]:
        """Leave a connection that goes on without us."""
        for channel in list(self._channels):
            yield statements.unlisten(channel)

    def subscribing(self, channel: str) -> Script[bool]:
        """Listen to a channel; return False where it was listened to."""
        if channel in self._channels:
            return False
        # What follows the LISTEN may come along with its answer.
        self._channels[channel] = None
        try:
            yield statements.listen(channel)
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
            yield statements.unlisten(channel)
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
    ) -> Script[Statement]:
        characters = segments.encoded(text)
        if not characters:
            return statements.notify(channel, [text])
        if not is_in_transaction:
            return statements.notify(channel, segments.cut(characters))
        (began_at,) = yield statements.BEGAN_AT
        return statements.notify(channel, self._transaction.cut(began_at, channel, characters))

    def keeping_alive(self) -> Script[None]:
        """See that the connection answers and listens, and that senders in mid-message live."""
        listened = yield statements.LISTENED
        for channel in set(self._channels).difference(listened):
            # Its owner may have said UNLISTEN * or DISCARD ALL, or rolled a LISTEN back.
            yield statements.listen(channel)
        if senders := self._assembly.senders:
            living = yield statements.living(senders)
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

    def opened(self, now: float) -> None:
        """Take note of a connection on which all is listened to."""
        self._opened_at = now
        self._due_at = now + self._interval
        if self.has_been_connected:
            self.counters.reconnects += 1
            logger.info("the bus is connected again")
        self.is_connected = self.has_been_connected = True

    def lost(self, reason: object, now: float) -> None:
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
