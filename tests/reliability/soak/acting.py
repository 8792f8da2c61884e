"""The frame of the soak's actors: threads, what they count in memory that does not grow, an end."""

import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn

from psqlmessages import Node
from psqlmessages.client.calls import Call
from psqlmessages.exceptions import ServerUnreachable

# What the soak gives each actor: addresses by role, and where the site is.
VARIABLE = "SOAK_PLACES"
DRAIN_SECONDS = 60
HEARD = Call("SELECT count(*) FROM pg_listening_channels()", (), int)


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


class Actor:
    """A process with several threads; each second it tells, as a line of JSON, what it counted."""

    def __init__(self) -> None:
        self.places: dict[str, str] = json.loads(os.environ[VARIABLE])
        self.counts: Counter[str] = Counter()
        self.senders: dict[str, InOrder] = {}
        self.nodes: list[Node] = []
        # Set when the soak is over, for who sends; and when all has come, for who listens.
        self.over = threading.Event()
        self.drained = threading.Event()
        self._threads: list[threading.Thread] = []

    def node(self, ident: str, role: str) -> Node:
        """Open a node, whose LISTENs are counted."""
        node = opened(ident, self.places[role])
        self.nodes.append(node)
        return node

    def every(self, seconds: float) -> Iterator[int]:
        """Give 1, 2, 3 … with a pause before each, until the soak is over."""
        number = 0
        while not self.over.wait(seconds):
            number += 1
            yield number

    def came(self, sender: str, number: int) -> None:
        """Count a message of those that come in order."""
        self.senders.setdefault(sender, InOrder()).add(number)

    def begin(self, *acts: Callable[[], object]) -> None:
        """Run each in a thread of its own; where one fails, so does the actor."""
        for act in acts:
            self._threads.append(threading.Thread(target=_or_die, args=(act,), daemon=True))
            self._threads[-1].start()

    def run(self, *, left: Callable[[], int] = lambda: 0) -> NoReturn:
        """Tell what is counted until the soak is over and nothing is left; then end."""
        threading.Thread(target=self._hear_the_end, daemon=True).start()
        while not self.over.wait(1):
            self._tell()
        for _ in range(DRAIN_SECONDS * 10):
            if not left():
                break
            threading.Event().wait(0.1)
        self.counts["lost"] += left()
        self.drained.set()
        self._tell()
        # Threads that wait for messages need not be asked.
        sys.stdout.flush()
        os._exit(0)

    def _hear_the_end(self) -> None:
        sys.stdin.read()
        self.over.set()

    def _tell(self) -> None:
        counts = self.counts.copy()
        for tally in list(self.senders.values()):
            counts.update(came=tally.came, lost=tally.lost, doubled=tally.doubled)
        if self.nodes:
            counts["LISTENs"] = sum(node._link.run(HEARD) for node in self.nodes)
            counts["reconnects"] = sum(node.counters.reconnects for node in self.nodes)
        print(json.dumps(counts), flush=True)


def opened(ident: str, dsn: str) -> Node:
    """Open a node. A first connection is not tried twice, and a busy machine may need longer."""
    for _ in range(10):
        with suppress(ServerUnreachable):
            node = Node(ident, dsn)
            node.open()
            return node
    raise ServerUnreachable("ten times")


def _or_die(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:  # noqa: BLE001 - the soak tells it and fails
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
