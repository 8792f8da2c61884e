"""Run functions at the same time, and wait until one of them waits for a lock."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tests.sql.conftest import WAIT_SECONDS, Program, World

T = TypeVar("T")


def together(*acts: Callable[[], T]) -> list[T]:
    """Run each function in its own thread, all from the same moment; return the results."""
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], T]) -> T:
        start.wait(WAIT_SECONDS)
        return act()

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(run, acts))


@contextmanager
def in_background(act: Callable[[], T]) -> Iterator[Future[T]]:
    """Run a function in a thread; at the end of the block, wait for it and raise its error."""
    # No `with`: if the test fails, its connections must close before the function can end.
    threads = ThreadPoolExecutor(1)
    future = threads.submit(act)
    yield future
    future.result(timeout=WAIT_SECONDS)
    threads.shutdown()


def wait_until_blocked(world: World, program: Program) -> None:
    world.wait_for("SELECT pg_blocking_pids(%s) <> '{}'", program.pid)


@contextmanager
def blocked(world: World, program: Program, act: Callable[[], T]) -> Iterator[Future[T]]:
    """Run a function in a thread; the block begins when its program waits for a lock."""
    with in_background(act) as future:
        wait_until_blocked(world, program)
        yield future


@contextmanager
def begins_with(world: World, name: str, statement: str) -> Iterator[None]:
    """Within the block, a function of the schema begins with this statement."""
    original = world.owner.query("SELECT pg_get_functiondef(%s::regproc)", f"messages.{name}")
    world.execute(original.replace("BEGIN", f"BEGIN {statement}", 1))
    try:
        yield
    finally:
        world.execute(original)
