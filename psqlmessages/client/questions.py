"""Questions: what a node has asked, and what it was told of the node that it asked. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psqlmessages.exceptions import CalleeGone, MessagesError

if TYPE_CHECKING:
    from psqlmessages.client.listening import Arrival


@dataclass(slots=True)
class Pending:
    """A question that waits for its answers: arrivals, or the error that ends the wait."""

    token: str
    callee: str
    on_answer: Callable[[], None]
    answers: deque[Arrival | MessagesError] = field(default_factory=deque)
    _is_put: bool = False
    _gone: CalleeGone | None = None

    def add(self, answer: Arrival | MessagesError) -> None:
        """Hand an answer to whoever asked."""
        self.answers.append(answer)
        self.on_answer()

    def heard(self, event: str) -> None:
        """Take note of what became of the callee.

        What is read until the question is put may have been told long before: the last word counts.
        """
        if event == "connect":
            self._gone = None
        elif event in ("crash", "disconnect"):
            self._gone = CalleeGone(f"{self.callee} has gone before it answered ({event})")
            # Noted first: another thread may put the question in this moment.
            if self._is_put:
                self.add(self._gone)

    def was_put(self) -> None:
        """Take note that the callee has the question; what it does from now on ends the wait."""
        self._is_put = True
        if self._gone is not None:
            self.add(self._gone)
