"""Queue methods of Node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

import psycopg

from psqlmessages.client import queue_calls
from psqlmessages.client.calls import is_transient
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.queue_calls import (
    DEFAULT_DURATION,
    AckResult,
    Element,
    Headers,
    QueueSizes,
    acknowledge,
    leases_of,
)
from psqlmessages.client.queue_consumer import (
    AGAIN_SECONDS,
    DEFAULT_GROUP,
    FOR_EVER,
    BlockingTake,
    LeasedBatch,
)
from psqlmessages.client.session import NodeSession
from psqlmessages.client.transactions import SqlStatement, Wait, drive
from psqlmessages.exceptions import ConnectionLost, MessagesError, NodeClosed
from psqlmessages.wire import EncodedBody


class QueueMethods:
    """The methods of :class:`~psqlmessages.client.node.Node` for queues."""

    _session: NodeSession
    _state: NodeState

    def push(
        self,
        queue: str,
        body: Any,
        *,
        headers: Headers | None = None,
        mature: datetime | None = None,
        delay: timedelta | None = None,
        tries: int = 0,
        key: str | None = None,
    ) -> int:
        """Add an element to a queue; return its id.

        It is available from ``mature`` on, else after ``delay``, else at once. A second push with
        the same ``key`` adds nothing and returns the id of the first.
        """
        return self._session.run(
            queue_calls.push(
                self._acting,
                queue,
                EncodedBody.of(body),
                headers=headers,
                mature=mature,
                delay=delay,
                tries=tries,
                key=key,
            )
        )

    def push_many(
        self,
        queue: str,
        bodies: Iterable[Any],
        *,
        headers: Iterable[Headers | None] | None = None,
        mature: datetime | None = None,
        delay: timedelta | None = None,
        tries: int = 0,
        keys: Iterable[str | None] | None = None,
    ) -> list[int]:
        """Add many elements in one call, in their order, all or none; return their ids.

        ``headers`` and ``keys`` hold one for each body. Bytes cannot be mixed with other values.
        """
        return self._session.run(
            queue_calls.push_many(
                self._acting,
                queue,
                list(bodies),
                headers=headers,
                mature=mature,
                delay=delay,
                tries=tries,
                keys=keys,
            )
        )

    def pop(self, queue: str, count: int = 1, *, timeout: timedelta | None = None) -> list[Element]:
        """Take and remove up to ``count`` elements, which matured first; none where none is there.

        With a timeout it waits so long for the first one. ``stop`` and ``close`` end the wait with
        NodeClosed.
        """
        return self._take(queue, queue_calls.pop(self._acting, queue, count), timeout)

    def reserve(
        self,
        queue: str,
        count: int = 1,
        duration: timedelta = DEFAULT_DURATION,
        *,
        timeout: timedelta | None = None,
    ) -> list[Element]:
        """Take as ``pop`` does, and hide: what is not committed in time comes back."""
        statement = queue_calls.reserve(self._acting, queue, count, duration)
        return self._take(queue, statement, timeout)

    def commit(self, *elements: Element | str) -> AckResult:
        """Remove reserved elements for good; take these, or their leases.

        The answer tells it for each, and is true where all were removed: False where the lease had
        run out and somebody else has taken the element since.
        """
        call = queue_calls.commit(self._acting, leases_of(elements))
        return acknowledge(elements, self._session.run(call))

    def rollback(self, *elements: Element | str, delay: timedelta | None = None) -> AckResult:
        """Give back with one try more: behind those that wait, or after ``delay``."""
        call = queue_calls.rollback(self._acting, leases_of(elements), delay)
        return acknowledge(elements, self._session.run(call))

    def release(self, *elements: Element | str) -> AckResult:
        """Give back what nobody has looked at: its place and tries are as before."""
        call = queue_calls.release(self._acting, leases_of(elements))
        return acknowledge(elements, self._session.run(call))

    def remove(self, queue: str, id_: int) -> bool:
        """Remove an element; False where it is unknown or reserved."""
        return self._session.run(queue_calls.remove(self._acting, queue, id_))

    def pause(self, queue: str) -> bool:
        """Let nobody take from a queue, wherever; False where it was paused."""
        return self._session.run(queue_calls.pause(self._acting, queue))

    def resume(self, queue: str) -> bool:
        """Undo pause; False where it was not paused."""
        return self._session.run(queue_calls.resume(self._acting, queue))

    def drain(self, queue: str) -> int:
        """Remove all that is available; return how many."""
        return self._session.run(queue_calls.drain(self._acting, queue))

    def sizes(self, queue: str) -> QueueSizes:
        """Tell how many elements a queue holds; raise QueueNotExistent where it is none."""
        return self._session.run(queue_calls.sizes(self._acting, queue))

    def consume(
        self,
        queue: str,
        *,
        batch: int = 1,
        duration: timedelta = DEFAULT_DURATION,
        idle: timedelta | None = None,
        group: timedelta = DEFAULT_GROUP,
    ) -> Iterator[Element]:
        """Reserve elements as they come and yield them, until ``stop`` or until idle for so long.

        Each is done when the loop comes back for the next. What is done is committed at the end of
        the batch, when ``group`` has passed since the first of it was yielded (a tenth of
        ``duration`` at most; zero: each by itself), and where the loop is left. Then the one at
        hand is rolled back, after a delay of 1 s that doubles with each try up to 5 minutes; what
        it had not seen of the batch is released. No lease is extended.
        """
        leased = LeasedBatch(self._state, self._acting, queue, duration, group)
        timeout = FOR_EVER if idle is None else idle
        try:
            while not self._session.is_stopped:
                leased.take(self.reserve(queue, batch, duration, timeout=timeout))
                if leased.is_empty:
                    return
                yield from self._deliver(leased)
        except NodeClosed:
            # Where the server is away, what is done is not committed: it comes again, as is told.
            if not self._session.is_stopped:
                raise
        finally:
            self._put_back(leased)

    def _deliver(self, leased: LeasedBatch) -> Iterator[Element]:
        while not self._session.is_stopped and (element := leased.next()) is not None:
            yield element
            if leased.done():
                self._commit(leased)
        self._commit(leased)

    def _commit(self, leased: LeasedBatch) -> None:
        while (call := leased.commit()) is not None:
            try:
                leased.committed(self._session.run(call))
            except ConnectionLost:
                if not leased.may_try_again():
                    raise
            except psycopg.Error as error:
                if not (is_transient(error) and leased.may_try_again()) or self._session.is_stopped:
                    raise
                leased.must_wait(error)
                self._session.wait(lambda: False, monotonic() + AGAIN_SECONDS)

    def _put_back(self, leased: LeasedBatch) -> None:
        try:
            self._commit(leased)
        except (MessagesError, psycopg.Error) as error:
            leased.could_not(error)
        for call in leased.leftover():
            try:
                self._session.run(call)
            except (MessagesError, psycopg.Error) as error:
                leased.could_not(error)

    def _take(
        self, queue: str, statement: SqlStatement, timeout: timedelta | None
    ) -> list[Element]:
        if not timeout:
            return self._session.run(queue_calls.taking(queue, statement))
        held: list[Element] = []
        take = queue_calls.holding(queue, statement, held)
        taking = BlockingTake(self._state, self._acting, queue, take, timeout, self._session.tell)
        try:
            return drive(taking.steps(lambda: self._session.is_stopped), self._do)
        except BaseException:
            # Ctrl-C after the commit; what was popped has no lease, and is gone with it.
            leased = LeasedBatch(self._state, self._acting, queue)
            leased.take([element for element in held if element.lease])
            self._put_back(leased)
            raise

    def _do(self, step: Any) -> Any:
        if isinstance(step, Wait):
            return self._session.wait(step.is_ready, step.deadline)
        return self._session.run(step)

    @property
    def _acting(self) -> str:
        return self._state.registration.acting
