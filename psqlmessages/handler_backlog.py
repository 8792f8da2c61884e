"""Bounded queue of tasks that wait for a worker thread, some until a given time. No I/O."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """A queue between threads; ``limit`` applies to due tasks and, separately, to delayed ones."""

    def __init__(self, limit: int, clock: Callable[[], float] = monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._now: deque[T] = deque()
        self._later: list[tuple[float, int, T]] = []
        self._order = count()
        self._is_closed = False
        # Reentrant: a signal handler that calls close() may interrupt the thread with the lock.
        self._changed = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        with self._changed:
            return len(self._now) + len(self._later)

    def put(self, task: T) -> bool:
        """Add a task; waits while the queue is full. False if the backlog is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._now) < self._limit)
            if self._is_closed:
                return False
            self._now.append(task)
            self._changed.notify_all()
            return True

    def put_later(self, task: T, at: float) -> bool:
        """Add a task for a later time of the clock. False if closed or full."""
        with self._changed:
            if self._is_closed or len(self._later) >= self._limit:
                return False
            # The number orders equal times: tasks may not be comparable.
            heapq.heappush(self._later, (at, next(self._order), task))
            self._changed.notify_all()
            return True

    def take(self) -> T | None:
        """Take the next task, delayed ones that are due first; None if the backlog is closed."""
        with self._changed:
            while not self._is_closed:
                wait = self._later[0][0] - self._clock() if self._later else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._later)[2]
                if self._now:
                    task = self._now.popleft()
                    self._changed.notify_all()
                    return task
                self._changed.wait(wait)
            return None

    def close(self) -> None:
        """Wake all waiting threads; remaining tasks are dropped. Callable from signal handlers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
