"""Handler worker: receives the messages of one node and calls the project's handlers."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
from django.db import Error, close_old_connections, connections, reset_queries

from psqlmessages.client.handlers import wants_reply
from psqlmessages.client.messages import RECONNECTED, RPC, SYS, TOPIC, Message
from psqlmessages.client.node import Node
from psqlmessages.exceptions import (
    CallFailed,
    InvalidArgument,
    MessagesError,
    NotAuthorized,
    NotExistent,
)
from psqlmessages.handler_backlog import Backlog
from psqlmessages.handler_registry import Handler, HandlerRegistry
from psqlmessages.orm import postgresql
from psqlmessages.retry import Backoff, RateLimitedLogger

logger = logging.getLogger("psqlmessages")

TICK = timedelta(seconds=1)
LISTEN_AGAIN = timedelta(seconds=10)
RETRY_LEAST = timedelta(seconds=1)
RETRY_MOST = timedelta(seconds=60)
BACKLOG_LIMIT = 1000
STUCK_AFTER = timedelta(seconds=60)
# Each keeps a thread, and perhaps a connection. Above the limit the process ends, and its
# supervisor restarts it.
STUCK_LIMIT = 10


@dataclass(slots=True)
class HandlerCounters:
    """Counters of a worker.

    ``given_up`` counts messages whose handler failed for the last time, ``failures`` calls of
    handlers that raised, ``dropped`` messages still waiting at the stop, ``stuck`` calls that took
    too long.
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
    """One message for one handler, with its retries."""

    handler: Handler
    message: Message
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRY_LEAST, RETRY_MOST))
    tries: int = 0


class HandlerWorker:
    """Reads one node in the thread that calls ``run``, and runs handlers in worker threads.

    A slow handler therefore delays neither the node nor the notification queue of the server. Each
    worker thread has its own Django connections. If a handler takes longer than ``stuck_after``, a
    new thread replaces its thread.
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
        self._backlog: Backlog[HandlerCall] = Backlog(BACKLOG_LIMIT)
        self._workers = [self._new_worker(number) for number in range(1, concurrency + 1)]
        # The task and start time of each busy worker thread, and the threads that take too long.
        self._doing: dict[threading.Thread, tuple[HandlerCall, float]] = {}
        self._stuck: set[threading.Thread] = set()
        self._stuck_after = stuck_after.total_seconds()
        self._has_ended = threading.Event()
        self._listening: set[str] = set()
        self._listen_at = 0.0
        self._counting = threading.Lock()
        self._log = RateLimitedLogger(logger)
        self._error: BaseException | None = None
        self.is_stopping = False

    def run(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Handle messages until ``stop``, then finish running handlers; raise a fatal error.

        ``on_tick`` is called after each message, and every second if there is none.
        """
        for worker in self._workers:
            worker.start()
        threading.Thread(
            target=self._replace_stuck_workers, name="stuck handlers", daemon=True
        ).start()
        try:
            try:
                self._read(on_tick)
            except Exception as error:  # noqa: BLE001 - raised after the workers have ended
                self._end(error)
            except BaseException:
                # A second signal: do not wait for the threads.
                self.stop()
                raise
            for worker in list(self._workers):
                while worker.is_alive() and worker not in self._stuck:
                    worker.join(TICK.total_seconds())
        finally:
            self._has_ended.set()
        self.counters.dropped = self.waiting
        if self._error is not None:
            raise self._error

    def _read(self, on_tick: Callable[[], None]) -> None:
        while not self.is_stopping:
            for message in self._node.messages(timeout=TICK):
                self._receive(message)
                self._listen_again(on_tick)
            self._listen_again(on_tick)

    def stop(self) -> None:
        """Accept no new messages; callable from any thread and from signal handlers."""
        self.is_stopping = True
        self._node.stop()
        self._backlog.close()

    @property
    def waiting(self) -> int:
        """How many messages wait for a thread or for their retry."""
        return len(self._backlog)

    # Listening

    def listen(self) -> list[str]:
        """Listen to the topics of the handlers and return them. Raises if a rule is missing.

        A pattern stands for the existing topics that a rule allows.
        """
        handlers = [handler for handler in self._registry.of(self._node.ident) if handler.topic]
        named = {handler.topic for handler in handlers if not handler.topic.endswith("*")}
        patterns = [handler.topic for handler in handlers if handler.topic.endswith("*")]
        refusals = []
        # Sorted, or sessions could deadlock.
        for topic in sorted((named | self._topics_like(patterns)) - self._listening):
            try:
                self._node.topic_listen(topic)
            except (NotAuthorized, NotExistent) as refusal:
                if topic in named:
                    refusals.append(refusal)
            else:
                self._listening.add(topic)
        self._listen_at = monotonic() + LISTEN_AGAIN.total_seconds()
        if refusals:
            raise refusals[0]
        return sorted(self._listening)

    def _topics_like(self, patterns: list[str]) -> set[str]:
        if not patterns:
            return set()
        try:
            with postgresql(self._using).cursor() as cursor:
                cursor.execute("SELECT topic FROM messages.list_topics(%s::text[])", [patterns])
                return {topic for (topic,) in cursor.fetchall()}
        finally:
            close_old_connections()

    def _listen_again(self, on_tick: Callable[[], None]) -> None:
        """Listen to topics that are new or allowed again, every 10 seconds."""
        on_tick()
        if monotonic() < self._listen_at or self.is_stopping:
            return
        try:
            self.listen()
        except (MessagesError, psycopg.Error, Error) as error:
            self._log.warning("%s: cannot listen: %s", self._node.ident, error)
            self._listen_at = monotonic() + LISTEN_AGAIN.total_seconds()

    # Receiving

    def _receive(self, message: Message) -> None:
        if message.type == SYS:
            self._on_event(message)
            return
        if message.type not in (RPC, TOPIC):
            return
        if message.error is not None:
            # The node has logged that the body could not be fetched; a retry would not help.
            self._count("given_up")
            return
        handlers = self._registry.matching(message, self._node.ident)
        if not handlers:
            self._count("unhandled")
            self._fail(message, f"{self._node.ident} has no handler for this")
        for handler in handlers:
            self._backlog.put(HandlerCall(handler, message))

    def _on_event(self, message: Message) -> None:
        if message.event == RECONNECTED:
            logger.warning(
                "%s: reconnected after %s; messages sent in between are lost",
                self._node.ident,
                message.away,
            )
            # A disconnected node gets no event about a removed rule: listen again.
            self._listening.clear()
            self._listen_at = 0.0
        elif message.ident != self._node.ident:
            return
        elif message.event == "topic_unlisten":
            logger.warning(
                "%s no longer listens to %s: no rule allows it now", self._node.ident, message.topic
            )
            self._listening.discard(message.topic)
        elif message.event == "disconnect":
            self._end(MessagesError(f"{self._node.ident} was disconnected: no rule allows it now"))

    def _end(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    # Handling, in the worker threads

    def _new_worker(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._work, name=f"handlers {number}", daemon=True)

    def _work(self) -> None:
        worker = threading.current_thread()
        try:
            while worker not in self._stuck and (task := self._backlog.take()) is not None:
                close_old_connections()
                reset_queries()
                self._doing[worker] = (task, monotonic())
                try:
                    self._handle(task)
                finally:
                    self._doing.pop(worker)
                close_old_connections()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._end(error)
        finally:
            connections.close_all()
            if worker in self._stuck:
                logger.warning("a handler that took too long has returned")
                self._stuck.remove(worker)
                self._workers.remove(worker)

    def _replace_stuck_workers(self) -> None:
        """Replace the threads whose handlers take too long, until the worker stops."""
        while not self._has_ended.wait(min(TICK.total_seconds(), self._stuck_after / 2)):
            now = monotonic()
            for worker, (task, since) in list(self._doing.items()):
                if now - since > self._stuck_after and worker not in self._stuck:
                    self._replace(worker, task, now - since)

    def _replace(self, worker: threading.Thread, task: HandlerCall, seconds: float) -> None:
        """Report a stuck thread, and start another one for the next messages."""
        self._stuck.add(worker)
        self._count("stuck")
        frame = sys._current_frames().get(worker.ident or 0)
        place = "".join(traceback.format_stack(frame)) if frame is not None else ""
        logger.error(
            "handler %s has not returned for %.0f s (such handlers: %d). Its stack:\n%s",
            task.handler.name, seconds, self.stuck, place,
        )  # fmt: skip
        if self.stuck > STUCK_LIMIT:
            self._end(
                MessagesError(
                    f"{self.stuck} handlers have not returned for {self._stuck_after:.0f} s, so"
                    " this process stops. Restart it, and see the log for their stacks"
                )
            )
        elif not self.is_stopping:
            successor = self._new_worker(len(self._workers) + 1)
            self._workers.append(successor)
            successor.start()

    @property
    def stuck(self) -> int:
        """Return how many handlers take too long now."""
        return len(self._stuck)

    def _handle(self, task: HandlerCall) -> None:
        task.tries += 1
        try:
            answer = task.handler.run(task.message, self._using)
        except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001 - retried
            self._on_handler_failed(task, error)
            return
        self._count("handled")
        if wants_reply(task.message, answer):
            self._answer(task.message, answer)

    def _on_handler_failed(self, task: HandlerCall, error: BaseException) -> None:
        message, name = task.message, task.handler.name
        if message.type == RPC and isinstance(error, CallFailed):
            # The handler raised it on purpose: its text is for the caller.
            self._count("handled")
            self._fail(message, error.text)
            return
        self._count("failures")
        if task.tries < task.handler.tries:
            at = monotonic() + task.backoff.failed(monotonic())
            if self._backlog.put_later(task, at):
                self._log.warning(
                    "handler %s failed; retry in %.1f s",
                    name, at - monotonic(), exc_info=error,
                )  # fmt: skip
                return
        self._count("given_up")
        self._log.warning(
            "handler %s failed %d times: the message is lost", name, task.tries, exc_info=error
        )
        # The text of an error may be confidential: send only its class.
        self._fail(message, f"the handler of {self._node.ident} failed ({type(error).__name__})")

    def _answer(self, message: Message, answer: Any) -> None:
        try:
            message.reply(answer)
        except (InvalidArgument, TypeError, ValueError, psycopg.Error) as error:
            self._unanswered(message, error)
            self._answer_failure(message, "the answer could not be sent")
        except MessagesError as error:
            self._unanswered(message, error)

    def _fail(self, message: Message, reason: str) -> None:
        if message.wants_answer and not message.is_answered:
            self._answer_failure(message, reason)

    def _answer_failure(self, message: Message, reason: str) -> None:
        try:
            message.reply_error(reason)
        except (MessagesError, psycopg.Error) as error:
            self._unanswered(message, error)

    def _unanswered(self, message: Message, error: Exception) -> None:
        self._count("unanswered")
        self._log.warning("could not answer %s: %s", message.sender, error)

    def _count(self, name: str) -> None:
        with self._counting:
            setattr(self.counters, name, getattr(self.counters, name) + 1)
