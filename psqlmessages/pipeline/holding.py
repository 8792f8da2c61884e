"""Holding: a stream's elements, reserved until the batch they are read in is committed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from psqlmessages.pipeline import leases
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.options import SourceOptions
from psqlmessages.pipeline.pinging import Pinging
from psqlmessages.pipeline.waiting import logger

_RESERVE: Final = "SELECT lease FROM messages.reserve(%s, %s, %s::int, %s::float8)"
_RENEW: Final = "SELECT count(*) FROM messages.renew(%s, %s, %s::float8, VARIADIC %s::text[])"
_COMMIT: Final = "SELECT messages.commit(%s, VARIADIC %s::text[])"


class Holding:
    """The driver's side of a stream of a queue. Leases last ``timeout`` seconds, and are renewed.

    A call whose answer was lost with the connection leaves elements that nobody holds: they can be
    taken again when the timeout is over.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._database = Database(options.address)
        self._lock = threading.RLock()
        self._held: Sequence[str] = ()
        self._settled = 0
        self._pinging = Pinging(self._renew, options.timeout)

    def available(self) -> int:
        """Return how many elements can be taken now."""
        options = self._options
        answer = self._database.ask(
            "SELECT messages.sizes(%s, %s)", (options.client, options.queue)
        )
        return int(answer["Available"])

    def reserve(self, most: int) -> list[str]:
        """Reserve elements, the oldest first; their leases."""
        options = self._options
        taken: list[str] = []
        while len(taken) < most:
            count = min(leases.MOST, most - len(taken))
            rows = self._database.rows(
                _RESERVE, (options.client, options.queue, count, options.timeout)
            )
            taken += [lease for (lease,) in rows]
            if len(rows) < count:
                break
        return taken

    def hold(self, held: Sequence[str]) -> None:
        """Renew these leases from now on, in place of others."""
        with self._lock:
            self._held = held
        self._pinging.start()

    def settle(self, batch: int, done: Sequence[str]) -> None:
        """Commit the elements of a batch, where that was not done yet."""
        with self._lock:
            if batch <= self._settled:
                return
            is_first = self._settled == 0
            lost = 0
            for some in leases.in_calls(done):
                answer = self._database.ask(_COMMIT, (self._options.client, list(some)))
                lost += answer["Done"].count(False)
            self._settled, self._held = batch, ()
        # After a restart they may have been committed by the run before.
        if lost and not is_first:
            logger.warning(
                "%d of %d elements of batch %d were lost to it before they could be committed:"
                " they are read once more",
                lost,
                len(done),
                batch,
            )

    def close(self) -> None:
        """Disconnect; what is held stays so until its lease ends."""
        self._pinging.stop()
        self._database.close()

    def _renew(self) -> None:
        options = self._options
        with self._lock:
            for some in leases.in_calls(self._held):
                self._database.rows(
                    _RENEW, (options.client, options.queue, options.timeout, list(some))
                )
