"""Steps: what a reader without I/O wants done, and what does it, step by step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.calls import Call
from psqlmessages.exceptions import MessagesError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """A step: wait until something is ready, the time has come, or the node is stopped."""

    is_ready: Callable[[], object]
    deadline: float


Steps = Generator[Call[Any] | Wait, Any, T]


def drive(steps: Steps[T], do: Callable[[Any], Any]) -> T:
    """Do one step after the other: each gets the answer of its call, or the error."""
    try:
        step = next(steps)
        while True:
            try:
                answer = do(step)
            except (MessagesError, psycopg.Error) as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def drive_async(steps: Steps[T], do: Callable[[Any], Awaitable[Any]]) -> T:
    """See :func:`drive`."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await do(step)
            except (MessagesError, psycopg.Error) as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
