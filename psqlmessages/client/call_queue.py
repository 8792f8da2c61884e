"""Queue of the calls of a session, and the batches that share a round trip. No I/O."""

from __future__ import annotations

from asyncio import Future
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

from psqlmessages.client.calls import Call

_MAX_BATCH_ITEMS: Final = 500
_MAX_BATCH_CHARACTERS: Final = 4 * 1024 * 1024


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call that a task waits for; without a connection, it fails at ``deadline``.

    ``caller`` is the task: its calls run in the order in which they were queued.
    """

    call: Call[Any]
    future: Future[Any]
    deadline: float
    caller: Hashable

    def succeed(self, result: Any) -> None:
        """Return a result to the waiting task, unless the task was cancelled."""
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Raise an error in the waiting task, unless the task was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


class Group(list[QueuedCall]):
    """Queued calls that run as one statement: one call, or calls that are merged."""

    @property
    def statement(self) -> tuple[str, tuple[Any, ...]]:
        """SQL and parameters."""
        first = self[0].call
        if len(self) == 1 or first.merging is None:
            return first.sql, first.params
        return first.merging.sql, first.merging.merge_params([queued.call for queued in self])

    def split_answer(self, answer: Any) -> list[Any] | None:
        """Return the answer of each call; None if the statement of merged calls failed."""
        first = self[0].call
        if len(self) == 1 or first.merging is None:
            return [answer]
        if answer.get("Err") != "0":
            return None
        return first.merging.split(answer, [queued.call for queued in self])

    def single_calls(self) -> list[Group]:
        """Create a group for each call."""
        return [Group([queued]) for queued in self]


Batch = list[Group]


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch of several calls into two batches, in their order."""
    if len(batch) > 1:
        middle = len(batch) // 2
        return batch[:middle], batch[middle:]
    middle = len(batch[0]) // 2
    return [Group(batch[0][:middle])], [Group(batch[0][middle:])]


class CallQueue(deque[QueuedCall]):
    """The queue of a node's calls, oldest first."""

    def take_batch(self) -> Batch:
        """Take the oldest call, and those behind it that may share its transaction.

        All calls of one caller are in the same group. So the groups may run in any order.
        """
        groups: dict[Hashable, Group] = {}
        group_key_by_caller: dict[Hashable, Hashable] = {}
        element_ids: set[str] = set()
        items = characters = 0
        while self and (not groups or self[0].call.may_share_round_trip):
            queued = self[0]
            call = queued.call
            if queued.future.done():
                self.popleft()
                continue
            key = id(queued) if call.merging is None else (call.merging.sql, *call.fixed_params)
            items += call.item_count
            characters += call.character_count
            if groups and (
                items > _MAX_BATCH_ITEMS
                or characters > _MAX_BATCH_CHARACTERS
                or group_key_by_caller.get(queued.caller, key) != key
                or not element_ids.isdisjoint(call.element_ids)
            ):
                break
            groups.setdefault(key, Group()).append(self.popleft())
            group_key_by_caller[queued.caller] = key
            element_ids.update(call.element_ids)
            if not call.may_share_round_trip:
                break
        # Transactions that lock in the same order cannot deadlock.
        return sorted(groups.values(), key=lambda group: group[0].call.lock_order)

    def fail_until(self, now: float, error: BaseException) -> None:
        """Raise an error in the tasks whose calls have a deadline at or before ``now``."""
        while self and self[0].deadline <= now:
            self.popleft().fail(error)
