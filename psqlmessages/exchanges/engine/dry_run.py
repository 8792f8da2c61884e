"""Dry run: the copies that an element would produce, and why. Pushes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from psqlmessages.exchanges.model import (
    FALLBACK_QUEUES,
    HOP_HEADER,
    UNCHANGED,
    CompiledExchange,
    Outcome,
    QueueRef,
    SelectorInput,
    Verdict,
)
from psqlmessages.exchanges.routing import read_hop_count, route

NAME_HEADER: Final = "x-exchange-name"


@dataclass(frozen=True)
class DryRunCopy:
    """A copy that would be pushed.

    It becomes available after ``delay`` seconds. ``mature``, in seconds since 1970, overrides that.
    """

    queue: QueueRef
    headers: dict[str, Any]
    body: Any
    delay: float | None = None
    mature: float | None = None
    tries: int = 0


@dataclass(frozen=True)
class DryRunDestination:
    """A destination: the verdict of its selector, and the copy that it would get, or None."""

    queue: QueueRef
    verdict: Verdict
    copy: DryRunCopy | None


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run; ``fallback`` is the copy that a fallback queue would get, or None."""

    outcome: Outcome
    destinations: tuple[DryRunDestination, ...]
    fallback: DryRunCopy | None


def dry_run_exchange(exchange: CompiledExchange, message: SelectorInput) -> DryRun:
    """Route an element without pushing copies. Also calls selectors that are Python functions."""
    routed = route(exchange, replace(message), now=datetime.now(UTC))
    headers = {**message.headers, HOP_HEADER: read_hop_count(message.headers) + 1}
    copies = {
        delivery.destination: DryRunCopy(
            exchange.destinations[delivery.destination].queue,
            headers if delivery.headers is None else delivery.headers,
            message.body if delivery.body is UNCHANGED else delivery.body,
            delivery.delay,
            delivery.mature,
            delivery.tries,
        )
        for delivery in routed.deliveries
    }
    destinations = tuple(
        DryRunDestination(exchange.destinations[index].queue, verdict, copies.get(index))
        for index, verdict in enumerate(routed.verdicts)
    )
    fallback = None
    if routed.outcome in FALLBACK_QUEUES:
        if routed.outcome == "too_many_hops":
            # Such an element is not routed, so its hop count stays.
            headers = message.headers
        queue = QueueRef(exchange.source.namespace, FALLBACK_QUEUES[routed.outcome])
        fallback = DryRunCopy(queue, {**headers, NAME_HEADER: exchange.name}, message.body)
    return DryRun(routed.outcome, destinations, fallback)
