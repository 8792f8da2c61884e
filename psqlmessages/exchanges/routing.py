"""route(): from a message and an exchange to the copies to push. Pure."""

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
    """Decide which targets take a message, and as what.

    The message goes along: its hop is raised, and it holds at the end what the selectors made of
    it; whoever needs it as it was takes a copy. ``now`` has a time zone; without it an expression
    that asks for it fails. The headers and the body that it held are not changed in place.
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
    """Tell whether any selector looks at the body or may change it by what it was."""
    return any(selector.needs_body for selector in exchange.selectors)


def hop_count(headers: Mapping[str, Any]) -> int:
    """Read the header x-hop-count: what is no integer counts as 0, the text "3" as 3."""
    value = headers.get(HOP_HEADER)
    if type(value) is str and value and _DIGITS.issuperset(value):
        return int(value) if len(value) <= len(str(MOST_HOPS)) else MOST_HOPS
    if type(value) is int and value > 0:
        return min(value, MOST_HOPS)
    return 0


class _Traversal:
    """A message on its way through the targets."""

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
            seconds = perf_counter() - started
            return Verdict(
                index, is_taken=False, why=failure.text, seconds=seconds, error=failure.text
            )
        self._change(answer)
        if answer.is_taken:
            self._deliver(index, answer)
        return Verdict(index, answer.is_taken, answer.why, perf_counter() - started)

    def _change(self, answer: SelectorResult) -> None:
        message = self._message
        if answer.headers is not None:
            # A selector cannot set the hop: circles would never end.
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


# Shortcuts: what became of a message becomes of all whose headers have the same values.

Deliveries = tuple[CopyToPush, ...]


class RouteCache:
    """Remembers the deliveries of an exchange by the few headers that its selectors look at.

    Asking selectors, quick as they are, takes as long as all else that Python does for a message.
    """

    def __init__(self, names: tuple[str, ...], max_hops: int) -> None:
        self._memory: DecisionCache[Deliveries] = DecisionCache(names)
        self._max_hops = max_hops

    @classmethod
    def of(cls, exchange: CompiledExchange) -> RouteCache | None:
        """Make one; None where a selector looks at more, or may answer more than yes and no."""
        names: dict[str, None] = {}
        for selector in exchange.selectors:
            if (seen := selector.headers_seen) is None:
                return None
            names.update(dict.fromkeys(seen))
        # The hop count is another one at every exchange.
        if len(names) > MAX_NAMES or HOP_HEADER in names:
            return None
        return cls(tuple(names), exchange.max_hops)

    def deliveries(self, headers: Mapping[str, Any]) -> Deliveries | None:
        """Return what `route` would; None where nobody knows, or there are too many hops."""
        key = self._memory.key(headers)
        if key is None or hop_count(headers) >= self._max_hops:
            return None
        return self._memory.answer(key)

    def keep(self, headers: Mapping[str, Any], routed: RoutingResult) -> None:
        """Remember what came of a message, unless a selector failed: that is to be told again."""
        key = self._memory.key(headers)
        if key is None or routed.outcome == "too_many_hops":
            return
        if not any(verdict.error for verdict in routed.verdicts):
            self._memory.keep(key, routed.deliveries)
