"""Exchanges: selectors and the pure routing function. Does not use Django."""

from psqlmessages.exchanges.model import (
    DEFAULT_MAX_HOPS,
    HOP_HEADER,
    UNCHANGED,
    CompiledExchange,
    CopyToPush,
    Outcome,
    QueueRef,
    RouteTarget,
    RoutingResult,
    SelectorError,
    SelectorFailed,
    SelectorInput,
    SelectorsUnavailable,
    Verdict,
)
from psqlmessages.exchanges.routing import hop_count, needs_body, route
from psqlmessages.exchanges.selectors import Selector, SelectorContext, selector

__all__ = [
    "DEFAULT_MAX_HOPS",
    "HOP_HEADER",
    "UNCHANGED",
    "CompiledExchange",
    "CopyToPush",
    "Outcome",
    "QueueRef",
    "RouteTarget",
    "RoutingResult",
    "Selector",
    "SelectorContext",
    "SelectorError",
    "SelectorFailed",
    "SelectorInput",
    "SelectorsUnavailable",
    "Verdict",
    "hop_count",
    "needs_body",
    "route",
    "selector",
]
