"""Queue taking: how one reader of a node waits for elements, as steps. No I/O.

Look; found nothing: listen (LISTEN, commit, then read), look again, and wait: for a notification,
for the next mature time, and for the time to look for what no notification told.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Final

import psycopg
from psycopg.errors import LockNotAvailable

from psqlmessages.client.calls import Call, is_passing
from psqlmessages.client.listening import Listening
from psqlmessages.client.queue_calls import queue_listen
from psqlmessages.client.queue_elements import Awaiting, Element
from psqlmessages.client.queue_lines import Spot
from psqlmessages.client.steps import Steps, Wait
from psqlmessages.exceptions import ConnectionLost, NodeClosed

Found = list[Element]

# After what the server aborts: a deadlock, a full disk, …
AGAIN_SECONDS: Final = 1.0


class Taking:
    """One wait for elements of one queue; it may be left off at any step."""

    def __init__(
        self,
        listening: Listening,
        ident: str,
        queue: str,
        take: Call[Found],
        timeout: timedelta,
        wake: Callable[[], None],
    ) -> None:
        self._listening = listening
        self._line = listening.queues.of(queue)
        self._take = take
        self._listen = queue_listen(ident, queue, self._noting)
        self._until = monotonic() + timeout.total_seconds()
        self._again_at = -inf
        self._spot = Spot(wake)
        listening.wakes.are_wanted = True

    def steps(self, is_stopped: Callable[[], bool]) -> Steps[Found]:
        """Give what is there, when it comes; nothing when the time is over.

        Raises NodeClosed where the node is stopped meanwhile.
        """
        found = yield from self._look(may_listen=False)
        if found:
            return found
        self._line.join(self._spot)
        try:
            while not found and (now := monotonic()) < self._until:
                if is_stopped():
                    raise NodeClosed(
                        f"node {self._listening.ident} was stopped while it waited for elements"
                    )
                if self._is_our_turn and self._is_due(now):
                    found = yield from self._look(may_listen=True)
                else:
                    yield self._wait()
        finally:
            self._line.leave(self._spot)
        return found

    def _noting(self, answer: Awaiting) -> None:
        self._listening.queues.listens(self._line, answer.channel)

    @property
    def _is_our_turn(self) -> bool:
        return self._listening.pulse.is_connected and self._line.is_first(self._spot)

    def _wait(self) -> Wait:
        was_our_turn = self._is_our_turn

        def is_ready() -> bool:
            is_our_turn = self._is_our_turn
            return is_our_turn != was_our_turn or (is_our_turn and self._is_due(monotonic()))

        due_at = max(self._line.due_at, self._again_at)
        return Wait(is_ready, min(self._until, due_at) if was_our_turn else self._until)

    def _is_due(self, now: float) -> bool:
        return now >= self._again_at and self._line.is_due(now)

    def _look(self, *, may_listen: bool) -> Steps[Found]:
        try:
            if may_listen and self._line.wants_listening(monotonic()):
                yield from self._begin_listening()
            is_listening = self._line.is_listening(monotonic())
            seen = self._line.count
            found: Found = yield self._take
        except ConnectionLost:
            # The node comes back by itself, which is news.
            return []
        except psycopg.Error as error:
            if not is_passing(error):
                raise
            self._listening.log.warning(
                "%s: elements cannot be taken now: %s", self._listening.ident, error
            )
            self._again_at = monotonic() + AGAIN_SECONDS
            return []
        if is_listening:
            self._line.looked(seen, monotonic(), has_found=bool(found))
        return found

    def _begin_listening(self) -> Steps[None]:
        connection, seen = self._line.connection, self._line.count
        try:
            answer: Awaiting = yield self._listen
        except LockNotAvailable:
            self._line.could_not_listen(monotonic())
        else:
            self._line.listened(answer, connection, seen, monotonic())
