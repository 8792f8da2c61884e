"""Reading: the bytes of one peer, taken in by pieces, and for a share of the loop's time only.

docs/adr/0029-a-peer-has-a-share-of-the-loop.md says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, thread_time
from typing import Any, ClassVar, Final

# Full of empty frames a piece takes some 5 ms; then it is the others' turn.
PIECE_BYTES: Final = 4 * 1024
TURN_SECONDS: Final = 0.002
# What each peer gets of the loop's time: fifty usual frames a second take about that.
LEAST: Final = 0.005
# What all those together get who ask for more than that.
SHARE: Final = 0.1
BURST_SECONDS: Final = 0.05
TOO_LONG: Final = 1009


class Share:
    """A token bucket of seconds: who has taken too many rests until what is owed is earned.

    Otherwise each earns little: some who take a tenth each would have the whole loop.
    """

    _resting: ClassVar[int] = 0

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._left = BURST_SECONDS
        self._at = clock()
        self.is_resting = False

    def took(self, seconds: float) -> float:
        """Note what was taken; return for how long to rest: the longer, the more others rest."""
        now = self._clock()
        earned = (now - self._at) * LEAST
        self._left, self._at = min(BURST_SECONDS, self._left + earned) - seconds, now
        if self._left >= 0:
            return 0.0
        return -self._left / SHARE * (1 + Share._resting)

    def rest(self, *, is_resting: bool) -> None:
        """Begin to rest, or end it; then what was owed is paid, and nothing else is earned."""
        Share._resting += is_resting - self.is_resting
        if self.is_resting and not is_resting:
            self._left, self._at = max(0.0, self._left), self._clock()
        self.is_resting = is_resting


class Reading:
    """What a connection of Daphne's hands to its WebSocket; ``told`` is called where that rests."""

    def __init__(self, protocol: Any, limit: int, told: Callable[[], None]) -> None:
        self._protocol = protocol
        self._limit = limit
        self._told = told
        self._taken_in: Callable[[bytes], None] = protocol.dataReceived
        self._waiting = b""
        self._share = Share()
        protocol.dataReceived = self._came

    @property
    def is_resting(self) -> bool:
        """Whether the peer is not to be read now."""
        return self._share.is_resting

    def _came(self, data: bytes) -> None:
        self._waiting += data
        if not self.is_resting:
            self._take_in()

    def _take_in(self) -> None:
        taken = 0.0
        while self._waiting and taken < TURN_SECONDS:
            piece, self._waiting = self._waiting[:PIECE_BYTES], self._waiting[PIECE_BYTES:]
            # The time of this thread, not of the clock: on a busy machine others had the rest.
            began = thread_time()
            self._taken_in(piece)
            taken += thread_time() - began
            self._bound_parts()
        seconds = self._share.took(taken)
        if seconds or self._waiting:
            self._share.rest(is_resting=True)
            self._told()
            asyncio.get_running_loop().call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._share.rest(is_resting=False)
        self._take_in()
        if not self.is_resting:
            self._told()

    def _bound_parts(self) -> None:
        """Close where a message has more parts than it may have bytes: most of them are empty."""
        protocol = self._protocol
        parts = getattr(protocol, "message_data", None)
        if parts and len(parts) > self._limit and protocol.state == protocol.STATE_OPEN:
            reason = f"received a WebSocket message in more than {self._limit} parts"
            protocol.sendCloseFrame(code=TOO_LONG, reasonUtf8=reason.encode())
