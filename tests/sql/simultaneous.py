"""Acts at the same time, and waits for a state that another connection brings about."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tests.sql.conftest import PATIENCE_SECONDS, Program, World

T = TypeVar("T")


def together(*acts: Callable[[], T]) -> list[T]:
    """Run each act in a thread of its own, all from the same moment on; their results."""
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], T]) -> T:
        start.wait(PATIENCE_SECONDS)
        return act()

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(run, acts))


@contextmanager
def in_background(act: Callable[[], T]) -> Iterator[Future[T]]:
    """Run an act beside the test; leaving the block waits for its end and raises what it raised."""
    # No `with`: where the test fails, its connections must close first, for the act to end.
    threads = ThreadPoolExecutor(1)
    future = threads.submit(act)
    yield future
    future.result(timeout=PATIENCE_SECONDS)
    threads.shutdown()


def wait_until_blocked(world: World, program: Program) -> None:
    world.wait_for("SELECT pg_blocking_pids(%s) <> '{}'", program.pid)


@contextmanager
def blocked(world: World, program: Program, act: Callable[[], T]) -> Iterator[Future[T]]:
    """Run an act of a program beside the test; the block begins when the act waits for a lock."""
    with in_background(act) as future:
        wait_until_blocked(world, program)
        yield future


@contextmanager
def begins_with(world: World, name: str, statement: str) -> Iterator[None]:
    """Within, a function of ours begins with a statement of the test."""
    original = world.owner.query("SELECT pg_get_functiondef(%s::regproc)", f"messages.{name}")
    world.execute(original.replace("BEGIN", f"BEGIN {statement}", 1))
    try:
        yield
    finally:
        world.execute(original)
