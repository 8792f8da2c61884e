"""Routing: the copies of an element that an exchange pushes; and dry runs.

Pure, except that a dry run reads the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, Final

from psqlmessages.exchanges.compiler import MAX_CACHED_HEADERS, DecisionCache
from psqlmessages.exchanges.model import (
    FALLBACK_QUEUES,
    HOP_HEADER,
    UNCHANGED,
    CompiledDestination,
    CompiledExchange,
    Delivery,
    Outcome,
    QueueRef,
    RoutingResult,
    SelectorFailed,
    SelectorInput,
    Verdict,
)
from psqlmessages.exchanges.result import SelectorResult
from psqlmessages.exchanges.selectors import ActivationCache, SelectorContext

MAX_HOP_COUNT: Final = 999_999_999
_DIGITS: Final = frozenset("0123456789")


def route(
    exchange: CompiledExchange, message: SelectorInput, *, now: datetime | None = None
) -> RoutingResult:
    """Route an element: decide which destinations get a copy, and the content of each copy.

    ``message`` has the values of the element. This function sets its hop count, and selectors may
    replace its headers and body. To preserve ``message``, pass a shallow copy. Without ``now``, an
    expression that reads the time fails. Raise ValueError if ``now`` has no time zone.
    """
    if now is not None and now.tzinfo is None:
        raise ValueError("now needs a time zone")
    message.hops = read_hop_count(message.headers)
    if message.hops >= exchange.max_hops:
        return RoutingResult("too_many_hops")
    message.hops += 1
    message.headers = {**message.headers, HOP_HEADER: message.hops}
    activations = ActivationCache(SelectorContext(message, {}, now), exchange.shared_fields)
    traversal = _Traversal(message, activations)
    verdicts = tuple(traversal.visit(*each) for each in enumerate(exchange.destinations))
    deliveries = tuple(traversal.deliveries)
    if deliveries:
        return RoutingResult("ok", deliveries, verdicts)
    # The failed selector might have accepted the element, so do not discard the element.
    has_failed = any(verdict.error for verdict in verdicts)
    return RoutingResult("no_route" if has_failed else exchange.outcome_without_route, (), verdicts)


def read_hop_count(headers: Mapping[str, Any]) -> int:
    """Return the header x-hop-count, at most MAX_HOP_COUNT; 0 unless it is an integer or digits."""
    value = headers.get(HOP_HEADER)
    if type(value) is str and value and _DIGITS.issuperset(value):
        return int(value) if len(value) <= len(str(MAX_HOP_COUNT)) else MAX_HOP_COUNT
    if type(value) is int and value > 0:
        return min(value, MAX_HOP_COUNT)
    return 0


class _Traversal:
    """Visits the destinations for one element in order, and collects the copies to push."""

    def __init__(self, message: SelectorInput, activations: ActivationCache) -> None:
        self.deliveries: list[Delivery] = []
        self._message = message
        self._activations = activations
        # Headers and body of the next copies, if a selector has changed them.
        self._headers: dict[str, Any] | None = None
        self._body: Any = UNCHANGED

    def visit(self, index: int, destination: CompiledDestination) -> Verdict:
        """Evaluate a destination's selector and apply its changes; add a copy if it accepts."""
        if destination.selector is None:
            self.deliveries.append(Delivery(index, self._headers, self._body))
            return Verdict(index, is_accepted=True, why="always")
        started = perf_counter()
        try:
            result = destination.selector.evaluate(self._activations)
        except SelectorFailed as error:
            seconds = perf_counter() - started
            return Verdict(index, False, why=error.text, seconds=seconds, error=error.text)
        self._apply_changes(result)
        if result.is_accepted:
            options = (result.delay, result.mature, result.tries)
            self.deliveries.append(Delivery(index, self._headers, self._body, *options))
        return Verdict(index, result.is_accepted, result.why, perf_counter() - started)

    def _apply_changes(self, result: SelectorResult) -> None:
        message, context = self._message, self._activations.context
        if result.headers is not None:
            # A selector cannot set the hop count: otherwise a cycle could run forever.
            previous = {} if result.is_replacement else message.headers
            hops = {HOP_HEADER: message.hops}
            self._headers = message.headers = {**previous, **result.headers, **hops}
            self._activations.clear()
        if result.body is not UNCHANGED:
            self._body = message.body = result.body
            self._activations.clear()
        if result.state is not None:
            previous = {} if result.is_replacement else context.state
            context.state = {**previous, **result.state}
            self._activations.clear()


Deliveries = tuple[Delivery, ...]


class RouteCache:
    """Caches the deliveries of an exchange. The key is the few headers that its selectors read.

    Without this cache, selectors would take half of the time that Python spends on an element.
    """

    def __init__(self, headers: tuple[str, ...], max_hops: int) -> None:
        self._cache: DecisionCache[Deliveries] = DecisionCache(headers)
        self._max_hops = max_hops

    @classmethod
    def of(cls, exchange: CompiledExchange) -> RouteCache | None:
        """Return a cache if all selectors return a bool and read few headers; otherwise None."""
        names: dict[str, None] = {}
        for selector in exchange.selectors:
            if selector.cacheable_headers is None:
                return None
            names.update(dict.fromkeys(selector.cacheable_headers))
        # A hop count is usually an integer, and keys consist of texts.
        if len(names) > MAX_CACHED_HEADERS or HOP_HEADER in names:
            return None
        return cls(tuple(names), exchange.max_hops)

    def get(self, headers: Mapping[str, Any]) -> Deliveries | None:
        """Return the cached deliveries; None if none are cached, or if there are too many hops."""
        key = self._cache.key_of(headers)
        if key is None or read_hop_count(headers) >= self._max_hops:
            return None
        return self._cache.get(key)

    def put(self, headers: Mapping[str, Any], routed: RoutingResult) -> None:
        """Cache the deliveries, but not after a failed selector, because each failure is logged."""
        key = self._cache.key_of(headers)
        is_routed = routed.outcome != "too_many_hops"
        if key is not None and is_routed and not any(verdict.error for verdict in routed.verdicts):
            self._cache.put(key, routed.deliveries)


# Dry run: the copies that an element would produce, and why.

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
