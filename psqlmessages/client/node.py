"""Node: sends and receives messages on its own PostgreSQL connection."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from time import monotonic
from typing import Any, Self

from psqlmessages.client import calls, queue_calls, stream_calls
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.handler_runs import HandlerThreads
from psqlmessages.client.messages import Message, PendingCall, unanswered_if_not_sent
from psqlmessages.client.methods import NodeBase, acting_method, method
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT, Options, complete_conninfo
from psqlmessages.client.queue_calls import DEFAULT_DURATION, Element
from psqlmessages.client.queue_consumer import DEFAULT_GROUP, FOREVER, LeasedBatch, QueuePoller
from psqlmessages.client.session import NodeSession
from psqlmessages.client.subscription import (
    DEFAULT_ROWS,
    DEFAULT_TIMEOUT,
    DEFAULT_WAIT,
    Subscription,
    SubscriptionReader,
)
from psqlmessages.client.transactions import SqlStatement
from psqlmessages.exceptions import CallTimeout, NodeClosed


class Node(NodeBase):
    """A named sender and receiver of messages; ``with`` registers and deregisters it.

    If the connection is lost, the node reconnects and then yields the local event "reconnected".
    Threads may share a node. While a call runs, other calls wait, and then share a round trip.
    """

    def __init__(self, ident: str, dsn: str = "", *, options: Options | None = None) -> None:
        options = options or Options()
        super().__init__(ident, options)
        self._session = NodeSession(complete_conninfo(dsn, ident), self._state, options)
        self._handler_threads = HandlerThreads(self, self._state, self._session.wake)
        self._is_closing = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect and register; the context manager does this first."""
        self._session.open()

    def close(self) -> None:
        """Stop, wait up to ``stop_timeout`` for running handlers, deregister and disconnect.

        Callable from any thread and from signal handlers. If this thread is in ``run``, the node is
        closed when ``run`` ends.
        """
        self._is_closing = True
        self.stop()
        if self._handler_threads.is_running_here:
            return
        self._handler_threads.finish()
        self._handler_threads.close()
        self._session.close()

    def stop(self) -> None:
        """End all waits, such as ``messages`` and ``call``; sending works until ``close``.

        ``run`` ends when its running handlers have ended, or after ``stop_timeout``.
        """
        self._session.stop()
        self._handler_threads.wake()

    # Functions of the SQL core

    deinit = method(calls.deinit)
    crash = method(calls.crash)
    use = method(calls.use)
    topic_auth = method(calls.topic_auth)
    topic_status = method(calls.topic_status)
    topic_notify = method(calls.topic_notify)
    topic_unnotify = method(calls.topic_unnotify)
    topic_listen = method(calls.topic_listen)
    topic_unlisten = method(calls.topic_unlisten)
    topic_observe = method(calls.topic_observe)
    topic_unobserve = method(calls.topic_unobserve)
    topic_send = method(calls.topic_send)
    topic_send_many = method(calls.topic_send_many)
    topic_send_as = method(calls.topic_send_as)
    rpc = method(calls.rpc)
    audience = method(calls.audience)
    evaluate = method(calls.evaluate)

    def init(self, ident: str) -> None:
        """Register another node on this connection, and make it the acting node."""
        self._session.run(calls.init(ident))

    def reply(self, message: Message, body: Any) -> None:
        """Answer a message whose sender gave a token (the SQL function ``return``)."""
        with unanswered_if_not_sent(message):
            self._session.run(calls.return_(message.sender, message.token or "", body))

    def reply_error(self, message: Message, reason: str) -> None:
        """Answer that the request failed (``return_error``): the caller gets CallFailed."""
        with unanswered_if_not_sent(message):
            self._session.run(calls.return_error(message.sender, message.token or "", reason))

    # Streams

    publish = acting_method(stream_calls.publish)
    publish_many = acting_method(stream_calls.publish_many)
    subscription = acting_method(stream_calls.subscription)

    def subscribe(
        self,
        topic: str,
        timeout: Duration = DEFAULT_TIMEOUT,
        max_rows: int = DEFAULT_ROWS,
        *,
        idle: Duration | None = None,
    ) -> Subscription:
        """Subscribe, or continue where the last reader stopped; return an iterator of messages.

        The subscription expires ``timeout`` (in whole seconds) after the last read. Each read
        returns at most ``max_rows`` messages. The iteration ends at ``stop``, at ``unsubscribe``,
        and if no message comes within ``idle``.
        """
        reader = SubscriptionReader(self._state, topic, timeout, max_rows, idle)
        return Subscription(self._session, reader)

    def unsubscribe(self, topic: str) -> bool:
        """End a subscription and all iterations over it; return False if there was none."""
        self._state.wakeups.on_unsubscribed(self._acting_node, topic)
        return self._session.run(stream_calls.unsubscribe(self._acting_node, topic))

    def wait_published(self, topic: str, timeout: Duration = DEFAULT_WAIT) -> bool:
        """Wait until there may be new messages of a topic, to read them on another connection.

        Returns False at the timeout or ``stop``. Read in that case too: a wake-up may be lost.
        """
        return self._session.run_steps(self._state.wait_published(topic, timeout))

    # Queues

    push = acting_method(queue_calls.push)
    push_many = acting_method(queue_calls.push_many)
    commit = acting_method(queue_calls.commit)
    rollback = acting_method(queue_calls.rollback)
    release = acting_method(queue_calls.release)
    remove = acting_method(queue_calls.remove)
    pause = acting_method(queue_calls.pause)
    resume = acting_method(queue_calls.resume)
    drain = acting_method(queue_calls.drain)
    configure_queue = acting_method(queue_calls.configure_queue)
    remove_queue = acting_method(queue_calls.remove_queue)
    remove_elements = acting_method(queue_calls.remove_elements)
    move_elements = acting_method(queue_calls.move_elements)
    sizes = acting_method(queue_calls.sizes)

    def pop(self, queue: str, count: int = 1, *, timeout: Duration | None = None) -> list[Element]:
        """Take and remove up to ``count`` available elements, ordered by their ``mature`` time.

        If there are none, return an empty list. With a timeout, wait that long for the first one;
        ``stop`` and ``close`` end the wait with NodeClosed.
        """
        return self._take(queue, queue_calls.pop(self._acting_node, queue, count), timeout)

    def reserve(
        self,
        queue: str,
        count: int = 1,
        duration: Duration = DEFAULT_DURATION,
        *,
        timeout: Duration | None = None,
    ) -> list[Element]:
        """Take elements as ``pop`` does; uncommitted elements return after ``duration``."""
        statement = queue_calls.reserve(self._acting_node, queue, count, duration)
        return self._take(queue, statement, timeout)

    def consume(
        self,
        queue: str,
        *,
        batch: int = 1,
        duration: Duration = DEFAULT_DURATION,
        idle: Duration | None = None,
        group: Duration = DEFAULT_GROUP,
    ) -> Iterator[Element]:
        """Reserve and yield elements as they come; end at ``stop`` or after ``idle`` without one.

        Requesting the next element marks the previous one as finished. Finished elements are
        committed together: when ``group`` has passed since the first of them was yielded, at the
        end of the batch, and when the loop is left. ``group`` is at most a tenth of ``duration``;
        zero means one commit per element. Leaving the loop also rolls back the current element,
        with a delay of 1 s that doubles with each try up to 5 minutes, and releases the unread
        elements of the batch. Leases are not renewed.
        """
        leased = LeasedBatch(self._state, self._acting_node, queue, duration, group)
        timeout = FOREVER if idle is None else idle
        try:
            while not self._state.is_stopped:
                leased.add(self.reserve(queue, batch, duration, timeout=timeout))
                if leased.is_empty:
                    return
                while (element := self._session.run_steps(leased.next())) is not None:
                    yield element
        except NodeClosed:
            if not self._state.is_stopped:
                raise
        finally:
            self._session.run_steps(leased.give_back())

    def _take(self, queue: str, statement: SqlStatement, timeout: Duration | None) -> list[Element]:
        if not timeout:
            return self._session.run(queue_calls.take(queue, statement))
        taken: list[Element] = []
        call = queue_calls.take_recorded(queue, statement, taken)
        wake = self._session.wake
        poller = QueuePoller(self._state, self._acting_node, queue, call, timeout, wake)
        try:
            return self._session.run_steps(poller.steps())
        except BaseException:
            # Ctrl-C may have come after the transaction, so release the reserved elements. Popped
            # elements have no lease, so they are lost.
            leased = LeasedBatch(self._state, self._acting_node, queue)
            leased.add([element for element in taken if element.lease])
            self._session.run_steps(leased.give_back())
            raise

    # RPC

    def call(self, node: str, body: Any, *, timeout: Duration = DEFAULT_CALL_TIMEOUT) -> Any:
        """Call a node and return its answer; raise CallFailed or CallTimeout."""
        seconds = seconds_of(timeout, "timeout")
        deadline = monotonic() + seconds
        pending = self._state.begin_call(node)
        try:
            self._session.run(calls.rpc(node, pending.token, body), seconds)
            pending.on_sent()
            if self._wait_for_answer(pending, deadline):
                return self._session.run_steps(self._state.next_answer(pending, self)).content
        finally:
            self._state.end_call(pending)
        raise CallTimeout(f"no answer from {node} within {seconds:g} s")

    def call_topic(
        self, topic: str, body: Any, *, timeout: Duration = DEFAULT_CALL_TIMEOUT
    ) -> Iterator[Message]:
        """Call all listeners of a topic; yield their answers as they come, until the timeout."""
        seconds = seconds_of(timeout, "timeout")
        deadline = monotonic() + seconds
        pending = self._state.begin_call("")
        try:
            self._session.run(calls.topic_send(topic, body, pending.token), seconds)
            pending.on_sent()
            while self._wait_for_answer(pending, deadline):
                yield self._session.run_steps(self._state.next_answer(pending, self))
        finally:
            self._state.end_call(pending)

    def _wait_for_answer(self, pending: PendingCall, deadline: float) -> bool:
        """Wait for an answer until the deadline; return whether there is one."""
        self._session.wait(lambda: pending.answers, deadline, also_limits_probes=True)
        if not pending.answers and self._state.is_stopped:
            raise self._state.stopped_error("while it waited for an answer")
        return bool(pending.answers)

    # Receiving

    def messages(self, timeout: Duration | None = None) -> Iterator[Message]:
        """Yield messages as they come; end if none comes within ``timeout``, or at ``stop``."""
        session, state = self._session, self._state
        while (message := session.run_steps(state.next_message(timeout, self))) is not None:
            yield message

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def run(self) -> None:
        """Listen to the topics of the handlers, and handle each message, until ``stop``.

        Up to ``concurrency`` messages are handled at the same time, each in a thread.
        """
        for topic in self.topics_to_listen():
            self.topic_listen(topic)
        try:
            self._handler_threads.run(self._receive)
        finally:
            if self._is_closing:
                self.close()

    def _receive(self) -> Message | None:
        """Return the next message; None if the node is stopped, or a handler has ended ``run``."""
        session, state = self._session, self._state
        session.wait(lambda: state.inbox or self._handler_threads.fatal_error, inf)
        return session.run_steps(state.next_message(0, self)) if state.inbox else None
