"""Shortcuts: what became of a message becomes of all whose headers have the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psqlmessages.exchanges.memory import MAX_NAMES, Memory
from psqlmessages.exchanges.messages import HOP_HEADER, Delivery, Graphed, Routed
from psqlmessages.exchanges.route import hop_count

Deliveries = tuple[Delivery, ...]


class Shortcut:
    """Remembers the deliveries of an exchange by the few headers that its selectors look at.

    Asking selectors, quick as they are, takes as long as all else that Python does for a message.
    """

    def __init__(self, names: tuple[str, ...], max_hops: int) -> None:
        self._memory: Memory[Deliveries] = Memory(names)
        self._max_hops = max_hops

    @classmethod
    def of(cls, exchange: Graphed) -> Shortcut | None:
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

    def keep(self, headers: Mapping[str, Any], routed: Routed) -> None:
        """Remember what came of a message, unless a selector failed: that is to be told again."""
        key = self._memory.key(headers)
        if key is None or routed.outcome == "too_many_hops":
            return
        if not any(verdict.error for verdict in routed.verdicts):
            self._memory.keep(key, routed.deliveries)
