"""Handler worker: receives the messages of one node and calls the project's handlers."""

from __future__ import annotations

import heapq
import logging
import operator
import sys
import threading
import traceback
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from time import monotonic

import psycopg
from django.db import Error, close_old_connections, connections, reset_queries

from psqlmessages.client.handlers import send_answer, send_error
from psqlmessages.client.messages import RECONNECTED, RPC, SYS, TOPIC, Message
from psqlmessages.client.node import Node
from psqlmessages.client.transactions import run_steps
from psqlmessages.exceptions import (
    CallFailed,
    MessagesError,
    NotAuthorized,
    NotExistent,
    failure_text,
)
from psqlmessages.handler_registry import Handler, HandlerRegistry
from psqlmessages.orm import postgresql_connection
from psqlmessages.retry import Backoff, RateLimitedLogger

logger = logging.getLogger("psqlmessages")

# How often the worker calls ``on_tick`` while no message arrives.
TICK = timedelta(seconds=1)
# How often to listen to topics that are new or allowed again.
LISTEN_INTERVAL = timedelta(seconds=10)
MIN_RETRY_DELAY = timedelta(seconds=1)
MAX_RETRY_DELAY = timedelta(seconds=60)
WAITING_LIMIT = 1000
# A handler that takes longer than this is stuck.
STUCK_AFTER = timedelta(seconds=60)
# Each stuck handler occupies a thread and perhaps a connection. If more than this number are stuck,
# the process ends, so that a supervisor restarts the process.
MAX_STUCK = 10


@dataclass(slots=True)
class HandlerCounters:
    """Counters of a worker.

    ``handled``: calls that returned, and RPCs whose handler raised CallFailed; ``failures``: calls
    that raised another error; ``given_up``: failed calls that are not retried, and messages whose
    body could not be fetched; ``unhandled``: messages without a handler; ``unanswered``: answers
    that could not be sent; ``dropped``: calls that waited when the worker stopped; ``stuck``: calls
    that took too long.
    """

    handled: int = 0
    failures: int = 0
    given_up: int = 0
    unhandled: int = 0
    unanswered: int = 0
    dropped: int = 0
    stuck: int = 0


@dataclass(slots=True)
class HandlerCall:
    """A call of one handler with one message, and its retries."""

    handler: Handler
    message: Message
    backoff: Backoff = field(default_factory=lambda: Backoff(MIN_RETRY_DELAY, MAX_RETRY_DELAY))
    tries: int = 0

    @property
    def order_key(self) -> tuple[Handler, str] | None:
        """Handler and topic of an ordered handler: its calls run one after the other."""
        return (self.handler, self.message.topic) if self.handler.ordered else None


class WaitingCalls:
    """Calls that wait for a worker thread: at most ``limit`` due and ``limit`` delayed calls.

    While a call is taken and not finished, other calls with the same ``order_key`` wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._due: deque[HandlerCall] = deque()
        # A heap of: the time when a call is due, a number that makes entries comparable, the call.
        self._delayed: list[tuple[float, int, HandlerCall]] = []
        self._numbers = count()
        # Calls that were taken and are not finished, by order key.
        self._taken: dict[tuple[Handler, str], HandlerCall] = {}
        self._is_closed = False
        # Reentrant: a signal handler that calls close() may interrupt a thread with the lock.
        self._condition = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        with self._condition:
            return len(self._due) + len(self._delayed)

    def put(self, call: HandlerCall) -> None:
        """Add a due call, unless closed; wait while there are ``limit`` due calls."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or len(self._due) < self._limit)
            if not self._is_closed:
                self._due.append(call)
                self._condition.notify_all()

    def put_delayed(self, call: HandlerCall, at: float) -> bool:
        """Add a call that is due at this monotonic time; return False if closed or full."""
        with self._condition:
            if self._is_closed or len(self._delayed) >= self._limit:
                return False
            heapq.heappush(self._delayed, (at, next(self._numbers), call))
            self._condition.notify_all()
            return True

    def take(self) -> HandlerCall | None:
        """Wait for a due call and take it, delayed calls first; return None if closed."""
        with self._condition:
            while not self._is_closed:
                now = monotonic()
                now_due = []
                while self._delayed and self._delayed[0][0] <= now:
                    now_due.append(heapq.heappop(self._delayed)[2])
                self._due.extendleft(reversed(now_due))
                for index, call in enumerate(self._due):
                    if (key := call.order_key) is None or key not in self._taken:
                        if key is not None:
                            self._taken[key] = call
                        del self._due[index]
                        self._condition.notify_all()
                        return call
                self._condition.wait(self._delayed[0][0] - now if self._delayed else None)
            return None

    def finish(self, call: HandlerCall) -> None:
        """Release the call's order key, so that the next call with this key can be taken."""
        key = call.order_key
        with self._condition:
            if key is not None and self._taken.get(key) is call:
                del self._taken[key]
                self._condition.notify_all()

    def close(self) -> None:
        """Wake all waiting threads. ``take`` then returns None. Signal handlers may call this."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


class HandlerWorker:
    """Receives messages of one node in the thread that calls ``run``; other threads call handlers.

    A slow handler therefore does not stop the node from reading notifications. Each thread
    has its own Django connections. If a handler takes longer than ``stuck_after``, a new thread
    replaces its thread.
    """

    def __init__(
        self,
        node: Node,
        registry: HandlerRegistry,
        *,
        using: str,
        concurrency: int = 1,
        stuck_after: timedelta = STUCK_AFTER,
    ) -> None:
        self.counters = HandlerCounters()
        self._node = node
        self._registry = registry
        self._using = using
        self._waiting_calls = WaitingCalls(WAITING_LIMIT)
        self._threads = [self._create_thread(number) for number in range(1, concurrency + 1)]
        # The current call of each thread, and the monotonic time when the call began.
        self._busy: dict[threading.Thread, tuple[HandlerCall, float]] = {}
        # Replaced threads whose handler has not returned.
        self._stuck: set[threading.Thread] = set()
        self._stuck_after = stuck_after.total_seconds()
        self._has_ended = threading.Event()
        self._listening: set[str] = set()
        self._next_listen_at = 0.0
        self._counter_lock = threading.Lock()
        self._log = RateLimitedLogger(logger)
        self._error: BaseException | None = None
        self.is_stopping = False

    def run(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Handle messages until ``stop``, then wait for running handlers; raise a fatal error.

        Does not wait for stuck handlers. ``on_tick`` is called after each message, and every second
        while no message arrives.
        """
        for thread in self._threads:
            thread.start()
        threading.Thread(
            target=self._replace_stuck_threads, name="stuck handlers", daemon=True
        ).start()
        try:
            try:
                self._receive_all(on_tick)
            except Exception as error:  # noqa: BLE001 - raised after the threads have ended
                self._stop_with(error)
            except BaseException:
                # A second signal: do not wait for the threads.
                self.stop()
                raise
            for thread in list(self._threads):
                while thread.is_alive() and thread not in self._stuck:
                    thread.join(TICK.total_seconds())
        finally:
            self._has_ended.set()
        self.counters.dropped = len(self._waiting_calls)
        if self._error is not None:
            raise self._error

    def _receive_all(self, on_tick: Callable[[], None]) -> None:
        while not self.is_stopping:
            for message in self._node.messages(timeout=TICK):
                self._receive(message)
                self._tick(on_tick)
            self._tick(on_tick)

    def stop(self) -> None:
        """Receive no more messages and start no more calls; callable from signal handlers."""
        self.is_stopping = True
        self._node.stop()
        self._waiting_calls.close()

    # Listening

    def listen(self) -> list[str]:
        """Listen to the topics of the handlers; return all topics that the worker listens to.

        A pattern stands for the existing topics that a rule allows. Raises the error of a missing
        rule for a named topic, after listening to all other topics.
        """
        self._next_listen_at = monotonic() + LISTEN_INTERVAL.total_seconds()
        handlers = self._registry.list_handlers(self._node.ident)
        topics = {handler.topic for handler in handlers if handler.topic}
        patterns = [topic for topic in topics if topic.endswith("*")]
        names = topics.difference(patterns)
        errors = []
        # Two sessions that listen to the same topics in different orders could deadlock.
        for topic in sorted((names | self._find_topics(patterns)) - self._listening):
            try:
                self._node.topic_listen(topic)
            except (NotAuthorized, NotExistent) as error:
                if topic in names:
                    errors.append(error)
            else:
                self._listening.add(topic)
        if errors:
            raise errors[0]
        return sorted(self._listening)

    def _find_topics(self, patterns: list[str]) -> set[str]:
        if not patterns:
            return set()
        try:
            with postgresql_connection(self._using).cursor() as cursor:
                cursor.execute("SELECT topic FROM messages.list_topics(%s::text[])", [patterns])
                return {topic for (topic,) in cursor.fetchall()}
        finally:
            close_old_connections()

    def _tick(self, on_tick: Callable[[], None]) -> None:
        """Call ``on_tick``; every 10 s, listen to topics that are new or allowed again."""
        on_tick()
        if monotonic() < self._next_listen_at or self.is_stopping:
            return
        try:
            self.listen()
        except (MessagesError, psycopg.Error, Error) as error:
            self._log.warning("%s: cannot listen: %s", self._node.ident, error)

    # Receiving

    def _receive(self, message: Message) -> None:
        if message.type == SYS:
            self._on_event(message)
            return
        if message.type not in (RPC, TOPIC):
            return
        if message.error is not None:
            # The node could not fetch the body, and has logged that. A retry would not help.
            self._count("given_up")
            self._answer_error(message, "the body could not be fetched")
            return
        handlers = self._registry.match(message, self._node.ident)
        if not handlers:
            self._count("unhandled")
            self._answer_error(message, f"{self._node.ident} has no RPC handler")
        for handler in handlers:
            self._waiting_calls.put(HandlerCall(handler, message))

    def _on_event(self, message: Message) -> None:
        ident = self._node.ident
        if message.event == RECONNECTED:
            text = "%s: reconnected after %s; messages sent in between are lost"
            logger.warning(text, ident, message.away)
            # A node gets no events while it is disconnected, so rules may have changed.
            self._listening.clear()
            self._next_listen_at = 0.0
        elif message.ident != ident:
            return
        elif message.event == "topic_unlisten":
            text = "%s no longer listens to %s: no rule allows this now"
            logger.warning(text, ident, message.topic)
            self._listening.discard(message.topic)
        elif message.event == "disconnect":
            text = f"{ident} was disconnected: no rule allows this node now"
            self._stop_with(MessagesError(text))

    def _stop_with(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    # Handling, in other threads

    def _create_thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._run_thread, name=f"handlers {number}", daemon=True)

    def _run_thread(self) -> None:
        thread = threading.current_thread()
        try:
            while thread not in self._stuck and (call := self._waiting_calls.take()) is not None:
                close_old_connections()
                reset_queries()
                self._busy[thread] = (call, monotonic())
                try:
                    self._handle(call)
                finally:
                    self._busy.pop(thread)
                    self._waiting_calls.finish(call)
                close_old_connections()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._stop_with(error)
        finally:
            connections.close_all()
            if thread in self._stuck:
                logger.warning("a handler that took too long has returned")
                self._stuck.remove(thread)
                self._threads.remove(thread)

    def _replace_stuck_threads(self) -> None:
        """Replace threads whose handlers take longer than ``stuck_after``, until ``run`` ends."""
        while not self._has_ended.wait(min(TICK.total_seconds(), self._stuck_after / 2)):
            now = monotonic()
            for thread, (call, started_at) in list(self._busy.items()):
                if now - started_at > self._stuck_after and thread not in self._stuck:
                    self._replace_thread(thread, call, now - started_at)

    def _replace_thread(self, thread: threading.Thread, call: HandlerCall, seconds: float) -> None:
        """Log the stack of a stuck thread; start a new thread, or stop if too many are stuck."""
        self._stuck.add(thread)
        self._waiting_calls.finish(call)
        self._count("stuck")
        stuck = len(self._stuck)
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        text = "handler %s has not returned for %.0f s (such handlers: %d). Its stack:\n%s"
        logger.error(text, call.handler.name, seconds, stuck, stack)
        if stuck > MAX_STUCK:
            self._stop_with(
                MessagesError(
                    f"{stuck} handlers have not returned for {self._stuck_after:.0f} s,"
                    " so this process stops. Restart it, and see the log for their stacks"
                )
            )
        elif not self.is_stopping:
            successor = self._create_thread(len(self._threads) + 1)
            self._threads.append(successor)
            successor.start()

    def _handle(self, call: HandlerCall) -> None:
        call.tries += 1
        try:
            answer = call.handler.run(call.message, self._using)
        except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001 - retried
            self._on_handler_failed(call, error)
            return
        self._count("handled")
        # Each step is a function without arguments.
        run_steps(send_answer(call.message, answer, self._on_reply_failed), operator.call)

    def _on_handler_failed(self, call: HandlerCall, error: BaseException) -> None:
        message, name = call.message, call.handler.name
        if message.type == RPC and isinstance(error, CallFailed):
            # The handler chose this text for the caller.
            self._count("handled")
            self._answer_error(message, error.text)
            return
        self._count("failures")
        if call.tries < call.handler.tries:
            at = monotonic() + call.backoff.record_failure(monotonic())
            if self._waiting_calls.put_delayed(call, at):
                text = "handler %s failed; retry in %.1f s"
                self._log.warning(text, name, at - monotonic(), exc_info=error)
                return
        self._count("given_up")
        result = "the caller got CallFailed" if message.type == RPC else "the message is lost"
        text = "handler %s failed %d times: %s"
        self._log.warning(text, name, call.tries, result, exc_info=error)
        self._answer_error(message, failure_text(self._node.ident, error))

    def _answer_error(self, message: Message, reason: str) -> None:
        run_steps(send_error(message, reason, self._on_reply_failed), operator.call)

    def _on_reply_failed(self, message: Message, error: Exception) -> None:
        self._count("unanswered")
        self._log.warning("could not answer %s: %s", message.sender, error)

    def _count(self, name: str) -> None:
        with self._counter_lock:
            setattr(self.counters, name, getattr(self.counters, name) + 1)
