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
    is_in_cycle: bool


@dataclass(frozen=True)
class RouteGraph:
    """Edges between queues, and the cycles. Cycles that share a queue count as one."""

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
            exchange.source in cycle_numbers
            and cycle_numbers[exchange.source] == cycle_numbers.get(destination.queue),
        )
        for exchange in exchanges
        for position, destination in enumerate(exchange.destinations)
    )
    return RouteGraph(
        edges,
        tuple(sorted((tuple(sorted(cycle, key=astuple)) for cycle in cycles), key=str)),
    )


def _strongly_connected(successors: dict[QueueRef, list[QueueRef]]) -> Iterator[list[QueueRef]]:
    """Yield the strongly connected components of the graph (Kosaraju's algorithm)."""
    predecessors: dict[QueueRef, list[QueueRef]] = {queue: [] for queue in successors}
    for queue, following in successors.items():
        for successor in following:
            predecessors[successor].append(queue)
    visited: set[QueueRef] = set()
    finished = [each for queue in successors for each in _search(successors, queue, visited)]
    visited.clear()
    for queue in reversed(finished):
        if component := _search(predecessors, queue, visited):
            yield component


def _search(
    graph: dict[QueueRef, list[QueueRef]], start: QueueRef, visited: set[QueueRef]
) -> list[QueueRef]:
    """Visit the queues that can be reached from ``start``, and return them in post-order.

    This is not recursive, because a chain of queues may be longer than Python's stack.
    """
    found: list[QueueRef] = []
    path = [(start, iter(graph[start]))] if start not in visited else []
    visited.add(start)
    while path:
        queue, neighbours = path[-1]
        neighbour = next((each for each in neighbours if each not in visited), None)
        if neighbour is None:
            found.append(queue)
            path.pop()
        else:
            visited.add(neighbour)
            path.append((neighbour, iter(graph[neighbour])))
    return found
