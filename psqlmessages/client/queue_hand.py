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
DEFAULT_GROUP: Final = timedelta(milliseconds=100)

_LONGEST_DELAY_SECONDS = 300.0
_GROUPS_PER_LEASE = 10


class Hand:
    """The elements that one consumer has reserved and not settled."""

    def __init__(
        self,
        listening: Listening,
        ident: str,
        queue: str,
        duration: timedelta = queue_calls.DEFAULT_DURATION,
        group: timedelta = DEFAULT_GROUP,
    ) -> None:
        self._listening = listening
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
        """Whether nothing is left that was not looked at."""
        return not self._waiting

    def take(self, elements: list[Element]) -> None:
        """Take what was just reserved."""
        self.expires_at = monotonic() + self._duration
        self._waiting.extend(elements)

    def next(self) -> Element | None:
        """Give the next element; None where there is none, or its lease has run out."""
        if not self._waiting:
            return None
        now = monotonic()
        if now >= self.expires_at:
            # Others may have them; they come back by themselves.
            self._lost(len(self._waiting))
            self._waiting.clear()
            return None
        if not self._done:
            # Not when it is done: what takes long is committed alone, not beside the next.
            self._begun_at = now
        self._current = self._waiting.popleft()
        return self._current

    def done(self) -> bool:
        """Note that the loop came back; whether it is time to commit what is done."""
        if self._current is not None:
            self._done.append(self._current)
            self._current = None
        now = monotonic()
        return now >= self._begun_at + self._group or now >= self.expires_at - self._group

    def commit(self) -> Call[Settled] | None:
        """Give the call that commits what is done; None where there is nothing to commit.

        What the loop has settled itself is left out. ``committed`` takes the answer.
        """
        self._done = [element for element in self._done if not element.is_settled]
        if not self._done:
            return None
        self._attempts += 1
        return queue_calls.commit(self._ident, [element.lease for element in self._done])

    def last_commit(self) -> Call[Settled] | None:
        """Give what ``commit`` gives, once."""
        call = self.commit()
        self._done = []
        return call

    def committed(self, answer: Settled) -> None:
        """Take note of the answer to ``commit``; after a second attempt it tells nothing."""
        self._done = []
        if self._attempts == 1 and not answer:
            self._lost(answer.count(False))
        self._attempts = 0

    def may_try_again(self) -> bool:
        """Whether to commit once more: the connection was lost, and it may have been done."""
        return monotonic() < self.expires_at

    def leftover(self) -> Iterator[Call[Settled]]:
        """Yield the calls that settle all that is not done; each is given once."""
        if self._current is not None:
            current, self._current = self._current, None
            if not current.is_settled:
                yield queue_calls.rollback(self._ident, [current.lease], _delay(current.tries))
        if self._waiting:
            leases = [element.lease for element in self._waiting]
            self._waiting.clear()
            yield queue_calls.release(self._ident, leases)

    def must_wait(self, error: BaseException) -> None:
        """Take note that something is to be settled a moment later."""
        self._listening.log.warning(
            "%s: elements of queue %s cannot be settled now, which is tried again: %s",
            self._ident, self._queue, error,
        )  # fmt: skip

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
