"""Plans: what the loops of an exchange have to know of its definition, computed once. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from psqlmessages.exchanges.messages import Graphed, Place
from psqlmessages.exchanges.route import needs_body
from psqlmessages.exchanges.shortcuts import Shortcut

# What one call of `deliver` takes.
_MOST_COPIES: Final = 65_536


class Flow(Enum):
    """How elements are taken and delivered.

    WITHIN one database in one transaction. Where copies go to other databases: RESERVED and kept
    until all of them are there, or POPPED, and lost where one does not get there.
    """

    WITHIN = "within"
    RESERVED = "reserved"
    POPPED = "popped"


@dataclass(frozen=True)
class Plan:
    """An exchange as its loops run it.

    ``names`` has for each target what distinguishes it from the others, and stays the same when
    targets come, go or change places: the place, and which of the targets with this place it is.
    ``marks`` are what an element remembers once the copies for the targets are made.
    """

    graphed: Graphed
    flow: Flow
    names: tuple[str, ...]
    marks: tuple[str, ...]
    wants_body: bool
    loops: int
    batch: int
    shortcut: Shortcut | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, graphed: Graphed) -> Plan:
        """Plan the loops of an exchange."""
        is_within = all(graphed.source.namespace == place.namespace for place in places(graphed))
        taking = Flow.RESERVED if graphed.reserve else Flow.POPPED
        loops = min(graphed.parallel, graphed.wsize)
        names = tuple(_distinguished(places(graphed)))
        return cls(
            graphed=graphed,
            flow=Flow.WITHIN if is_within else taking,
            names=names,
            marks=tuple(f"{graphed.name}/{name}" for name in names),
            wants_body=needs_body(graphed),
            loops=loops,
            batch=min(graphed.wsize // loops, _MOST_COPIES // max(len(graphed.targets), 1)),
            shortcut=Shortcut.of(graphed),
        )

    @property
    def ident(self) -> str:
        """As which node the exchange acts."""
        return f"exchange.{self.graphed.name}"

    @property
    def fetches_body(self) -> bool:
        """Whether bodies travel through this process: for selectors, or to other databases."""
        return self.wants_body or self.flow is not Flow.WITHIN

    @property
    def namespaces(self) -> set[str]:
        """The namespaces of the source and of all targets."""
        return {self.graphed.source.namespace, *(place.namespace for place in places(self.graphed))}

    def key(self, target: int, element: int, pushed_at: int) -> str:
        """Return the key of a copy in another database: a second push with it is none.

        ``pushed_at`` is in microseconds: ids alone may return in a database that was set up anew.
        """
        nth = self.names[target].rpartition("/")[2]
        return f"{self.graphed.name}.{element}.{pushed_at}.{nth}"


def places(graphed: Graphed) -> list[Place]:
    """Return the places of the targets, in order."""
    return [target.place for target in graphed.targets]


def _distinguished(there: list[Place]) -> list[str]:
    seen: Counter[Place] = Counter()
    found = []
    for place in there:
        found.append(f"{place}/{seen[place]}")
        seen[place] += 1
    return found
