"""Dry run: the copies that a message would produce, and why. Pushes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from psqlmessages.exchanges.model import (
    HOP_HEADER,
    UNCHANGED,
    CompiledExchange,
    Outcome,
    QueueRef,
    SelectorInput,
    Verdict,
)
from psqlmessages.exchanges.routing import hop_count, route

NAME_HEADER: Final = "x-exchange-name"
STRAYS: Final = {"no_route": "__no_route__", "too_many_hops": "__too_many_hops__"}


@dataclass(frozen=True)
class DryRunCopy:
    """A copy that would be pushed. ``delay`` is in seconds, ``mature`` in seconds since 1970."""

    place: QueueRef
    headers: dict[str, Any]
    body: Any
    delay: float | None = None
    mature: float | None = None
    tries: int = 0


@dataclass(frozen=True)
class DryRunRequest:
    """A destination: the verdict of its selector, and the copy that it would get."""

    place: QueueRef
    verdict: Verdict
    copy: DryRunCopy | None


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run. ``stray`` is the copy of a message that no destination takes."""

    outcome: Outcome
    asked: tuple[DryRunRequest, ...]
    stray: DryRunCopy | None


def tried(
    exchange: CompiledExchange, message: SelectorInput, *, now: datetime | None = None
) -> DryRun:
    """Route a message without changing it. Selectors in code run with all their side effects.

    ``now`` is the time that selectors see (default: the present).
    """
    routed = route(exchange, replace(message), now=now or datetime.now(UTC))
    raised = {**message.headers, HOP_HEADER: hop_count(message.headers) + 1}
    copies = {
        delivery.target: DryRunCopy(
            exchange.targets[delivery.target].place,
            raised if delivery.headers is None else delivery.headers,
            message.body if delivery.body is UNCHANGED else delivery.body,
            delivery.delay,
            delivery.mature,
            delivery.tries,
        )
        for delivery in routed.deliveries
    }
    asked = tuple(
        DryRunRequest(exchange.targets[verdict.target].place, verdict, copies.get(verdict.target))
        for verdict in routed.verdicts
    )
    if routed.outcome not in STRAYS:
        return DryRun(routed.outcome, asked, None)
    headers = raised if routed.outcome == "no_route" else message.headers
    place = QueueRef(exchange.source.namespace, STRAYS[routed.outcome])
    stray = DryRunCopy(place, {**headers, NAME_HEADER: exchange.name}, message.body)
    return DryRun(routed.outcome, asked, stray)
