"""Cycles in the graph of queues, whose edges are the routes of exchanges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from psqlmessages.exchanges.model import QueueRef

if TYPE_CHECKING:
    from psqlmessages.exchanges.store.definitions import DefinedExchange


def find_cycles(exchanges: Iterable[DefinedExchange]) -> list[tuple[QueueRef, ...]]:
    """Return the queues of each cycle. A queue is in a cycle if elements can return to the queue.

    Cycles that share a queue count as one. Selectors, which may prevent a cycle, are ignored.
    """
    successors: dict[QueueRef, list[QueueRef]] = {}
    for exchange in exchanges:
        queues = [destination.queue for destination in exchange.destinations]
        successors.setdefault(exchange.source, []).extend(queues)
        for queue in queues:
            successors.setdefault(queue, [])
    cycles = (
        tuple(sorted(cycle))
        for cycle in _strongly_connected(successors)
        if len(cycle) > 1 or cycle[0] in successors[cycle[0]]
    )
    return sorted(cycles, key=str)


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
