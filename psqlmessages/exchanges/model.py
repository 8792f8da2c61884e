"""Data model of routing: messages, exchanges, results, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final, Literal

from psqlmessages.exceptions import InvalidArgument, MessagesError

if TYPE_CHECKING:
    from psqlmessages.exchanges.compiler import VisibleFields
    from psqlmessages.exchanges.selectors import Selector


HOP_HEADER: Final = "x-hop-count"
DEFAULT_MAX_HOPS: Final = 17

Outcome = Literal["ok", "no_route", "too_many_hops"]


class Unchanged(Enum):
    """The type of UNCHANGED, which JSON cannot hold."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(frozen=True)
class QueueRef:
    """A queue: its namespace (an alias of Django's DATABASES) and its name."""

    namespace: str
    queue: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.queue}"


@dataclass(frozen=True)
class RouteTarget:
    """A destination queue and its selector. Without a selector (None) it takes every message."""

    place: QueueRef
    selector: Selector | None = None


@dataclass(frozen=True)
class CompiledExchange:
    """An exchange whose selectors are compiled."""

    name: str
    source: QueueRef
    targets: tuple[RouteTarget, ...]
    parallel: int = 1
    wsize: int = 100
    reserve: bool = True
    max_hops: int = DEFAULT_MAX_HOPS

    @cached_property
    def selectors(self) -> tuple[Selector, ...]:
        """The different selectors of the targets, in order."""
        asked = (target.selector for target in self.targets)
        return tuple(dict.fromkeys(selector for selector in asked if selector is not None))

    @cached_property
    def shared_window(self) -> VisibleFields | None:
        """The fields that all expressions see together; None if there are fewer than two."""
        windows = [selector.window for selector in self.selectors if selector.window is not None]
        return reduce(or_, windows) if len(windows) > 1 else None


@dataclass
class SelectorInput:
    """Input of selectors: one element.

    ``body`` is str, bytes or a JSON value. ``tries`` and ``hops`` are the counts so far. ``ns`` is
    the namespace of ``queue``. Selectors in code change ``headers`` and ``body`` in place.
    """

    body: Any = None
    headers: dict[str, Any] = field(default_factory=dict)
    id: int = 0
    tries: int = 0
    hops: int = 0
    queue: str = ""
    ns: str = "default"


@dataclass(frozen=True)
class CopyToPush:
    """A copy for one target (its index), as differences from the element.

    ``headers`` is None if no selector changed them: the copy then has the headers of the element,
    with the hop count incremented. Otherwise it holds all headers. ``delay`` is in seconds.
    ``mature`` is in seconds since 1970 and overrides ``delay``.
    """

    target: int
    headers: dict[str, Any] | None = None
    body: Any = UNCHANGED
    delay: float | None = None
    mature: float | None = None
    tries: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the copy has no differences from the element."""
        return (
            self.headers is None
            and self.body is UNCHANGED
            and self.delay is None
            and self.mature is None
            and self.tries == 0
        )


@dataclass(frozen=True)
class Verdict:
    """Decision of one target: the result and time of its selector, or its ``error``."""

    target: int
    is_taken: bool
    why: str
    seconds: float = field(default=0.0, compare=False)
    error: str | None = None


@dataclass(frozen=True)
class RoutingResult:
    """Result of routing: an outcome, the copies in order, and a verdict per target."""

    outcome: Outcome
    deliveries: tuple[CopyToPush, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


# Errors of selectors, at compile time and at run time.


class SelectorError(InvalidArgument):
    """The expression cannot be compiled, or could exceed its cost bounds. Nothing is stored."""


class SelectorsUnavailable(MessagesError):
    """The package that compiles expressions is not installed."""

    hint = "pip install 'psqlmessages[exchanges]'"


class SelectorFailed(MessagesError):
    """The evaluation failed. It counts as no, and the other destinations are still evaluated."""
