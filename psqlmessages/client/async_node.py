"""AsyncNode: the asyncio version of Node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Self

from psqlmessages.client import calls, queue_calls, stream_calls
from psqlmessages.client.async_queue_consumer import AsyncQueueConsumer
from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.handler_runs import HandlerTasks
from psqlmessages.client.messages import Message, PendingCall, unanswered_if_not_sent
from psqlmessages.client.methods import NodeBase, async_acting_method, async_method
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT, Options, complete_conninfo
from psqlmessages.client.queue_calls import DEFAULT_DURATION, Element
from psqlmessages.client.queue_consumer import DEFAULT_GROUP, FOREVER
from psqlmessages.client.subscription import (
    DEFAULT_ROWS,
    DEFAULT_TIMEOUT,
    DEFAULT_WAIT,
    AsyncSubscription,
    SubscriptionReader,
)
from psqlmessages.exceptions import CallTimeout, NodeClosed


class AsyncNode(NodeBase):
    """A named sender and receiver of messages; ``async with`` registers and deregisters it.

    Tasks may share a node: calls that tasks make at the same time share round trips. The methods
    are those of :class:`~psqlmessages.client.node.Node`. Handlers that are coroutine functions run
    as tasks, others in threads.
    """

    def __init__(self, ident: str, dsn: str = "", *, options: Options | None = None) -> None:
        options = options or Options()
        super().__init__(ident, options)
        self._session = AsyncNodeSession(complete_conninfo(dsn, ident), self._state, options)
        self._consumer = AsyncQueueConsumer(self._session, self._state)
        self._handler_tasks = HandlerTasks(self, self._state)
        # Calls ``_end_late_calls`` at the earliest deadline.
        self._timer: asyncio.TimerHandle | None = None
        self._min_accept_seconds = options.probe_timeout.total_seconds()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """See :meth:`Node.open`."""
        await self._session.open()

    async def close(self) -> None:
        """See :meth:`Node.close`; cancels the coroutines of handlers after ``stop_timeout``."""
        try:
            self._session.stop()
            await self._handler_tasks.finish()
            self._handler_tasks.close()
            await self._consumer.finish()
        finally:
            await self._session.close()
            if self._timer is not None:
                self._timer.cancel()

    def stop(self) -> None:
        """See :meth:`Node.stop`; not awaited, callable from any thread and from signal handlers."""
        self._session.stop()

    # Functions of the SQL core

    deinit = async_method(calls.deinit)
    crash = async_method(calls.crash)
    use = async_method(calls.use)
    topic_auth = async_method(calls.topic_auth)
    topic_status = async_method(calls.topic_status)
    topic_notify = async_method(calls.topic_notify)
    topic_unnotify = async_method(calls.topic_unnotify)
    topic_listen = async_method(calls.topic_listen)
    topic_unlisten = async_method(calls.topic_unlisten)
    topic_observe = async_method(calls.topic_observe)
    topic_unobserve = async_method(calls.topic_unobserve)
    topic_send = async_method(calls.topic_send)
    topic_send_many = async_method(calls.topic_send_many)
    topic_send_as = async_method(calls.topic_send_as)
    rpc = async_method(calls.rpc)
    audience = async_method(calls.audience)
    evaluate = async_method(calls.evaluate)

    async def init(self, ident: str) -> None:
        """See :meth:`Node.init`."""
        await self._session.run(calls.init(ident))

    async def reply(self, message: Message, body: Any) -> None:
        """See :meth:`Node.reply`."""
        with unanswered_if_not_sent(message):
            await self._session.submit(calls.return_(message.sender, message.token or "", body))

    async def reply_error(self, message: Message, reason: str) -> None:
        """See :meth:`Node.reply_error`."""
        with unanswered_if_not_sent(message):
            await self._session.run(calls.return_error(message.sender, message.token or "", reason))

    # Streams

    publish = async_acting_method(stream_calls.publish)
    publish_many = async_acting_method(stream_calls.publish_many)
    subscription = async_acting_method(stream_calls.subscription)

    def subscribe(
        self,
        topic: str,
        timeout: Duration = DEFAULT_TIMEOUT,
        max_rows: int = DEFAULT_ROWS,
        *,
        idle: Duration | None = None,
    ) -> AsyncSubscription:
        """See :meth:`Node.subscribe`."""
        reader = SubscriptionReader(self._state, topic, timeout, max_rows, idle)
        return AsyncSubscription(self._session, reader)

    async def unsubscribe(self, topic: str) -> bool:
        """See :meth:`Node.unsubscribe`."""
        self._state.wakeups.on_unsubscribed(self._acting_node, topic)
        return await self._session.run(stream_calls.unsubscribe(self._acting_node, topic))

    async def wait_published(self, topic: str, timeout: Duration = DEFAULT_WAIT) -> bool:
        """See :meth:`Node.wait_published`."""
        return await self._session.run_steps(self._state.wait_published(topic, timeout))

    # Queues

    push = async_acting_method(queue_calls.push)
    push_many = async_acting_method(queue_calls.push_many)
    commit = async_acting_method(queue_calls.commit)
    rollback = async_acting_method(queue_calls.rollback)
    release = async_acting_method(queue_calls.release)
    remove = async_acting_method(queue_calls.remove)
    pause = async_acting_method(queue_calls.pause)
    resume = async_acting_method(queue_calls.resume)
    drain = async_acting_method(queue_calls.drain)
    configure_queue = async_acting_method(queue_calls.configure_queue)
    remove_queue = async_acting_method(queue_calls.remove_queue)
    remove_elements = async_acting_method(queue_calls.remove_elements)
    move_elements = async_acting_method(queue_calls.move_elements)
    sizes = async_acting_method(queue_calls.sizes)

    async def pop(
        self, queue: str, count: int = 1, *, timeout: Duration | None = None
    ) -> list[Element]:
        """See :meth:`Node.pop`; a cancelled call takes nothing.

        ``pop`` reserves the elements and commits them in the background. If the program dies in
        between, they are delivered again after two minutes.
        """
        ident = self._acting_node
        statement = queue_calls.reserve(ident, queue, count)
        elements = await self._consumer.take(ident, queue, statement, timeout)
        self._consumer.commit_popped(ident, elements)
        for element in elements:
            element.lease = ""
        return elements

    async def reserve(
        self,
        queue: str,
        count: int = 1,
        duration: Duration = DEFAULT_DURATION,
        *,
        timeout: Duration | None = None,
    ) -> list[Element]:
        """See :meth:`Node.reserve`; a cancelled call releases its elements."""
        ident = self._acting_node
        statement = queue_calls.reserve(ident, queue, count, duration)
        return await self._consumer.take(ident, queue, statement, timeout)

    async def consume(
        self,
        queue: str,
        *,
        batch: int = 1,
        duration: Duration = DEFAULT_DURATION,
        idle: Duration | None = None,
        group: Duration = DEFAULT_GROUP,
    ) -> AsyncIterator[Element]:
        """See :meth:`Node.consume`.

        If the iterator is not closed when the node is closed, :meth:`close` commits the finished
        elements and gives back the others.
        """
        leased = self._consumer.new_batch(self._acting_node, queue, duration, group)
        timeout = FOREVER if idle is None else idle
        try:
            while not self._state.is_stopped:
                leased.add(await self.reserve(queue, batch, duration, timeout=timeout))
                if leased.is_empty:
                    return
                while (element := await self._session.run_steps(leased.next())) is not None:
                    yield element
        except NodeClosed:
            if not self._state.is_stopped:
                raise
        finally:
            self._consumer.give_back(leased)

    # RPC

    async def call(self, node: str, body: Any, *, timeout: Duration = DEFAULT_CALL_TIMEOUT) -> Any:
        """See :meth:`Node.call`."""
        seconds = seconds_of(timeout, "timeout")
        pending = self._state.begin_call(node)
        try:
            # This future stays pending when the request is sent: ``on_answer`` completes it.
            request = calls.rpc(node, pending.token, body)
            answered = self._session.submit(request, pending.on_sent)
            pending.on_answer = partial(_wake, answered)
            self._set_deadline(pending, seconds)
            await answered
            answer = await self._session.run_steps(self._state.next_answer(pending, self))
            return answer.content
        finally:
            self._state.end_call(pending)

    def _set_deadline(self, pending: PendingCall, seconds: float) -> None:
        # One timer for all calls, because a timer of asyncio takes a tenth of the time of a call.
        loop = asyncio.get_running_loop()
        pending.seconds = seconds
        pending.extra_seconds = self._min_accept_seconds - seconds
        pending.deadline = deadline = loop.time() + seconds
        if self._timer is None or deadline < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(deadline, self._end_late_calls)

    def _end_late_calls(self) -> None:
        loop = asyncio.get_running_loop()
        now, pending_calls = loop.time(), self._state.pending_calls()
        for pending in pending_calls:
            if pending.deadline <= now:
                self._end_late_call(pending)
        deadline = min([pending.deadline for pending in pending_calls], default=inf)
        self._timer = None if deadline == inf else loop.call_at(deadline, self._end_late_calls)

    def _end_late_call(self, pending: PendingCall) -> None:
        """End a call at its deadline.

        If the server has not accepted the call yet, a timeout shorter than ``probe_timeout`` is
        first extended to it. If the server accepts the call in the extra time, the call ends
        immediately, with the error that there was no answer.
        """
        no_answer = CallTimeout(f"no answer from {pending.callee} within {pending.seconds:g} s")
        if pending.is_sent:
            pending.deadline = inf
            pending.add(no_answer)
        elif pending.extra_seconds > 0:
            pending.fail(no_answer)
            pending.deadline += pending.extra_seconds
            pending.extra_seconds = 0
        else:
            pending.deadline = inf
            pending.add(_not_accepted_error(max(pending.seconds, self._min_accept_seconds)))

    async def call_topic(
        self, topic: str, body: Any, *, timeout: Duration = DEFAULT_CALL_TIMEOUT
    ) -> AsyncIterator[Message]:
        """See :meth:`Node.call_topic`."""
        seconds = seconds_of(timeout, "timeout")
        deadline = monotonic() + seconds
        pending = self._state.begin_call("")
        try:
            sending_seconds = max(seconds, self._min_accept_seconds)
            try:
                async with asyncio.timeout(sending_seconds):
                    await self.topic_send(topic, body, pending.token)
            except TimeoutError:
                raise _not_accepted_error(sending_seconds) from None
            pending.on_sent()
            while await self._wait_for_answer(pending, deadline):
                yield await self._session.run_steps(self._state.next_answer(pending, self))
        finally:
            self._state.end_call(pending)

    async def _wait_for_answer(self, pending: PendingCall, deadline: float) -> bool:
        """See :meth:`Node._wait_for_answer`."""
        await self._session.wait(lambda: pending.answers, deadline)
        if not pending.answers and self._state.is_stopped:
            raise self._state.stopped_error("while it waited for an answer")
        return bool(pending.answers)

    # Receiving

    async def messages(self, timeout: Duration | None = None) -> AsyncIterator[Message]:
        """See :meth:`Node.messages`."""
        while (message := await self._receive(timeout)) is not None:
            yield message

    def __aiter__(self) -> AsyncIterator[Message]:
        return self.messages()

    async def _receive(self, timeout: Duration | None = None) -> Message | None:
        if (message := self._state.take_message(self)) is not None:
            return message
        return await self._session.run_steps(self._state.next_message(timeout, self))

    async def run(self) -> None:
        """See :meth:`Node.run`."""
        for topic in self.topics_to_listen():
            await self.topic_listen(topic)
        await self._handler_tasks.run(self._receive)


def _wake(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


def _not_accepted_error(seconds: float) -> CallTimeout:
    return CallTimeout(f"the server did not accept the call within {seconds:g} s")
