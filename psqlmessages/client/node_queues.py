"""Queue methods of Node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from psqlmessages.client import queue_calls
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.queue_calls import (
    DEFAULT_DURATION,
    AckResult,
    Element,
    Headers,
    QueueSizes,
)
from psqlmessages.client.queue_consumer import (
    DEFAULT_GROUP,
    FOREVER,
    LeasedBatch,
    QueuePoller,
)
from psqlmessages.client.session import NodeSession
from psqlmessages.client.transactions import SqlStatement
from psqlmessages.exceptions import NodeClosed
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

        It is available from ``mature`` on, or after ``delay``, or immediately. A second push with
        the same ``key`` adds nothing and returns the id of the first element.
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

        ``headers`` and ``keys`` have one entry for each body. Bytes cannot be mixed with other
        values.
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
        """Take and remove up to ``count`` elements, oldest mature time first; maybe none.

        With a timeout, wait that long for the first element. ``stop`` and ``close`` end the wait
        with NodeClosed.
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
        """Take elements as ``pop`` does, but hide them; they return unless committed in time."""
        statement = queue_calls.reserve(self._acting, queue, count, duration)
        return self._take(queue, statement, timeout)

    def commit(self, *elements: Element | str) -> AckResult:
        """Remove reserved elements for good; pass the elements or their leases.

        The result has a bool for each and is true if all were removed. False: the lease had run out
        and another consumer has taken the element.
        """
        return self._session.run(queue_calls.commit(self._acting, elements))

    def rollback(self, *elements: Element | str, delay: timedelta | None = None) -> AckResult:
        """Give back elements with one more try, behind the waiting ones or after ``delay``."""
        return self._session.run(queue_calls.rollback(self._acting, elements, delay))

    def release(self, *elements: Element | str) -> AckResult:
        """Give back unread elements; they keep their place and number of tries."""
        return self._session.run(queue_calls.release(self._acting, elements))

    def remove(self, queue: str, id_: int) -> bool:
        """Remove an element; return False if it is unknown, reserved or locked."""
        return self._session.run(queue_calls.remove(self._acting, queue, id_))

    def pause(self, queue: str) -> bool:
        """Pause a queue for all consumers; return False if it was paused."""
        return self._session.run(queue_calls.pause(self._acting, queue))

    def resume(self, queue: str) -> bool:
        """End a pause; return False if the queue was not paused."""
        return self._session.run(queue_calls.resume(self._acting, queue))

    def drain(self, queue: str) -> int:
        """Remove all available elements; return their number."""
        return self._session.run(queue_calls.drain(self._acting, queue))

    def sizes(self, queue: str) -> QueueSizes:
        """Return the number of elements in a queue; raise QueueNotExistent if it does not exist."""
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
        """Reserve and yield elements as they come; end at ``stop`` or after ``idle`` without one.

        Requesting the next element marks the previous one as done. Finished elements are committed
        at the end of the batch, when ``group`` has passed since the first of them was yielded (at
        most a tenth of ``duration``; zero: one commit per element), and when the loop is left. In
        that case the current element is rolled back, with a delay of 1 s that doubles with each try
        up to 5 minutes, and the unread elements of the batch are released. No lease is extended.
        """
        leased = LeasedBatch(self._state, self._acting, queue, duration, group)
        timeout = FOREVER if idle is None else idle
        try:
            while not self._state.is_stopped:
                leased.add(self.reserve(queue, batch, duration, timeout=timeout))
                if leased.is_empty:
                    return
                while (element := self._session.drive(leased.next())) is not None:
                    yield element
        except NodeClosed:
            # Without a server, finished elements are not committed: they return, as is logged.
            if not self._state.is_stopped:
                raise
        finally:
            self._session.drive(leased.put_back())

    def _take(
        self, queue: str, statement: SqlStatement, timeout: timedelta | None
    ) -> list[Element]:
        if not timeout:
            return self._session.run(queue_calls.take(queue, statement))
        taken: list[Element] = []
        call = queue_calls.take_recorded(queue, statement, taken)
        poller = QueuePoller(self._state, self._acting, queue, call, timeout, self._session.wake)
        try:
            return self._session.drive(poller.steps())
        except BaseException:
            # Ctrl-C came after the commit. Popped elements have no lease and are lost.
            leased = LeasedBatch(self._state, self._acting, queue)
            leased.add([element for element in taken if element.lease])
            self._session.drive(leased.put_back())
            raise

    @property
    def _acting(self) -> str:
        return self._state.registration.acting
