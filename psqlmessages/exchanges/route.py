"""Route: from a message and an exchange to the copies to push. Pure: no I/O, no clock but now."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from time import perf_counter
from typing import Any, Final

from psqlmessages.exchanges.answers import Answer
from psqlmessages.exchanges.environment import Env, View
from psqlmessages.exchanges.errors import SelectorFailed
from psqlmessages.exchanges.messages import (
    HOP_HEADER,
    UNCHANGED,
    Delivery,
    Graphed,
    Message,
    Routed,
    Target,
    Verdict,
)

MOST_HOPS: Final = 999_999_999
_DIGITS: Final = frozenset("0123456789")


def route(exchange: Graphed, message: Message, *, now: datetime | None = None) -> Routed:
    """Decide which targets take a message, and as what.

    The message goes along: its hop is raised, and it holds at the end what the selectors made of
    it; whoever needs it as it was takes a copy. ``now`` has a time zone; without it an expression
    that asks for it fails. The headers and the body that it held are not changed in place.
    """
    if now is not None and now.tzinfo is None:
        raise ValueError("now needs a time zone")
    message.hops = hop_count(message.headers)
    if message.hops >= exchange.max_hops:
        return Routed("too_many_hops")
    message.hops += 1
    message.headers = {**message.headers, HOP_HEADER: message.hops}
    traversal = _Traversal(message, View(Env(message, {}, now), exchange.shared_window))
    verdicts = tuple(traversal.ask(index, target) for index, target in enumerate(exchange.targets))
    deliveries = tuple(traversal.deliveries)
    return Routed("ok" if deliveries else "no_route", deliveries, verdicts)


def needs_body(exchange: Graphed) -> bool:
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

    def __init__(self, message: Message, view: View) -> None:
        self.deliveries: list[Delivery] = []
        self._message = message
        self._view = view
        self._headers: dict[str, Any] | None = None
        self._body: Any = UNCHANGED

    def ask(self, index: int, target: Target) -> Verdict:
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

    def _change(self, answer: Answer) -> None:
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

    def _deliver(self, index: int, answer: Answer | None) -> None:
        push = (answer.delay, answer.mature, answer.tries) if answer else (None, None, 0)
        self.deliveries.append(Delivery(index, self._headers, self._body, *push))
