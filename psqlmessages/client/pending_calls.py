"""RPC calls that wait for their answer. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psqlmessages.exceptions import CalleeGone, ConnectionLost, MessagesError

if TYPE_CHECKING:
    from psqlmessages.client.node_state import Notification


@dataclass(slots=True)
class PendingCall:
    """A call that waits for its answers: notifications, or the error that ends the wait."""

    token: str
    callee: str
    on_answer: Callable[[], None]
    answers: deque[Notification | MessagesError] = field(default_factory=deque)
    _is_put: bool = False
    _end: MessagesError | None = None

    def add(self, answer: Notification | MessagesError) -> None:
        """Add an answer and wake the caller."""
        self.answers.append(answer)
        self.on_answer()

    def on_event(self, event: str) -> None:
        """Record an event of the callee.

        Events that are read before the call is sent may be old, so only the last one counts.
        """
        if event == "connect" and isinstance(self._end, CalleeGone):
            self._end = None
        elif event in ("crash", "disconnect"):
            self._ended(CalleeGone(f"{self.callee} has gone before it answered ({event})"))

    def on_connection_lost(self, error: ConnectionLost) -> None:
        """Record the loss of the connection; a call not yet sent uses the next connection."""
        self._ended(error)

    def connected(self) -> None:
        """Record a new connection; for a call not yet sent, earlier events do not matter."""
        if not self._is_put:
            self._end = None

    def was_put(self) -> None:
        """Record that the call was sent; from now on, events of the callee end the wait."""
        self._is_put = True
        if self._end is not None:
            self.add(self._end)

    def _ended(self, error: MessagesError) -> None:
        self._end = error
        # Set the error first: another thread may send the call at this moment.
        if self._is_put:
            self.add(error)
