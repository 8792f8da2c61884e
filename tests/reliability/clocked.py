"""A client whose clock is wrong: does what it is told by lines, and says by lines what came of it.

``python -m tests.reliability.clocked IDENT DSN``, with a false clock preloaded.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from psqlmessages import CallTimeout, Node

SECONDS = 60


class Client:
    """What the test asks for, by name."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._events: list[str] = []
        self._came = threading.Condition()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        for message in self._node.messages():
            with self._came:
                self._events.append(f"{message.event} {message.ident}")
                self._came.notify_all()

    def clock(self) -> float:
        """The time that it is taken for here."""
        return time.time()

    def event(self, event: str) -> int:
        """Wait for an event; how often it came."""
        with self._came:
            assert self._came.wait_for(lambda: event in self._events, SECONDS), self._events
            return self._events.count(event)

    def read(self, number: int) -> list[Any]:
        """Read so many messages of the stream; their bodies in the order in which they came."""
        bodies = []
        for message in self._node.subscribe("NEWS"):
            bodies.append(message.body)
            if len(bodies) == number:
                break
        return bodies

    def publish(self, first: int, number: int) -> int:
        self._node.publish_many("NEWS", range(first, first + number))
        return number

    def consume(self, number: int) -> list[Any]:
        """Take so many elements by leases, and commit them."""
        bodies: list[Any] = []
        while len(bodies) < number:
            elements = self._node.reserve("Q", 20, timeout=timedelta(seconds=5))
            self._node.commit(*elements)
            bodies += [element.body for element in elements]
        return bodies

    def call(self, number: int) -> int:
        """Ask so many questions; how many answers came."""
        return sum(self._node.call("CALLEE", each) == [each] for each in range(number))

    def call_in_vain(self) -> float:
        """Ask who does not answer; for how many seconds."""
        began = time.monotonic()
        try:
            self._node.call("SILENT", "?", timeout=timedelta(seconds=1))
        except CallTimeout:
            return time.monotonic() - began
        raise AssertionError("it has answered")


def main(ident: str, dsn: str) -> None:
    """Obey until the input ends."""
    with Node(ident, dsn) as node:
        client = Client(node)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            method: Callable[..., Any] = getattr(client, name)
            print(json.dumps(method(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
