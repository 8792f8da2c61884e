"""Queue elements: what a reader gets, how large a queue is, and what settling leases answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from psqlmessages import wire
from psqlmessages.exceptions import MessagesError
from psqlmessages.wire import MalformedPayload


class Settled(tuple[bool, ...]):
    """What commit, rollback and release answer for each lease; true where it holds for all."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return all(self)


class QueueSizes(NamedTuple):
    """How many elements a queue holds; ``next``: when the next one becomes available."""

    total: int
    available: int
    scheduled: int
    reserved: int
    next: datetime | None
    is_paused: bool


class Awaiting(NamedTuple):
    """What ``queue_listen`` answers: the channel that wakes, and for how many seconds it does.

    ``next_seconds``: in how many the next element becomes available; None where there is none.
    """

    channel: str
    seconds: float
    next_seconds: float | None
    is_paused: bool


@dataclass(slots=True)
class Element:
    """One element of a queue; ``lease`` is "" where it was popped, else the secret to settle it.

    ``mature``: since when it is available; ``hops``: how many exchanges it came through.
    """

    id: int
    queue: str
    content: Any
    headers: dict[str, Any]
    mature: datetime
    tries: int
    hops: int
    pushed_at: datetime
    lease: str = field(default="", repr=False)
    error: MessagesError | None = None
    is_settled: bool = field(default=False, repr=False, compare=False)

    @property
    def body(self) -> Any:
        """The body as it was pushed; raises where its text is not of its encoding."""
        if self.error is not None:
            raise self.error
        return self.content


def element_of(queue: str, row: tuple[Any, ...]) -> Element:
    """Make an element of a row of ``queue_calls.COLUMNS``."""
    id_, body, enc, headers, mature, tries, hops, pushed_at, lease = row
    # Most have none.
    parsed = json.loads(headers) if headers != "{}" else {}
    element = Element(id_, queue, None, parsed, mature, tries, hops, pushed_at, lease or "")
    try:
        element.content = wire.decode(body, enc)
    except MalformedPayload as malformed:
        element.error = MessagesError(f"element {id_} of {queue} is malformed: {malformed}")
    return element


def leases_of(elements: Iterable[Element | str]) -> list[str]:
    """List the leases; raise ValueError for what was popped, and so has none."""
    leases = []
    for element in elements:
        if not isinstance(element, str | Element):
            raise TypeError(f"a lease is an Element or a str, not {type(element).__name__}")
        lease = element.lease if isinstance(element, Element) else element
        if not lease:
            raise ValueError("there is no lease: what was popped is removed already")
        leases.append(lease)
    return leases


def settle(elements: Iterable[Element | str], answer: Settled) -> Settled:
    """Note that the leases of these are used up, and pass on the answer that says so."""
    for element in elements:
        if isinstance(element, Element):
            element.is_settled = True
    return answer
