"""Tallies: numbered messages are counted as lost or doubled, in memory that does not grow."""

import threading
from collections import Counter


class InOrder:
    """The messages of one sender, which come in the order of their numbers."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.came, self.lost, self.doubled = 0, 0, 0

    def add(self, number: int) -> None:
        """Count what came; what a listener sees first is where it begins."""
        self.came += 1
        if self.last is not None and number <= self.last:
            self.doubled += 1
            return
        if self.last is not None:
            self.lost += number - self.last - 1
        self.last = number

    def ends(self, number: int) -> None:
        """Count what did not come at the end: this number was the last."""
        if self.last is not None:
            self.lost += number - self.last
            self.last = number


class Outstanding:
    """Elements in any order: pushed by their numbers, and done once each."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.name = name
        self._counts = counts
        self._numbers: set[int] = set()
        self._lock = threading.Lock()

    def push(self, number: int) -> None:
        """Count an element before it is pushed."""
        with self._lock:
            self._numbers.add(number)
            self._counts[f"{self.name} pushed"] += 1

    def done(self, number: int) -> None:
        """Count an element that was done."""
        with self._lock:
            if number in self._numbers:
                self._numbers.remove(number)
                self._counts[f"{self.name} done"] += 1
            else:
                self._counts["doubled"] += 1

    @property
    def left(self) -> int:
        """How many are not done."""
        return len(self._numbers)
