"""Batches of leased elements, and waiting for elements of a queue. No I/O."""

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
from psqlmessages.client.queue_calls import AckResult, Element, queue_listen
from psqlmessages.client.transactions import Steps, Wait
from psqlmessages.client.wakeups import ListenResult, Waiter
from psqlmessages.exceptions import ConnectionLost, MessagesError

FOREVER: Final = timedelta.max
# Finished elements are committed in groups. A group is committed this long after its start.
DEFAULT_GROUP: Final = timedelta(milliseconds=100)

_MAX_ROLLBACK_DELAY_SECONDS = 300.0
# The longest time until a group is committed, as a fraction of the duration of the leases.
_MAX_GROUP_FRACTION = 0.1


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
        self._duration_seconds = seconds_of(duration, "duration")
        max_group_seconds = self._duration_seconds * _MAX_GROUP_FRACTION
        self._group_seconds = min(seconds_of(group, "group"), max_group_seconds)
        self._group_started_at = 0.0
        self.expires_at = 0.0
        self._unread: deque[Element] = deque()
        self._current: Element | None = None
        # Finished elements that are not committed yet.
        self._finished: list[Element] = []
        # Whether a commit of these elements got no answer.
        self._may_be_committed = False

    @property
    def is_empty(self) -> bool:
        """Whether no unread element is left."""
        return not self._unread

    def add(self, elements: list[Element]) -> None:
        """Add elements that were just reserved."""
        self.expires_at = monotonic() + self._duration_seconds
        self._unread.extend(elements)

    def next(self) -> Steps[Element | None]:
        """Mark the current element as finished, and return the next one; commit if that is due.

        Commit and return None if no element is left, the leases have expired, or at ``stop``.
        """
        if self._current is not None:
            self._finished.append(self._current)
            self._current = None
            now = monotonic()
            if (
                now >= self._group_started_at + self._group_seconds
                or now >= self.expires_at - self._group_seconds
            ):
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
            self._log_lost_leases(len(self._unread))
            self._unread.clear()
            return None
        if not self._finished:
            # The group starts before its first element is processed, so a slow element is
            # committed as soon as it is finished.
            self._group_started_at = now
        return self._unread.popleft()

    def commit(self) -> Steps[None]:
        """Commit the finished elements; retry until their leases expire."""
        while (call := self._commit_call()) is not None:
            try:
                self.on_committed((yield call))
            except ConnectionLost:
                self._may_be_committed = True
                if monotonic() >= self.expires_at:
                    raise
            except psycopg.Error as error:
                is_expired = monotonic() >= self.expires_at
                if is_expired or not is_transient(error) or self._state.is_stopped:
                    raise
                self._warn("%s: could not commit elements of queue %s, retrying: %s", error)
                yield Wait(lambda: False, monotonic() + RETRY_SECONDS)

    def _commit_call(self) -> Call[AckResult] | None:
        """Create the call that commits the finished elements; None if there are none."""
        # The program may have committed or given back some elements itself.
        self._finished = [element for element in self._finished if not element.is_settled]
        return queue_calls.commit(self._ident, *self._finished) if self._finished else None

    def last_commit(self) -> Call[AckResult] | None:
        """Create the call that commits the finished elements, if any; forget these elements."""
        call = self._commit_call()
        self._finished = []
        return call

    def on_committed(self, answer: AckResult) -> None:
        """Record the answer of a commit; log lost leases."""
        self._finished = []
        # An earlier commit without an answer may have succeeded. Then False is no proof of a loss.
        if not all(answer) and not self._may_be_committed:
            self._log_lost_leases(answer.count(False))
        self._may_be_committed = False

    def give_back_calls(self) -> Iterator[Call[AckResult]]:
        """Yield the calls that give back the unfinished elements; forget these elements."""
        if self._current is not None:
            current, self._current = self._current, None
            if not current.is_settled:
                # Rollback counts a failed attempt; release, for unread elements, does not.
                delay_seconds = min(_MAX_ROLLBACK_DELAY_SECONDS, 2.0 ** min(current.tries, 30))
                yield queue_calls.rollback(self._ident, current, delay=delay_seconds)
        if self._unread:
            unread, self._unread = self._unread, deque()
            yield queue_calls.release(self._ident, *unread)

    def give_back(self) -> Steps[None]:
        """Commit the finished elements and give back the others; log errors."""
        try:
            yield from self.commit()
        except (MessagesError, psycopg.Error) as error:
            self._log_give_back_error(error)
        for call in self.give_back_calls():
            try:
                yield call
            except (MessagesError, psycopg.Error) as error:
                self._log_give_back_error(error)

    def _log_give_back_error(self, error: Exception) -> None:
        self._warn(
            "%s: could not commit or give back elements of queue %s; they return when their leases"
            " expire: %s",
            error,
        )

    def _log_lost_leases(self, number: int) -> None:
        self._state.counters.lost_leases += number
        text = "%s: leases of queue %s had expired (%d); their elements may be delivered again"
        self._warn(text, number)

    def _warn(self, text: str, *values: object) -> None:
        self._state.log.warning(text, self._ident, self._queue, *values)


# Waiting for elements
#
# Try to take elements. If there are none, listen and try again. Then wait for a notification, for
# the time when the next element becomes available, or for the next poll.

# Pause after the server aborts a call: a deadlock, a full disk, …
RETRY_SECONDS: Final = 1.0


class QueuePoller:
    """Waits for elements of a queue, and takes them with ``call``, in steps.

    ``wake`` makes the caller of the steps check ``Wait.is_ready``. The caller may stop at any step.
    """

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
        self._wait_list = state.wait_lists.of(queue)
        self._call = call
        self._listen = queue_listen(ident, queue, self._on_listening)
        self._deadline = monotonic() + seconds_of(timeout, "timeout")
        self._retry_at = -inf
        self._waiter = Waiter(wake)
        state.wakeups.has_readers = True

    def steps(self) -> Steps[list[Element]]:
        """Return elements when they come, or none at the timeout; raise NodeClosed at ``stop``."""
        elements = yield from self._try(may_listen=False)
        if elements:
            return elements
        self._wait_list.add(self._waiter)
        try:
            while not elements and (now := monotonic()) < self._deadline:
                if self._state.is_stopped:
                    raise self._state.stopped_error("while it waited for elements")
                if self._is_our_turn and self._is_due(now):
                    elements = yield from self._try(may_listen=True)
                else:
                    yield self._wait()
        finally:
            self._wait_list.remove(self._waiter)
        return elements

    def _on_listening(self, answer: ListenResult) -> None:
        self._state.wait_lists.by_channel[answer.channel] = self._wait_list

    @property
    def _is_our_turn(self) -> bool:
        return self._state.heartbeat.is_connected and self._wait_list.is_first(self._waiter)

    def _wait(self) -> Wait:
        """Create a step that waits until our turn begins or ends, or our next attempt is due."""
        was_our_turn = self._is_our_turn

        def is_ready() -> bool:
            is_our_turn = self._is_our_turn
            return is_our_turn != was_our_turn or (is_our_turn and self._is_due(monotonic()))

        due_at = max(self._wait_list.due_at, self._retry_at)
        return Wait(is_ready, min(self._deadline, due_at) if was_our_turn else self._deadline)

    def _is_due(self, now: float) -> bool:
        return now >= self._retry_at and self._wait_list.is_due(now)

    def _try(self, *, may_listen: bool) -> Steps[list[Element]]:
        """Try to take elements; return none after a temporary error."""
        try:
            if may_listen and self._wait_list.must_listen(monotonic()):
                yield from self._begin_listening()
            is_listening = self._wait_list.is_listening(monotonic())
            # A notification during the call increases this number, and so causes another attempt.
            reason_count = self._wait_list.reason_count
            elements: list[Element] = yield self._call
        except ConnectionLost:
            # The node reconnects, and then this waiter tries again.
            return []
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            text = "%s: could not take elements, retrying: %s"
            self._state.log.warning(text, self._state.ident, error)
            self._retry_at = monotonic() + RETRY_SECONDS
            return []
        if is_listening:
            self._wait_list.record_attempt(reason_count, monotonic(), has_taken=bool(elements))
        return elements

    def _begin_listening(self) -> Steps[None]:
        wait_list = self._wait_list
        connection_number = self._state.wakeups.connections
        reason_count = wait_list.reason_count
        try:
            answer: ListenResult = yield self._listen
        except LockNotAvailable:
            wait_list.record_lock_timeout(monotonic())
        else:
            wait_list.record_listen_answer(answer, connection_number, reason_count, monotonic())
