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
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.queue_calls import AckResult, Element, ListenResult, queue_listen
from psqlmessages.client.transactions import Steps, Wait
from psqlmessages.client.wakeups import Waiter
from psqlmessages.exceptions import ConnectionLost, NodeClosed

FOR_EVER: Final = timedelta.max
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
        duration: timedelta = queue_calls.DEFAULT_DURATION,
        group: timedelta = DEFAULT_GROUP,
    ) -> None:
        self._state = state
        self._ident = ident
        self._queue = queue
        self._duration = duration.total_seconds()
        self._group = min(group.total_seconds(), self._duration / _GROUPS_PER_LEASE)
        self._begun_at = 0.0
        self.expires_at = 0.0
        self._waiting: deque[Element] = deque()
        self._current: Element | None = None
        self._done: list[Element] = []
        self._attempts = 0

    @property
    def is_empty(self) -> bool:
        """Whether no unread element is left."""
        return not self._waiting

    def take(self, elements: list[Element]) -> None:
        """Add elements that were just reserved."""
        self.expires_at = monotonic() + self._duration
        self._waiting.extend(elements)

    def next(self) -> Element | None:
        """Return the next element; None if there is none or its lease has run out."""
        if not self._waiting:
            return None
        now = monotonic()
        if now >= self.expires_at:
            # Other consumers may have them; otherwise the queue delivers them again.
            self._lost(len(self._waiting))
            self._waiting.clear()
            return None
        if not self._done:
            # Counted from the yield: a slow element is committed without the next one.
            self._begun_at = now
        self._current = self._waiting.popleft()
        return self._current

    def done(self) -> bool:
        """Mark the current element as done; return whether it is time to commit."""
        if self._current is not None:
            self._done.append(self._current)
            self._current = None
        now = monotonic()
        return now >= self._begun_at + self._group or now >= self.expires_at - self._group

    def commit(self) -> Call[AckResult] | None:
        """Return the call that commits finished elements; None if there are none.

        Elements that the loop has committed or given back are left out. Pass the answer to
        ``committed``.
        """
        self._done = [element for element in self._done if not element.is_settled]
        if not self._done:
            return None
        self._attempts += 1
        return queue_calls.commit(self._ident, [element.lease for element in self._done])

    def last_commit(self) -> Call[AckResult] | None:
        """Return the result of ``commit``, and forget the finished elements."""
        call = self.commit()
        self._done = []
        return call

    def committed(self, answer: AckResult) -> None:
        """Record the answer to ``commit``; after a retry a False does not mean a lost lease."""
        self._done = []
        if self._attempts == 1 and not answer:
            self._lost(answer.count(False))
        self._attempts = 0

    def may_try_again(self) -> bool:
        """Return whether to retry a commit: the leases have not expired."""
        return monotonic() < self.expires_at

    def leftover(self) -> Iterator[Call[AckResult]]:
        """Yield the calls that give back all unfinished elements; each call only once."""
        if self._current is not None:
            current, self._current = self._current, None
            if not current.is_settled:
                yield queue_calls.rollback(self._ident, [current.lease], _delay(current.tries))
        if self._waiting:
            leases = [element.lease for element in self._waiting]
            self._waiting.clear()
            yield queue_calls.release(self._ident, leases)

    def must_wait(self, error: BaseException) -> None:
        """Log that a commit is retried after a pause."""
        self._state.log.warning(
            "%s: could not commit elements of queue %s, retrying: %s",
            self._ident, self._queue, error,
        )  # fmt: skip

    def could_not(self, error: BaseException) -> None:
        """Log that elements could not be committed or given back."""
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


def _delay(tries: int) -> timedelta:
    return timedelta(seconds=min(_LONGEST_DELAY_SECONDS, 2.0 ** min(tries, 30)))


# Waiting for elements, as steps. No I/O.
#
# Try to take elements. If there are none, listen (LISTEN, commit, then read), try again, and wait
# for a notification, for the next mature time, or for the next poll, which finds elements without
# a notification.

Found = list[Element]

# Pause after the server aborts a call: a deadlock, a full disk, …
AGAIN_SECONDS: Final = 1.0


class BlockingTake:
    """One wait for elements of a queue; the caller may stop at any step."""

    def __init__(
        self,
        state: NodeState,
        ident: str,
        queue: str,
        take: Call[Found],
        timeout: timedelta,
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._line = state.queues.of(queue)
        self._take = take
        self._listen = queue_listen(ident, queue, self._noting)
        self._until = monotonic() + timeout.total_seconds()
        self._again_at = -inf
        self._spot = Waiter(wake)
        state.wakes.are_wanted = True

    def steps(self, is_stopped: Callable[[], bool]) -> Steps[Found]:
        """Return elements when they come; an empty list at the timeout.

        Raises NodeClosed if the node is stopped.
        """
        found = yield from self._poll(may_listen=False)
        if found:
            return found
        self._line.join(self._spot)
        try:
            while not found and (now := monotonic()) < self._until:
                if is_stopped():
                    raise NodeClosed(
                        f"node {self._state.ident} was stopped while it waited for elements"
                    )
                if self._is_our_turn and self._is_due(now):
                    found = yield from self._poll(may_listen=True)
                else:
                    yield self._wait()
        finally:
            self._line.leave(self._spot)
        return found

    def _noting(self, answer: ListenResult) -> None:
        self._state.queues.listens(self._line, answer.channel)

    @property
    def _is_our_turn(self) -> bool:
        return self._state.heartbeat.is_connected and self._line.is_first(self._spot)

    def _wait(self) -> Wait:
        was_our_turn = self._is_our_turn

        def is_ready() -> bool:
            is_our_turn = self._is_our_turn
            return is_our_turn != was_our_turn or (is_our_turn and self._is_due(monotonic()))

        due_at = max(self._line.due_at, self._again_at)
        return Wait(is_ready, min(self._until, due_at) if was_our_turn else self._until)

    def _is_due(self, now: float) -> bool:
        return now >= self._again_at and self._line.is_due(now)

    def _poll(self, *, may_listen: bool) -> Steps[Found]:
        try:
            if may_listen and self._line.wants_listening(monotonic()):
                yield from self._begin_listening()
            is_listening = self._line.is_listening(monotonic())
            seen = self._line.count
            found: Found = yield self._take
        except ConnectionLost:
            # The node reconnects, and that is a reason to look again.
            return []
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            self._state.log.warning(
                "%s: could not take elements, retrying: %s", self._state.ident, error
            )
            self._again_at = monotonic() + AGAIN_SECONDS
            return []
        if is_listening:
            self._line.looked(seen, monotonic(), has_found=bool(found))
        return found

    def _begin_listening(self) -> Steps[None]:
        connection, seen = self._line.connection, self._line.count
        try:
            answer: ListenResult = yield self._listen
        except LockNotAvailable:
            self._line.could_not_listen(monotonic())
        else:
            self._line.listened(answer, connection, seen, monotonic())
