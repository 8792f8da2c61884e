"""Runs of handlers: as tasks or in threads, several messages of a node at the same time."""

from __future__ import annotations

import asyncio
import threading
from asyncio import TaskGroup
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor, Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from psqlmessages.client.handlers import HandlerAction, NodeHandlers
from psqlmessages.client.messages import Message
from psqlmessages.client.node_state import NodeState, logger
from psqlmessages.client.transactions import run_steps, run_steps_async

# Runs of handlers. No I/O.


@dataclass(slots=True, eq=False)
class HandlerRun:
    """Runs the handlers of a message, then of further messages with the same order key.

    ``runner`` is the task, or the id of the thread, that runs the handlers.
    """

    message: Message
    order_key: str | None
    runner: object = None
    action: HandlerAction | None = None


class HandlerRuns:
    """The current runs, at most ``Options.concurrency``, and messages that wait for a run."""

    def __init__(self, handlers: NodeHandlers, state: NodeState) -> None:
        self._handlers = handlers
        self._state = state
        self.current: set[HandlerRun] = set()
        # The waiting messages of each order key that has a current run.
        self._waiting: dict[str, deque[Message]] = {}
        self._waiting_count = 0

    @property
    def has_room(self) -> bool:
        """Whether the node may take another message from its inbox."""
        options = self._state.options
        return len(self.current) < options.concurrency and self._waiting_count < options.inbox_limit

    def begin(self, message: Message) -> HandlerRun | None:
        """Create the run of a message.

        Returns None if the message has no handler, or waits for a message with the same order key.
        """
        if not self._handlers.must_handle(message):
            return None
        key = self._handlers.order_key(message)
        if key is not None:
            if (waiting := self._waiting.get(key)) is not None:
                waiting.append(message)
                self._waiting_count += 1
                return None
            self._waiting[key] = deque()
        run = HandlerRun(message, key)
        self.current.add(run)
        return run

    def advance(self, run: HandlerRun) -> bool:
        """Give a run the next message of its key; if there is none, or after ``stop``, end the run.

        Returns whether the run continues.
        """
        waiting = self._waiting.get(run.order_key) if run.order_key is not None else None
        if not waiting or self._state.is_stopped:
            self.end(run)
            return False
        self._waiting_count -= 1
        run.message = waiting.popleft()
        return True

    def end(self, run: HandlerRun) -> None:
        """End a run unless it has ended, and drop the waiting messages of its key."""
        if run not in self.current:
            return
        self.current.discard(run)
        if run.order_key is not None:
            self._waiting_count -= len(self._waiting.pop(run.order_key, ()))

    def others(self, runner: object) -> set[HandlerRun]:
        """Return the runs of other tasks or threads."""
        return {run for run in self.current if run.runner != runner}

    def abandon(self, runs: Collection[HandlerRun]) -> None:
        """Log runs that have not ended in time, and consider them ended."""
        if names := sorted(run.action.name if run.action else "" for run in runs):
            text = "%s: these handlers did not end within %g s (stop_timeout) after the stop: %s"
            seconds = self._state.options.stop_timeout.total_seconds()
            logger.warning(text, self._state.ident, seconds, ", ".join(names))
        self.current.difference_update(runs)


# Threads


class DaemonThreadPool(Executor):
    """Thread pool that does not keep the process alive; starts a thread if none is idle."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in a thread; see :class:`concurrent.futures.Executor`."""
        future: Future[Any] = Future()
        self._tasks.put(partial(_complete, future, partial(function, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._count < self._size:
            self._count += 1
            name = f"{self._name} {self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # Free the arguments of the task while the thread is idle.
            del task
            self._idle.release()

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the threads when they have run all tasks; does not wait for them."""
        for _ in range(self._count):
            self._tasks.put(None)


def _complete(future: Future[Any], function: Callable[[], Any]) -> None:
    """Call a function, and set its result or error in a future, unless that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:
        # An asyncio future accepts no StopIteration.
        future.set_exception(RuntimeError(f"the handler raised {error!r}"))
    except BaseException as error:  # noqa: BLE001 - raised for the caller
        future.set_exception(error)
    else:
        future.set_result(result)


# If a signal handler calls `stop` just before the wait for room begins, nothing ends the wait. So
# check after this time whether the node is stopped.
_ROOM_CHECK_SECONDS: Final = 1.0


class HandlerThreads:
    """Runs the handlers of a Node in threads."""

    def __init__(
        self, handlers: NodeHandlers, state: NodeState, wake_receiver: Callable[[], object]
    ) -> None:
        self._handlers = handlers
        self._state = state
        self._wake_receiver = wake_receiver
        self._runs = HandlerRuns(handlers, state)
        self._changed = threading.Condition()
        self._threads = DaemonThreadPool(state.options.concurrency, f"handlers of {state.ident}")
        # Ids of the threads in which `run` is active.
        self._receiver_ids: set[int] = set()
        # An error of a handler that is not an Exception, such as SystemExit.
        self.fatal_error: BaseException | None = None

    @property
    def is_running_here(self) -> bool:
        """Whether ``run`` is active in this thread."""
        return threading.get_ident() in self._receiver_ids

    def run(self, receive: Callable[[], Message | None]) -> None:
        """Handle messages until the node is stopped, or a handler raises SystemExit or the like."""
        self._receiver_ids.add(threading.get_ident())
        try:
            while self._wait_for_room():
                if (message := receive()) is not None:
                    with self._changed:
                        run = self._runs.begin(message)
                    if run is not None:
                        self._threads.submit(self._handle, run)
            if (error := self.fatal_error) is not None:
                self.fatal_error = None
                raise error
            self.finish()
        finally:
            self._receiver_ids.discard(threading.get_ident())

    def _wait_for_room(self) -> bool:
        """Wait until the next message may be taken; return False if ``run`` must end instead."""
        with self._changed:
            while not (self._runs.has_room or self._state.is_stopped or self.fatal_error):
                self._changed.wait(_ROOM_CHECK_SECONDS)
        return not (self._state.is_stopped or self.fatal_error)

    def _handle(self, run: HandlerRun) -> None:
        run.runner = threading.get_ident()
        try:
            is_current = True
            while is_current:
                actions = self._handlers.handle(run.message, self._state)
                run_steps(actions, partial(self._execute, run))
                with self._changed:
                    is_current = self._runs.advance(run)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.fatal_error = self.fatal_error or error
            self._wake_receiver()
        finally:
            with self._changed:
                self._runs.end(run)
                self._changed.notify_all()

    def _execute(self, run: HandlerRun, action: Callable[[], Any]) -> Any:
        if isinstance(action, HandlerAction):
            run.action = action
        return action()

    def wake(self) -> None:
        """Make ``run`` check whether the node is stopped; callable from signal handlers."""
        with self._changed:
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait up to ``stop_timeout`` for the handlers that run in other threads."""
        thread_id = threading.get_ident()
        seconds = min(self._state.options.stop_timeout.total_seconds(), threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: not self._runs.others(thread_id), seconds)
            self._runs.abandon(self._runs.others(thread_id))

    def close(self) -> None:
        """End the threads when their handlers have ended."""
        self._threads.shutdown()


# Tasks


class HandlerTasks:
    """Runs the handlers of an AsyncNode as tasks, and its synchronous handlers in threads."""

    def __init__(self, handlers: NodeHandlers, state: NodeState) -> None:
        self._handlers = handlers
        self._state = state
        self._runs = HandlerRuns(handlers, state)
        self._changed = asyncio.Event()
        state.on_stop = self._changed.set
        self._threads = DaemonThreadPool(state.options.concurrency, f"handlers of {state.ident}")

    async def run(self, receive: Callable[[], Awaitable[Message | None]]) -> None:
        """Handle messages until the node is stopped, or a handler raises SystemExit or the like."""
        try:
            async with TaskGroup() as tasks:
                while (message := await receive()) is not None:
                    if (run := self._runs.begin(message)) is not None:
                        run.runner = tasks.create_task(self._handle(run))
                    if not self._runs.has_room:
                        await self._wait_for_room()
                await self.finish()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _wait_for_room(self) -> None:
        while not (self._runs.has_room or self._state.is_stopped):
            self._changed.clear()
            await self._changed.wait()

    async def _handle(self, run: HandlerRun) -> None:
        try:
            is_current = True
            while is_current:
                actions = self._handlers.handle(run.message, self._state)
                await run_steps_async(actions, partial(self._execute, run))
                is_current = self._runs.advance(run)
                self._changed.set()
        finally:
            self._runs.end(run)
            self._changed.set()

    async def _execute(self, run: HandlerRun, action: Callable[[], Any]) -> Any:
        if isinstance(action, HandlerAction):
            run.action = action
            if not action.is_async:
                call = partial(copy_context().run, action)
                action = partial(asyncio.get_running_loop().run_in_executor, self._threads, call)
        result = action()
        # Not inspect.isawaitable, which takes 1 µs for a result that is not awaitable.
        while hasattr(type(result), "__await__"):
            result = await result
        return result

    async def finish(self) -> None:
        """Wait up to ``stop_timeout`` for the handlers in other tasks, then cancel them."""
        if not (runs := self._runs.others(asyncio.current_task())):
            return
        tasks: dict[Any, HandlerRun] = {run.runner: run for run in runs}
        seconds = self._state.options.stop_timeout.total_seconds()
        _, unfinished = await asyncio.wait(tasks, timeout=seconds)
        # Another call of this method may already have abandoned some of these runs.
        late = [task for task in unfinished if tasks[task] in self._runs.current]
        self._runs.abandon([tasks[task] for task in late])
        for task in late:
            task.cancel()

    def close(self) -> None:
        """End the threads when their handlers have ended."""
        self._threads.shutdown()
