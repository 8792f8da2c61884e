"""Exchanges: selectors, and the pure function that routes a message by them. No Django here."""

from psqlmessages.exchanges.environment import Env
from psqlmessages.exchanges.errors import SelectorError, SelectorFailed, SelectorsUnavailable
from psqlmessages.exchanges.messages import (
    DEFAULT_MAX_HOPS,
    HOP_HEADER,
    UNCHANGED,
    Delivery,
    Graphed,
    Message,
    Outcome,
    Place,
    Routed,
    Target,
    Verdict,
)
from psqlmessages.exchanges.route import hop_count, needs_body, route
from psqlmessages.exchanges.selector import Selector, selector

__all__ = [
    "DEFAULT_MAX_HOPS",
    "HOP_HEADER",
    "UNCHANGED",
    "Delivery",
    "Env",
    "Graphed",
    "Message",
    "Outcome",
    "Place",
    "Routed",
    "Selector",
    "SelectorError",
    "SelectorFailed",
    "SelectorsUnavailable",
    "Target",
    "Verdict",
    "hop_count",
    "needs_body",
    "route",
    "selector",
]
