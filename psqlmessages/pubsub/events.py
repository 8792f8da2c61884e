"""Events: what a bus hands to its handlers, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A message: the process id of the backend that sent it, its channel, what was published.

    ``payload`` is None for a signal, else str or what JSON can hold.
    """

    process_id: int
    channel: str
    payload: Any


Handler = Callable[[Event], Any]


@dataclass(slots=True)
class Counters:
    """What a bus has seen since it was made; read without a query.

    ``received`` counts notifications, of which a long message has several; ``delivered`` and
    ``skipped`` (by ``skip_self``) count messages, ``unfinished`` those dropped before their last
    segment came, ``malformed`` what is not of the format.
    """

    published: int = 0
    received: int = 0
    delivered: int = 0
    skipped: int = 0
    unfinished: int = 0
    malformed: int = 0
    handler_failures: int = 0
    lost_connections: int = 0
    reconnects: int = 0
