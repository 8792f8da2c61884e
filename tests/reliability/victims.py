"""Processes that open nodes and wait to be killed; and the nursery that makes them in no time.

python -m tests.reliability.victims DSN   each line of its input is a kind and an ident; a child of
its own is that node, and prints the ident and its process id once it listens to T. At a message
"report" it prints how many came since the last, and the 99th percentile of their ages in seconds
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Self

from psqlmessages import AsyncNode, Message, Node
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub
from tests.django.processes import talking
from tests.web.receivers import ok

HUB_NODES = 3
REPORT = "report"


class Meter:
    """Counts what comes, and how old it is: a body is when it was sent."""

    def __init__(self, ident: str) -> None:
        self._ident = ident
        self._ages: list[float] = []

    def take(self, message: Message) -> None:
        if message.topic == "T" and message.type == "Topic":
            self._take(message.body)

    def deliver(self, frame: HubMessage) -> None:
        """Take a frame, as a receiver of a hub."""
        if frame.header["Type"] == "Topic" and frame.body is not None:
            self._take(json.loads(frame.body) if frame.header.get("Enc") else frame.body)

    def _take(self, body: object) -> None:
        if body != REPORT:
            # Words that others are sent have no age.
            with suppress(ValueError):
                self._ages.append(monotonic() - float(str(body)))
            return
        ages, self._ages = sorted(self._ages), []
        say(self._ident, len(ages), ages[len(ages) * 99 // 100] if ages else 0.0)


def be_node(ident: str, dsn: str) -> None:
    meter = Meter(ident)
    with Node(ident, dsn) as node:
        node.topic_listen("T")
        say(ident, os.getpid())
        for message in node:
            meter.take(message)


async def be_async_node(ident: str, dsn: str) -> None:
    meter = Meter(ident)
    async with AsyncNode(ident, dsn) as node:
        await node.topic_listen("T")
        say(ident, os.getpid())
        async for message in node:
            meter.take(message)


async def be_hub(ident: str, dsn: str) -> None:
    """Be a hub of several nodes, until the end."""
    hub = Hub(dsn)
    for name in (f"{ident}.{number}" for number in range(HUB_NODES)):
        receiver = Meter(name)
        await ok(hub.init(name, receiver))
        await ok(hub.run(name, receiver, "topic_listen", "T"))
    say(ident, os.getpid())
    await asyncio.Event().wait()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(dsn: str) -> None:
    """Fork a child for each line; the kernel buries those that were killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        kind, ident = line.split()
        if os.fork() == 0:
            if kind == "node":
                be_node(ident, dsn)
            else:
                asyncio.run({"async": be_async_node, "hub": be_hub}[kind](ident, dsn))
            return


class Nursery:
    """The process that makes victims, from the test's side."""

    def __init__(self, dsn: str) -> None:
        self._process = talking("-m", "tests.reliability.victims", dsn)
        self._living: set[int] = set()

    def make(self, *wanted: tuple[str, str]) -> dict[str, int]:
        """Make victims, kind and ident of each, and wait until all listen: the process of each."""
        for kind, ident in wanted:
            self._process.stdin.write(f"{kind} {ident}\n")
        made = {ident: int(pid) for ident, pid in (self._said() for _ in wanted)}
        self._living |= {*made.values()}
        return made

    def report(self) -> tuple[str, int, float]:
        """Wait for the next report: ident, how many came, and the 99th percentile of their ages."""
        ident, count, p99 = self._said()
        return ident, int(count), float(p99)

    def _said(self) -> list[str]:
        return self._process.stdout.readline().split()

    def kill_all(self, living: dict[str, int]) -> float:
        """Kill several, as the kernel does where memory is short; when that began."""
        began = monotonic()
        for pid in living.values():
            os.kill(pid, signal.SIGKILL)
        self._living -= {*living.values()}
        return began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all({str(pid): pid for pid in self._living})
        self._process.kill()
        self._process.communicate()


def told(node: Node, ident: str) -> int:
    """Wait until a node is told of a crash, and a moment longer; how often it was told by then."""
    times, patience = 0, timedelta(seconds=90)
    while any(
        (message.event, message.ident) == ("crash", ident)
        for message in node.messages(timeout=patience)
    ):
        times, patience = times + 1, timedelta(seconds=1)
    return times


if __name__ == "__main__":
    main(sys.argv[1])
