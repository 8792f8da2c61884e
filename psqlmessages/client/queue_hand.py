"""Queue hand: what a consumer has reserved: the element at hand, what is done, the rest. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from time import monotonic
from typing import Final

from psqlmessages.client import queue_calls
from psqlmessages.client.calls import Call
from psqlmessages.client.listening import Listening
from psqlmessages.client.queue_elements import Element, Settled

FOR_EVER: Final = timedelta.max

_LONGEST_DELAY_SECONDS = 300.0


class Hand:
    """The elements that one consumer has reserved and not settled."""

    def __init__(
        self,
        listening: Listening,
        ident: str,
        queue: str,
        duration: timedelta = queue_calls.DEFAULT_DURATION,
    ) -> None:
        self._listening = listening
        self._ident = ident
        self._queue = queue
        self._duration = duration.total_seconds()
        self._expires_at = 0.0
        self._waiting: deque[Element] = deque()
        self._current: Element | None = None
        self._done: Element | None = None
        self._is_unsure = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left that was not looked at."""
        return not self._waiting

    def take(self, elements: list[Element]) -> None:
        """Take what was just reserved."""
        self._expires_at = monotonic() + self._duration
        self._waiting.extend(elements)

    def next(self) -> Element | None:
        """Give the next element; None where there is none, or its lease has run out."""
        if not self._waiting:
            return None
        if monotonic() >= self._expires_at:
            # Others may have them; they come back by themselves.
            self._lost(len(self._waiting))
            self._waiting.clear()
            return None
        self._current = self._waiting.popleft()
        return self._current

    def done(self) -> Call[Settled] | None:
        """Note that the loop came back; the call that commits, unless the loop has settled it."""
        self._done, self._current = self._current, None
        if self._done is None or self._done.is_settled:
            self._done = None
            return None
        return queue_calls.commit(self._ident, [self._done.lease])

    def committed(self, answer: Settled) -> None:
        """Take note of the answer to ``done``."""
        self._done = None
        if not (answer or self._is_unsure):
            self._lost(1)
        self._is_unsure = False

    def may_try_again(self) -> bool:
        """Whether to commit once more: the connection was lost, and it may have been done."""
        self._is_unsure = True
        return monotonic() < self._expires_at

    def leftover(self) -> Iterator[Call[Settled]]:
        """Yield the calls that settle all that is left; each is given once."""
        if self._done is not None:
            done, self._done = self._done, None
            yield queue_calls.commit(self._ident, [done.lease])
        if self._current is not None:
            current, self._current = self._current, None
            if not current.is_settled:
                yield queue_calls.rollback(self._ident, [current.lease], _delay(current.tries))
        if self._waiting:
            leases = [element.lease for element in self._waiting]
            self._waiting.clear()
            yield queue_calls.release(self._ident, leases)

    def could_not(self, error: BaseException) -> None:
        """Take note that something could not be settled."""
        self._listening.log.warning(
            "%s: elements of queue %s could not be settled, and come back when their leases have"
            " run out: %s",
            self._ident, self._queue, error,
        )  # fmt: skip

    def _lost(self, number: int) -> None:
        self._listening.counters.lost_leases += number
        self._listening.log.warning(
            "%s: a lease of queue %s had run out: the element comes, or came, again",
            self._ident, self._queue,
        )  # fmt: skip


def _delay(tries: int) -> timedelta:
    return timedelta(seconds=min(_LONGEST_DELAY_SECONDS, 2.0 ** min(tries, 30)))
