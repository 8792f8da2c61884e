"""Queue of the calls of a session, and batches of calls that share a round trip. No I/O."""

from __future__ import annotations

from asyncio import Future
from collections import deque
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import psycopg

from psqlmessages.client.calls import Call, translate_error
from psqlmessages.client.node_state import NodeState
from psqlmessages.exceptions import ConnectionLost

_MAX_BATCH_ITEMS: Final = 500
_MAX_BATCH_CHARACTERS: Final = 4 * 1024 * 1024


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call that a task or thread waits for; without a connection, it fails at ``deadline``.

    ``caller`` is that task or thread; calls of one caller run in the order of queueing.
    ``on_success`` is called if the call succeeds. Then the future stays pending, so that the caller
    can also wait for an answer that arrives later.
    """

    call: Call[Any]
    future: Future[Any] | ThreadFuture[Any]
    deadline: float
    caller: Hashable
    on_success: Callable[[], object] | None = None

    def succeed(self, result: Any) -> None:
        """Call ``on_success``, or else set the result of the future unless that was cancelled."""
        if self.on_success is not None:
            self.on_success()
        elif not self.future.done():
            # The caller may run in another thread, and cancel the future after the check above.
            with suppress(InvalidStateError):
                self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set the error of the future, unless that was cancelled."""
        if not self.future.done():
            with suppress(InvalidStateError):
                self.future.set_exception(error)


class Group(list[QueuedCall]):
    """Queued calls that run as one statement: one call, or calls that are merged."""

    @property
    def statement(self) -> tuple[str, tuple[Any, ...]]:
        """SQL and parameters of the statement."""
        first = self[0].call
        if len(self) == 1 or first.merging is None:
            return first.sql, first.params
        return first.merging.sql, first.merging.merge_params([queued.call for queued in self])

    def split_answer(self, answer: Any) -> list[Any] | None:
        """Return the answer of each call; None if merged calls got an error."""
        first = self[0].call
        if len(self) == 1 or first.merging is None:
            return [answer]
        if answer.get("Err") != "0":
            return None
        return first.merging.split(answer, [queued.call for queued in self])


Batch = list[Group]


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch of several calls into two batches, in their order."""
    if len(batch) > 1:
        middle = len(batch) // 2
        return batch[:middle], batch[middle:]
    middle = len(batch[0]) // 2
    return [Group(batch[0][:middle])], [Group(batch[0][middle:])]


class CallQueue(deque[QueuedCall]):
    """The queue of a session's calls, oldest first."""

    def take_batch(self) -> Batch:
        """Take the oldest call, and those behind it that may share its transaction.

        The groups of a batch may run in any order. So all calls of one caller are in one group, and
        calls that remove the same element are in different batches.
        """
        groups: dict[Hashable, Group] = {}
        group_key_by_caller: dict[Hashable, Hashable] = {}
        element_ids: set[str] = set()
        items = characters = 0
        while self and (not groups or self[0].call.may_share_round_trip):
            queued = self[0]
            if queued.future.done():
                self.popleft()
                continue
            call = queued.call
            key = id(queued) if call.merging is None else call.merging.key(call)
            call_items, call_characters = call.size
            items += call_items
            characters += call_characters
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
        """Remove and fail the calls that have a deadline at or before ``now``."""
        # Deadlines ascend, because each is the time of queueing plus the same number of seconds.
        while self and self[0].deadline <= now:
            self.popleft().fail(error)


def run_batch(
    batch: Batch,
    state: NodeState,
    is_broken: Callable[[psycopg.Error], bool],
    process_notifications: Callable[[], object],
) -> Generator[Batch, list[Any], ConnectionLost | None]:
    """Yield batches to run, each in one transaction; receive the answers of its groups.

    Each caller gets its own result or error. Returns the error if the connection is lost.
    """
    try:
        answers = yield batch
    except psycopg.Error as error:
        is_lost = is_broken(error)
        # An error without SQLSTATE is not from the server: the transaction may have been committed.
        is_rolled_back = bool(error.sqlstate) and not is_lost
        if is_rolled_back and sum(map(len, batch)) > 1:
            # Run each half of the calls separately, so that finally only the failing call fails.
            first, second = halves(batch)
            lost_by_first = yield from run_batch(first, state, is_broken, process_notifications)
            lost_by_second = yield from run_batch(second, state, is_broken, process_notifications)
            return lost_by_first or lost_by_second
        translated = translate_error(error, is_broken=is_lost)
        _fail(batch, translated, state)
        return translated if isinstance(translated, ConnectionLost) else None
    except Exception as error:  # noqa: BLE001 - raised in the callers
        _fail(batch, error, state)
        return None
    failed: Batch = []
    for group, answer in zip(batch, answers, strict=True):
        if group[0].call.must_follow_events:
            # The call changes a registration, so first process the events that arrived before.
            process_notifications()
        try:
            results = group.split_answer(answer)
        except Exception as error:  # noqa: BLE001 - raised in the callers
            _fail([group], error, state)
            continue
        if results is None:
            failed += [Group([queued]) for queued in group]
            continue
        for queued, result in zip(group, results, strict=True):
            _resolve(queued, result, state)
    if not failed:
        return None
    # A statement that returned an error has done nothing, so run its calls separately.
    return (yield from run_batch(failed, state, is_broken, process_notifications))


def _fail(batch: Batch, error: Exception, state: NodeState) -> None:
    for queued in chain.from_iterable(batch):
        state.on_call_failed(queued.call, error)
        queued.fail(error)


def _resolve(queued: QueuedCall, answer: Any, state: NodeState) -> None:
    """Pass the result of a call, or the error in its answer, to the caller."""
    try:
        result = queued.call.read(answer)
    except Exception as error:  # noqa: BLE001 - raised in the caller
        state.on_call_failed(queued.call, error)
        queued.fail(error)
        return
    state.on_call_succeeded(queued.call, result)
    queued.succeed(result)
