"""Exchanges: selectors and the pure routing function. Does not use Django."""

from psqlmessages.exchanges.model import (
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
from psqlmessages.exchanges.routing import route
from psqlmessages.exchanges.selectors import Selector, SelectorContext, selector

__all__ = [
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
    "route",
    "selector",
]
