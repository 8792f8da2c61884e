"""Processes that open nodes and wait to be killed; and the nursery that makes them in no time.

python -m tests.reliability.victims DSN   each line of its input is a kind and an ident; a child of
its own is that node, and prints the ident and its process id once it listens to T. At a message
"report" a node prints how many messages came before it
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Self

from psqlmessages import AsyncNode, Node
from psqlmessages.relay.hub import Hub
from tests.django.processes import talking
from tests.web.receivers import ok

HUB_NODES = 3
REPORT = "report"


def be_node(ident: str, dsn: str) -> None:
    came = 0
    with Node(ident, dsn) as node:
        node.topic_listen("T")
        say(ident, os.getpid())
        for message in node:
            if message.body == REPORT:
                say(ident, came)
            came += message.type == "Topic"


async def be_async_node(ident: str, dsn: str) -> None:
    async with AsyncNode(ident, dsn) as node:
        await node.topic_listen("T")
        say(ident, os.getpid())
        await node.run()


async def be_hub(ident: str, dsn: str) -> None:
    """Be a hub of several nodes, until the end."""
    hub = Hub(dsn)
    for name in (f"{ident}.{number}" for number in range(HUB_NODES)):
        receiver = SimpleNamespace(deliver=lambda frame: None)
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
        module = ("-m", "tests.reliability.victims")
        self._process = talking(*module, dsn, start_new_session=True)

    def make(self, *wanted: tuple[str, str]) -> dict[str, int]:
        """Make victims, kind and ident of each, and wait until all listen: the process of each."""
        for kind, ident in wanted:
            self._process.stdin.write(f"{kind} {ident}\n")
        return {ident: int(pid) for ident, pid in (self._said() for _ in wanted)}

    def report(self) -> int:
        """Wait until a node has reported how many messages it received."""
        return int(self._said()[1])

    def _said(self) -> list[str]:
        return self._process.stdout.readline().split()

    def kill_all(self, living: dict[str, int]) -> float:
        """Kill several, as the kernel does where memory is short; when that began."""
        began = monotonic()
        for pid in living.values():
            os.kill(pid, signal.SIGKILL)
        return began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
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
