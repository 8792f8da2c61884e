"""Batches of leased elements, and waiting for new ones. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Final

import psycopg
from psycopg.errors import LockNotAvailable

from psqlmessages.client import queue_calls
from psqlmessages.client.calls import Call, is_transient
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.queue_calls import AckResult, Element, ListenResult, queue_listen
from psqlmessages.client.transactions import Steps, Wait
from psqlmessages.client.wakeups import Waiter
from psqlmessages.exceptions import ConnectionLost, MessagesError

FOREVER: Final = timedelta.max
DEFAULT_GROUP: Final = timedelta(milliseconds=100)

_LONGEST_DELAY_SECONDS = 300.0
_GROUPS_PER_LEASE = 10


class LeasedBatch:
    """Elements that one consumer has reserved and not yet committed or given back."""

    def __init__(
        self,
        state: NodeState,
        ident: str,
        queue: str,
        duration: Duration = queue_calls.DEFAULT_DURATION,
        group: Duration = DEFAULT_GROUP,
    ) -> None:
        self._state = state
        self._ident = ident
        self._queue = queue
        self._duration = seconds_of(duration, "duration")
        self._group = min(seconds_of(group, "group"), self._duration / _GROUPS_PER_LEASE)
        self._begun_at = 0.0
        self.expires_at = 0.0
        self._unread: deque[Element] = deque()
        self._current: Element | None = None
        self._done: list[Element] = []
        self._attempts = 0

    @property
    def is_empty(self) -> bool:
        """Whether no unread element is left."""
        return not self._unread

    def add(self, elements: list[Element]) -> None:
        """Add elements that were just reserved."""
        self.expires_at = monotonic() + self._duration
        self._unread.extend(elements)

    def next(self) -> Steps[Element | None]:
        """Mark the last element as done, commit if it is time to, and return the next element.

        At the end of the batch, and if the node is stopped, commit and return None.
        """
        if self._current is not None:
            self._done.append(self._current)
            self._current = None
            now = monotonic()
            if now >= self._begun_at + self._group or now >= self.expires_at - self._group:
                yield from self.commit()
        self._current = self._next_unread()
        if self._current is None:
            yield from self.commit()
        return self._current

    def _next_unread(self) -> Element | None:
        if not self._unread or self._state.is_stopped:
            return None
        now = monotonic()
        if now >= self.expires_at:
            # Other consumers may have them; otherwise the queue delivers them again.
            self._lost(len(self._unread))
            self._unread.clear()
            return None
        if not self._done:
            # Counted from the yield: a slow element is committed without the next one.
            self._begun_at = now
        return self._unread.popleft()

    def commit(self) -> Steps[None]:
        """Commit the finished elements, with retries until their leases run out."""
        while (call := self._commit_call()) is not None:
            try:
                self.on_committed((yield call))
            except ConnectionLost:
                if monotonic() >= self.expires_at:
                    raise
            except psycopg.Error as error:
                may_succeed = is_transient(error) and monotonic() < self.expires_at
                if not may_succeed or self._state.is_stopped:
                    raise
                self._state.log.warning(
                    "%s: could not commit elements of queue %s, retrying: %s",
                    self._ident, self._queue, error,
                )  # fmt: skip
                yield Wait(lambda: False, monotonic() + RETRY_SECONDS)

    def _commit_call(self) -> Call[AckResult] | None:
        # Without the elements that the loop itself has committed or given back.
        self._done = [element for element in self._done if not element.is_settled]
        if not self._done:
            return None
        self._attempts += 1
        return queue_calls.commit(self._ident, *self._done)

    def last_commit(self) -> Call[AckResult] | None:
        """Return the call that commits the finished elements, if any, and forget these."""
        call = self._commit_call()
        self._done = []
        return call

    def on_committed(self, answer: AckResult) -> None:
        """Record the answer to a commit; after a retry a False does not mean a lost lease."""
        self._done = []
        if self._attempts == 1 and not answer:
            self._lost(answer.count(False))
        self._attempts = 0

    def leftover(self) -> Iterator[Call[AckResult]]:
        """Yield the calls that give back all unfinished elements; each call only once."""
        if self._current is not None:
            current, self._current = self._current, None
            if not current.is_settled:
                delay = min(_LONGEST_DELAY_SECONDS, 2.0 ** min(current.tries, 30))
                yield queue_calls.rollback(self._ident, current, delay=timedelta(seconds=delay))
        if self._unread:
            unread = list(self._unread)
            self._unread.clear()
            yield queue_calls.release(self._ident, *unread)

    def put_back(self) -> Steps[None]:
        """Commit the finished elements and give back the others; log errors."""
        try:
            yield from self.commit()
        except (MessagesError, psycopg.Error) as error:
            self._could_not_put_back(error)
        for call in self.leftover():
            try:
                yield call
            except (MessagesError, psycopg.Error) as error:
                self._could_not_put_back(error)

    def _could_not_put_back(self, error: Exception) -> None:
        self._state.log.warning(
            "%s: could not commit or give back elements of queue %s; they return when their leases"
            " run out: %s",
            self._ident, self._queue, error,
        )  # fmt: skip

    def _lost(self, number: int) -> None:
        self._state.counters.lost_leases += number
        self._state.log.warning(
            "%s: a lease of queue %s had run out; the element is delivered again",
            self._ident, self._queue,
        )  # fmt: skip


# Waiting for elements, as steps. No I/O.
#
# Try to take elements. If there are none, listen (LISTEN, commit, then read), try again, and wait
# for a notification, for the next mature time, or for the next poll, which finds elements without
# a notification.

# Pause after the server aborts a call: a deadlock, a full disk, …
RETRY_SECONDS: Final = 1.0


class QueuePoller:
    """One wait for elements of a queue; the caller may stop at any step."""

    def __init__(
        self,
        state: NodeState,
        ident: str,
        queue: str,
        call: Call[list[Element]],
        timeout: Duration,
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._waiters = state.queues.of(queue)
        self._call = call
        self._listen = queue_listen(ident, queue, self._on_listening)
        self._until = monotonic() + seconds_of(timeout, "timeout")
        self._retry_at = -inf
        self._waiter = Waiter(wake)
        state.wakes.is_used = True

    def steps(self) -> Steps[list[Element]]:
        """Return elements when they come; an empty list at the timeout.

        Raises NodeClosed if the node is stopped.
        """
        found = yield from self._poll(may_listen=False)
        if found:
            return found
        self._waiters.join(self._waiter)
        try:
            while not found and (now := monotonic()) < self._until:
                if self._state.is_stopped:
                    raise self._state.stopped_error("while it waited for elements")
                if self._is_our_turn and self._is_due(now):
                    found = yield from self._poll(may_listen=True)
                else:
                    yield self._wait()
        finally:
            self._waiters.leave(self._waiter)
        return found

    def _on_listening(self, answer: ListenResult) -> None:
        self._state.queues.set_channel(self._waiters, answer.channel)

    @property
    def _is_our_turn(self) -> bool:
        return self._state.heartbeat.is_connected and self._waiters.is_first(self._waiter)

    def _wait(self) -> Wait:
        was_our_turn = self._is_our_turn

        def is_ready() -> bool:
            is_our_turn = self._is_our_turn
            return is_our_turn != was_our_turn or (is_our_turn and self._is_due(monotonic()))

        due_at = max(self._waiters.due_at, self._retry_at)
        return Wait(is_ready, min(self._until, due_at) if was_our_turn else self._until)

    def _is_due(self, now: float) -> bool:
        return now >= self._retry_at and self._waiters.is_due(now)

    def _poll(self, *, may_listen: bool) -> Steps[list[Element]]:
        try:
            if may_listen and self._waiters.must_listen(monotonic()):
                yield from self._begin_listening()
            is_listening = self._waiters.is_listening(monotonic())
            seen = self._waiters.count
            found: list[Element] = yield self._call
        except ConnectionLost:
            # The node reconnects, and that is a reason to look again.
            return []
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            self._state.log.warning(
                "%s: could not take elements, retrying: %s", self._state.ident, error
            )
            self._retry_at = monotonic() + RETRY_SECONDS
            return []
        if is_listening:
            self._waiters.record_attempt(seen, monotonic(), has_found=bool(found))
        return found

    def _begin_listening(self) -> Steps[None]:
        connection, seen = self._waiters.connection, self._waiters.count
        try:
            answer: ListenResult = yield self._listen
        except LockNotAvailable:
            self._waiters.could_not_listen(monotonic())
        else:
            self._waiters.record_listen_answer(answer, connection, seen, monotonic())
