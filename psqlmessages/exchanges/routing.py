"""Routing: the copies to push for a message and an exchange. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from time import perf_counter
from typing import Any, Final

from psqlmessages.exchanges.compiler import MAX_NAMES, DecisionCache
from psqlmessages.exchanges.model import (
    HOP_HEADER,
    UNCHANGED,
    CompiledExchange,
    CopyToPush,
    RouteTarget,
    RoutingResult,
    SelectorFailed,
    SelectorInput,
    Verdict,
)
from psqlmessages.exchanges.result import SelectorResult
from psqlmessages.exchanges.selectors import ActivationCache, SelectorContext

MOST_HOPS: Final = 999_999_999
_DIGITS: Final = frozenset("0123456789")


def route(
    exchange: CompiledExchange, message: SelectorInput, *, now: datetime | None = None
) -> RoutingResult:
    """Route a message: decide which targets get a copy, and the content of each copy.

    ``message`` is changed: its hop count is incremented, and selectors may replace its headers and
    body. The original header and body objects are not changed, so a shallow copy of ``message``
    preserves them. ``now`` needs a time zone. Without ``now``, an expression that uses it fails.
    """
    if now is not None and now.tzinfo is None:
        raise ValueError("now needs a time zone")
    message.hops = hop_count(message.headers)
    if message.hops >= exchange.max_hops:
        return RoutingResult("too_many_hops")
    message.hops += 1
    message.headers = {**message.headers, HOP_HEADER: message.hops}
    traversal = _Traversal(
        message, ActivationCache(SelectorContext(message, {}, now), exchange.shared_window)
    )
    verdicts = tuple(traversal.ask(index, target) for index, target in enumerate(exchange.targets))
    deliveries = tuple(traversal.deliveries)
    return RoutingResult("ok" if deliveries else "no_route", deliveries, verdicts)


def needs_body(exchange: CompiledExchange) -> bool:
    """Tell whether any selector may read the body."""
    return any(selector.needs_body for selector in exchange.selectors)


def hop_count(headers: Mapping[str, Any]) -> int:
    """Read the header x-hop-count: an integer, or digits such as "3"; anything else counts as 0."""
    value = headers.get(HOP_HEADER)
    if type(value) is str and value and _DIGITS.issuperset(value):
        return int(value) if len(value) <= len(str(MOST_HOPS)) else MOST_HOPS
    if type(value) is int and value > 0:
        return min(value, MOST_HOPS)
    return 0


class _Traversal:
    """One message on its way through the targets."""

    def __init__(self, message: SelectorInput, view: ActivationCache) -> None:
        self.deliveries: list[CopyToPush] = []
        self._message = message
        self._view = view
        self._headers: dict[str, Any] | None = None
        self._body: Any = UNCHANGED

    def ask(self, index: int, target: RouteTarget) -> Verdict:
        if target.selector is None:
            self._deliver(index, None)
            return Verdict(index, is_taken=True, why="always")
        started = perf_counter()
        try:
            answer = target.selector.answer(self._view)
        except SelectorFailed as failure:
            why = failure.text
            return Verdict(
                index, is_taken=False, why=why, seconds=perf_counter() - started, error=why
            )
        self._change(answer)
        if answer.is_taken:
            self._deliver(index, answer)
        return Verdict(index, answer.is_taken, answer.why, perf_counter() - started)

    def _change(self, answer: SelectorResult) -> None:
        message = self._message
        if answer.headers is not None:
            # A selector cannot set the hop count: otherwise a cycle could run forever.
            kept = {} if answer.is_whole else message.headers
            hop = {HOP_HEADER: message.hops}
            self._headers = message.headers = {**kept, **answer.headers, **hop}
            self._view.forget()
        if answer.body is not UNCHANGED:
            self._body = message.body = answer.body
            self._view.forget()
        if answer.state is not None:
            kept = {} if answer.is_whole else self._view.env.state
            self._view.env.state = {**kept, **answer.state}
            self._view.forget()

    def _deliver(self, index: int, answer: SelectorResult | None) -> None:
        push = (answer.delay, answer.mature, answer.tries) if answer else (None, None, 0)
        self.deliveries.append(CopyToPush(index, self._headers, self._body, *push))


# Route cache: messages with equal header values get the same deliveries.

Deliveries = tuple[CopyToPush, ...]


class RouteCache:
    """Caches the deliveries of an exchange by the few headers that its selectors read.

    Evaluating the selectors takes as long as everything else that Python does for a message.
    """

    def __init__(self, names: tuple[str, ...], max_hops: int) -> None:
        self._memory: DecisionCache[Deliveries] = DecisionCache(names)
        self._max_hops = max_hops

    @classmethod
    def of(cls, exchange: CompiledExchange) -> RouteCache | None:
        """Return a cache; None if a selector reads more than a few headers or returns a map."""
        names: dict[str, None] = {}
        for selector in exchange.selectors:
            if (seen := selector.headers_seen) is None:
                return None
            names.update(dict.fromkeys(seen))
        # The hop count differs at every exchange.
        if len(names) > MAX_NAMES or HOP_HEADER in names:
            return None
        return cls(tuple(names), exchange.max_hops)

    def deliveries(self, headers: Mapping[str, Any]) -> Deliveries | None:
        """Return the cached deliveries; None if there are none, or if there are too many hops."""
        key = self._memory.key(headers)
        if key is None or hop_count(headers) >= self._max_hops:
            return None
        return self._memory.answer(key)

    def keep(self, headers: Mapping[str, Any], routed: RoutingResult) -> None:
        """Store the deliveries, unless a selector failed: every failure must be reported."""
        key = self._memory.key(headers)
        if key is None or routed.outcome == "too_many_hops":
            return
        if not any(verdict.error for verdict in routed.verdicts):
            self._memory.keep(key, routed.deliveries)
