"""Graph of queues and exchanges, and its cycles. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from psqlmessages.exchanges.model import QueueRef

if TYPE_CHECKING:
    from psqlmessages.exchanges.store.definitions import DefinedExchange


@dataclass(frozen=True)
class RouteEdge:
    """A route of an exchange, from its source to one of its destinations."""

    exchange: str
    position: int
    source: QueueRef
    target: QueueRef
    selector: str
    is_in_cycle: bool


@dataclass(frozen=True)
class RouteGraph:
    """Queues, the edges between them, and cycles; cycles that share a queue are one."""

    queues: tuple[QueueRef, ...]
    edges: tuple[RouteEdge, ...]
    cycles: tuple[tuple[QueueRef, ...], ...]


def graph(exchanges: Iterable[DefinedExchange]) -> RouteGraph:
    """Build the graph. A queue is in a cycle if elements can return to it.

    Selectors are ignored, although they may prevent a cycle.
    """
    exchanges = list(exchanges)
    following: dict[QueueRef, list[QueueRef]] = {}
    for exchange in exchanges:
        targets = [destination.place for destination in exchange.destinations]
        following.setdefault(exchange.source, []).extend(targets)
        for target in targets:
            following.setdefault(target, [])
    cycles = [
        cycle
        for cycle in _strongly_connected(following)
        if len(cycle) > 1 or cycle[0] in following[cycle[0]]
    ]
    cycle_of = {place: number for number, cycle in enumerate(cycles) for place in cycle}
    edges = tuple(
        RouteEdge(
            exchange.name,
            position,
            exchange.source,
            destination.place,
            destination.selector,
            exchange.source in cycle_of
            and cycle_of[exchange.source] == cycle_of.get(destination.place),
        )
        for exchange in exchanges
        for position, destination in enumerate(exchange.destinations)
    )
    return RouteGraph(
        tuple(sorted(following, key=astuple)),
        edges,
        tuple(sorted((tuple(sorted(cycle, key=astuple)) for cycle in cycles), key=str)),
    )


def _strongly_connected(following: dict[QueueRef, list[QueueRef]]) -> Iterator[list[QueueRef]]:
    """Yield the strongly connected components of the graph (Tarjan's algorithm).

    Not recursive, because a chain may be longer than Python's stack.
    """
    index: dict[QueueRef, int] = {}
    lowest: dict[QueueRef, int] = {}
    path: list[tuple[QueueRef, Iterator[QueueRef]]] = []
    # Visited, but not in a component yet: a dictionary as an ordered set.
    pending: dict[QueueRef, None] = {}

    def enter(place: QueueRef) -> None:
        index[place] = lowest[place] = len(index)
        pending[place] = None
        path.append((place, iter(following[place])))

    for start in following:
        if start not in index:
            enter(start)
        while path:
            place, rest = path[-1]
            step = next(rest, None)
            if step is None:
                path.pop()
                if path:
                    above = path[-1][0]
                    lowest[above] = min(lowest[above], lowest[place])
                if lowest[place] == index[place]:
                    yield _component(pending, place)
            elif step not in index:
                enter(step)
            elif step in pending:
                lowest[place] = min(lowest[place], index[step])


def _component(pending: dict[QueueRef, None], until: QueueRef) -> list[QueueRef]:
    """Remove and return the queues that were added last, back to this one."""
    group = [pending.popitem()[0]]
    while group[-1] != until:
        group.append(pending.popitem()[0])
    return group
