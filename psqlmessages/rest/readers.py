"""Reader: a request that waits for an element of a queue, and what may end its wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from psqlmessages.relay.watch import Credentials
from psqlmessages.rest.elements import Element
from psqlmessages.rest.faults import Refused, Unavailable

TIMED_OUT: Final = 504
CANCELLED: Final = 410


class Key(NamedTuple):
    """What readers have in common that one call of reserve can serve."""

    ident: str
    seconds: float


@dataclass(eq=False, slots=True)
class Reader:
    """One that waits; the relay's watch looks after it as after a WebSocket.

    ``is_hasty``: it wants what is there now, and waits for nothing.
    """

    tid: str
    queue: str
    ident: str
    lease_seconds: float
    is_reserving: bool
    is_hasty: bool
    credentials: Credentials
    since: datetime
    until: datetime
    result: asyncio.Future[Element] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def key(self) -> Key:
        """What it has in common with those whom the same call can serve."""
        return Key(self.ident, self.lease_seconds)

    @property
    def is_waiting(self) -> bool:
        """Whether it has got nothing yet, and is still there."""
        return not self.result.done()

    def give(self, element: Element) -> None:
        """End its wait with an element."""
        self.result.set_result(element)

    def fail(self, error: Exception) -> None:
        """End its wait with an error, unless it has ended."""
        if self.is_waiting:
            self.result.set_exception(error)

    def time_out(self) -> None:
        """End its wait, as its time is over."""
        self.fail(Refused(TIMED_OUT, f"nothing came: no element of {self.queue} can be taken"))

    def cancel(self) -> None:
        """End its wait, as somebody asked for."""
        self.fail(Refused(CANCELLED, f"the reader {self.tid} was cancelled"))

    # What the watch of the relay calls

    def permits(self, _user: Any) -> bool:
        """Any user may wait whose credentials still hold."""
        return True

    def revoked(self, reason: str) -> None:
        """End the wait: the user may not be here any more."""
        self.fail(Refused(401, reason))

    def ident_revoked(self, ident: str) -> None:
        """End the wait: the user may not be this node any more."""
        self.fail(Refused(403, f"you may not act as {ident} any more"))

    def unchecked(self) -> None:
        """End the wait: for too long it could not be told who may be here."""
        self.fail(Unavailable())

    def reap(self) -> None:
        """Do nothing: who has gone is taken off the list by the request itself."""
