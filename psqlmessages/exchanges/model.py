"""Data model of routing: selector inputs, exchanges, results, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final, Literal

from psqlmessages.exceptions import InvalidArgument, MessagesError

if TYPE_CHECKING:
    from psqlmessages.exchanges.compiler import InputFields
    from psqlmessages.exchanges.selectors import Selector


HOP_HEADER: Final = "x-hop-count"
# The queue that gets an element with this outcome. It is in the database of the source.
FALLBACK_QUEUES: Final = {"no_route": "__no_route__", "too_many_hops": "__too_many_hops__"}

Outcome = Literal["ok", "no_route", "discarded", "too_many_hops"]
# For an element that no destination accepts: move it to the queue __no_route__, or remove it.
NO_ROUTE_ACTIONS: Final = ("queue", "discard")


class Unchanged(Enum):
    """Type of UNCHANGED, which differs from every JSON value."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(frozen=True, order=True)
class QueueRef:
    """A queue: its namespace (an alias of Django's DATABASES) and its name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def ident_of(exchange: str) -> str:
    """Return the node name of an exchange."""
    return f"exchange.{exchange}"


@dataclass(frozen=True)
class CompiledDestination:
    """A destination queue and its selector. Without a selector, it gets a copy of every element."""

    queue: QueueRef
    selector: Selector | None = None


@dataclass(frozen=True)
class CompiledExchange:
    """An exchange whose selectors are compiled.

    Each process runs ``parallel`` consumers, which together take at most ``wsize`` elements at a
    time. If ``reserve`` is true, an element stays in its source until other databases have their
    copies. An element that has passed ``max_hops`` exchanges goes to the queue
    ``__too_many_hops__``. ``no_route`` is one of NO_ROUTE_ACTIONS.
    """

    name: str
    source: QueueRef
    destinations: tuple[CompiledDestination, ...]
    parallel: int = 1
    wsize: int = 100
    reserve: bool = True
    max_hops: int = 17
    no_route: str = "queue"

    @cached_property
    def selectors(self) -> tuple[Selector, ...]:
        """The selectors of the destinations, in order and without duplicates."""
        selectors = dict.fromkeys(destination.selector for destination in self.destinations)
        return tuple(selector for selector in selectors if selector is not None)

    @property
    def outcome_without_route(self) -> Outcome:
        """The outcome of an element that no destination accepts, if no selector failed."""
        return "discarded" if self.no_route == "discard" else "no_route"

    @cached_property
    def shared_fields(self) -> InputFields | None:
        """All fields that the expressions read; None if there are fewer than two expressions."""
        fields = [selector.fields for selector in self.selectors if selector.fields is not None]
        return reduce(or_, fields) if len(fields) > 1 else None


@dataclass
class SelectorInput:
    """The message (``msg``) that selectors read and may change: the values of one element.

    ``body`` is str, bytes or a JSON value. ``ns`` is the namespace of ``queue``.
    """

    body: Any = None
    headers: dict[str, Any] = field(default_factory=dict)
    id: int = 0
    tries: int = 0
    hops: int = 0
    queue: str = ""
    ns: str = "default"


@dataclass(frozen=True)
class Delivery:
    """A copy of an element for the destination with this index. Only changed values are set.

    ``headers`` holds all headers if a selector changed any. If it is None, the copy has the headers
    of the element, with the hop count incremented. The copy becomes available after ``delay``
    seconds. ``mature``, in seconds since 1970, overrides ``delay``.
    """

    destination: int
    headers: dict[str, Any] | None = None
    body: Any = UNCHANGED
    delay: float | None = None
    mature: float | None = None
    tries: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the copy differs from a new element only in the hop count."""
        options = (self.headers, self.delay, self.mature, self.tries)
        return self.body is UNCHANGED and options == (None, None, None, 0)


@dataclass(frozen=True)
class Verdict:
    """Decision for the destination with this index: whether its selector accepts, and why.

    Without a selector, ``is_accepted`` is true. ``error`` is set if the selector failed.
    ``seconds`` is the time that the selector took.
    """

    destination: int
    is_accepted: bool
    why: str
    seconds: float = field(default=0.0, compare=False)
    error: str | None = None


@dataclass(frozen=True)
class RoutingResult:
    """Copies to push, and the verdicts of all destinations in order (none after too many hops)."""

    outcome: Outcome
    deliveries: tuple[Delivery, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


class SelectorError(InvalidArgument):
    """The expression is invalid or too expensive, or no function has the name after ``@``."""


class SelectorsUnavailable(MessagesError):
    """The package that compiles expressions cannot be imported."""

    hint = "pip install 'psqlmessages[exchanges]'"


class SelectorFailed(MessagesError):
    """A selector failed for an element, so the selector's destination gets no copy."""
