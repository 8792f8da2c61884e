"""Graph of queues, whose edges are the routes of exchanges, and its cycles. Pure."""

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
    destination_position: int
    source: QueueRef
    destination: QueueRef
    selector: str
    is_in_cycle: bool


@dataclass(frozen=True)
class RouteGraph:
    """Queues, the edges between them, and the cycles. Cycles that share a queue count as one."""

    queues: tuple[QueueRef, ...]
    edges: tuple[RouteEdge, ...]
    cycles: tuple[tuple[QueueRef, ...], ...]


def build_graph(exchanges: Iterable[DefinedExchange]) -> RouteGraph:
    """Build the graph. A queue is in a cycle if elements can return to the queue.

    Selectors are ignored, although they may prevent a cycle.
    """
    exchanges = list(exchanges)
    successors: dict[QueueRef, list[QueueRef]] = {}
    for exchange in exchanges:
        queues = [destination.queue for destination in exchange.destinations]
        successors.setdefault(exchange.source, []).extend(queues)
        for queue in queues:
            successors.setdefault(queue, [])
    cycles = [
        cycle
        for cycle in _strongly_connected(successors)
        if len(cycle) > 1 or cycle[0] in successors[cycle[0]]
    ]
    cycle_numbers = {queue: number for number, cycle in enumerate(cycles) for queue in cycle}
    edges = tuple(
        RouteEdge(
            exchange.name,
            position,
            exchange.source,
            destination.queue,
            destination.selector,
            exchange.source in cycle_numbers
            and cycle_numbers[exchange.source] == cycle_numbers.get(destination.queue),
        )
        for exchange in exchanges
        for position, destination in enumerate(exchange.destinations)
    )
    return RouteGraph(
        tuple(sorted(successors, key=astuple)),
        edges,
        tuple(sorted((tuple(sorted(cycle, key=astuple)) for cycle in cycles), key=str)),
    )


def _strongly_connected(successors: dict[QueueRef, list[QueueRef]]) -> Iterator[list[QueueRef]]:
    """Yield the strongly connected components of the graph (Tarjan's algorithm).

    This is not recursive, because a chain of queues may be longer than Python's stack.
    """
    index: dict[QueueRef, int] = {}
    low_link: dict[QueueRef, int] = {}
    path: list[tuple[QueueRef, Iterator[QueueRef]]] = []
    # Visited queues that are in no component yet. This dict is a stack with fast membership tests.
    pending: dict[QueueRef, None] = {}

    def enter(queue: QueueRef) -> None:
        index[queue] = low_link[queue] = len(index)
        pending[queue] = None
        path.append((queue, iter(successors[queue])))

    for start in successors:
        if start not in index:
            enter(start)
        while path:
            queue, remaining_successors = path[-1]
            successor = next(remaining_successors, None)
            if successor is None:
                path.pop()
                if path:
                    predecessor = path[-1][0]
                    low_link[predecessor] = min(low_link[predecessor], low_link[queue])
                if low_link[queue] == index[queue]:
                    yield _pop_component(pending, queue)
            elif successor not in index:
                enter(successor)
            elif successor in pending:
                low_link[queue] = min(low_link[queue], index[successor])


def _pop_component(pending: dict[QueueRef, None], root: QueueRef) -> list[QueueRef]:
    """Remove and return ``root`` and all queues that were added after it."""
    component = [pending.popitem()[0]]
    while component[-1] != root:
        component.append(pending.popitem()[0])
    return component
