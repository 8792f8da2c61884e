"""Exchanges: selectors and the pure routing function. Only the package ``store`` uses Django."""

from psqlmessages.exchanges.model import (
    UNCHANGED,
    CompiledDestination,
    CompiledExchange,
    Delivery,
    QueueRef,
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
    "UNCHANGED",
    "CompiledDestination",
    "CompiledExchange",
    "Delivery",
    "QueueRef",
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
