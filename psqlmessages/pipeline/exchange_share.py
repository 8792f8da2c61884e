"""Shares: what one task on an executor does for exchanges: it runs their loops for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Final, NamedTuple

from psqlmessages.exchanges.messages import Graphed
from psqlmessages.graph.crews import Crew, Namespace
from psqlmessages.graph.loops import Loop
from psqlmessages.graph.plans import Plan
from psqlmessages.graph.remote import Circuit
from psqlmessages.graph.tallies import Entry, Tally

# Not outcomes of elements: how often loops had to wait, and whether something was refused.
WAITS: Final = "waits"
REFUSALS: Final = "refusals"

# A database that is away is left alone by the next share of this process too.
_circuits: Final[dict[tuple[str, str], Circuit]] = {}


class Counts(NamedTuple):
    """What a share has counted of one exchange: the rows of the data source."""

    exchange: str
    outcome: str
    destination: int
    number: int
    seconds: float
    buckets: list[int]
    selector_seconds: float

    def add_to(self, tally: Tally) -> None:
        """Add it up."""
        if self.outcome == WAITS:
            tally.waits += self.number
        elif self.outcome != REFUSALS:
            entry = Entry(self.number, self.seconds, self.selector_seconds, list(self.buckets))
            tally.add(self.outcome, self.destination, entry)


class _Shift(Crew):
    """A crew that tells when there was something to take."""

    def __init__(
        self,
        plan: Plan,
        namespaces: dict[str, Namespace],
        tally: Tally,
        on_found: Callable[[], None],
    ) -> None:
        super().__init__(plan, namespaces, tally)
        self._on_found = on_found
        self.tally = tally

    def found(self) -> None:
        """Note that there was something."""
        self._on_found()
        super().found()

    def counts(self) -> Iterator[Counts]:
        """Yield what its loops have counted."""
        name = self.plan.graphed.name
        for (outcome, destination), entry in self.tally.entries.items():
            if entry.count:
                figures = (entry.count, entry.seconds, entry.buckets, entry.selector_seconds)
                yield Counts(name, outcome, destination, *figures)
        if self.tally.waits:
            yield Counts(name, WAITS, -1, self.tally.waits, 0.0, [], 0.0)
        if self.reports.has_refusals:
            yield Counts(name, REFUSALS, -1, 1, 0.0, [], 0.0)


class Share:
    """The loops of exchanges in one task.

    It ends after ``span`` seconds, and before that when no loop has found anything for ``linger``
    seconds; what is in hand then is finished. ``address`` returns a namespace's.
    """

    def __init__(
        self,
        exchanges: Sequence[Graphed],
        address: Callable[[str], str],
        *,
        span: float,
        linger: float,
    ) -> None:
        self._span = span
        self._linger = linger
        self._plans = [Plan.of(exchange) for exchange in exchanges]
        aliases = {alias for plan in self._plans for alias in plan.namespaces}
        self._addresses = {alias: address(alias) for alias in sorted(aliases)}
        self._found_at = self._until = 0.0

    def work(self) -> list[Counts]:
        """Do it, and return what was counted."""
        return asyncio.run(self._work()) if self._plans else []

    async def _work(self) -> list[Counts]:
        spaces = {alias: _namespace(alias, address) for alias, address in self._addresses.items()}
        shifts = [_Shift(plan, spaces, Tally(), self._found) for plan in self._plans]
        self._found()
        self._until = monotonic() + self._span
        self._end_in_time(shifts)
        try:
            await asyncio.gather(
                *(shift.run([Loop(shift) for _ in range(shift.plan.loops)]) for shift in shifts)
            )
        finally:
            for namespace in spaces.values():
                await namespace.watch.close()
        return [counts for shift in shifts for counts in shift.counts()]

    def _found(self) -> None:
        self._found_at = monotonic()

    def _end_in_time(self, shifts: list[_Shift]) -> None:
        """Stop them when it is time, which every find may put off."""
        left = min(self._until, self._found_at + self._linger) - monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._end_in_time, shifts)
            return
        for shift in shifts:
            shift.stop()


def _namespace(alias: str, address: str) -> Namespace:
    namespace = Namespace(alias, address)
    namespace.circuit = _circuits.setdefault((alias, address), namespace.circuit)
    return namespace
