"""Departures: what was put into the outboxes of one event loop in a moment leaves together."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Final, Protocol
from weakref import WeakKeyDictionary

# What else runs in this loop waits so long at most.
_SLICE_SECONDS: Final = 0.01


class Departing(Protocol):
    """An outbox."""

    def depart(self) -> None:
        """Send what waits, as far as that is possible at once; raises nothing."""


class Departures:
    """The outboxes of one event loop in which something waits.

    No task is woken for each of them, and several frames to one reader are one write.
    """

    def __init__(self) -> None:
        self._waiting: deque[Departing] = deque()

    def add(self, outbox: Departing) -> None:
        """Let an outbox depart once this moment's messages have been put in."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._depart)
        self._waiting.append(outbox)

    def _depart(self) -> None:
        begun = monotonic()
        while self._waiting:
            if monotonic() - begun > _SLICE_SECONDS:
                asyncio.get_running_loop().call_soon(self._depart)
                return
            self._waiting.popleft().depart()


_departures: WeakKeyDictionary[asyncio.AbstractEventLoop, Departures] = WeakKeyDictionary()


def get_departures() -> Departures:
    """Return the departures of the running event loop."""
    return _departures.setdefault(asyncio.get_running_loop(), Departures())
