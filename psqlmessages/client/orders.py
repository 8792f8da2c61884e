"""Orders: the calls that tasks wait for, and which of them share a round trip. No I/O."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from psqlmessages.client.calls import Call

_BATCH_CALLS = 500
_BATCH_CHARACTERS = 4 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Order:
    """A call that a task waits for, and until when it may wait for a connection."""

    call: Call[Any]
    future: asyncio.Future[Any]
    deadline: float

    def fail(self, error: BaseException) -> None:
        """Tell the task what went wrong, unless it was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self, result: Any) -> None:
        """Give the task its result, unless it was cancelled."""
        if not self.future.done():
            self.future.set_result(result)


class Orders:
    """The queue of a node's calls, oldest first."""

    def __init__(self) -> None:
        self._queue: deque[Order] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, order: Order) -> None:
        """Queue a call."""
        self._queue.append(order)

    def first_deadline(self, otherwise: float) -> float:
        """Tell when the oldest order has waited long enough."""
        return self._queue[0].deadline if self._queue else otherwise

    def take_batch(self) -> list[Order]:
        """Take the oldest order, and with a send all that follow it and are alike."""
        batch, characters = [self._queue.popleft()], 0
        while self._queue and batch[0].call.is_send and len(batch) < _BATCH_CALLS:
            following = self._queue[0].call
            characters += following.weight
            if following.sql != batch[0].call.sql or characters > _BATCH_CHARACTERS:
                break
            batch.append(self._queue.popleft())
        return [order for order in batch if not order.future.done()]

    def fail_until(self, now: float, error: BaseException) -> None:
        """Fail the orders whose deadline has passed."""
        while self._queue and self._queue[0].deadline <= now:
            self._queue.popleft().fail(error)
