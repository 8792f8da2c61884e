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
    """A question that waits for its answers: arrivals, or the error that ends the wait."""

    token: str
    callee: str
    on_answer: Callable[[], None]
    answers: deque[Notification | MessagesError] = field(default_factory=deque)
    _is_put: bool = False
    _end: MessagesError | None = None

    def add(self, answer: Notification | MessagesError) -> None:
        """Hand an answer to whoever asked."""
        self.answers.append(answer)
        self.on_answer()

    def on_event(self, event: str) -> None:
        """Take note of what became of the callee.

        What is read until the question is put may have been told long before: the last word counts.
        """
        if event == "connect" and isinstance(self._end, CalleeGone):
            self._end = None
        elif event in ("crash", "disconnect"):
            self._ended(CalleeGone(f"{self.callee} has gone before it answered ({event})"))

    def on_connection_lost(self, error: ConnectionLost) -> None:
        """Take note that the connection is lost; a question not put yet goes over the next one."""
        self._ended(error)

    def connected(self) -> None:
        """Take note of a new connection: to a question not put yet nothing before it matters."""
        if not self._is_put:
            self._end = None

    def was_put(self) -> None:
        """Take note that the callee has the question; what it does from now on ends the wait."""
        self._is_put = True
        if self._end is not None:
            self.add(self._end)

    def _ended(self, error: MessagesError) -> None:
        self._end = error
        # Noted first: another thread may put the question in this moment.
        if self._is_put:
            self.add(error)
