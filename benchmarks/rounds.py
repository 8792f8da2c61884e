"""Rounds: the sides of a comparison take turns, so a slow moment of the machine affects all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

Act = Callable[[], object]
WARM_UP = 10


def measure_rates(sides: Mapping[str, Act], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Measure acts/s of each side in each round; every other round is in reverse order."""
    for act in sides.values():
        for _ in range(WARM_UP):
            act()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        order = list(sides.items())
        for name, act in reversed(order) if turn % 2 else order:
            rates[name].append(_rate(act, seconds))
    return rates


def _rate(act: Act, seconds: float) -> float:
    begun, acts = perf_counter(), 0
    while (elapsed := perf_counter() - begun) < seconds:
        act()
        acts += 1
    return acts / elapsed
