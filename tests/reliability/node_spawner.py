"""Spawns processes that run nodes and can be killed. Forking one is faster than starting Python.

python -m tests.reliability.node_spawner DSN

Each line of the input has a kind and an ident. A child process runs that node; it prints the ident
and its process id when it listens to T. After the message "report", a node prints how many
messages it has received before.
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


def run_node(ident: str, dsn: str) -> None:
    received = 0
    with Node(ident, dsn) as node:
        node.topic_listen("T")
        print_line(ident, os.getpid())
        for message in node:
            if message.body == REPORT:
                print_line(ident, received)
            received += message.type == "Topic"


async def run_async_node(ident: str, dsn: str) -> None:
    async with AsyncNode(ident, dsn) as node:
        await node.topic_listen("T")
        print_line(ident, os.getpid())
        await node.run()


async def run_hub(ident: str, dsn: str) -> None:
    hub = Hub(dsn)
    for name in (f"{ident}.{number}" for number in range(HUB_NODES)):
        receiver = SimpleNamespace(deliver=lambda frame: None)
        await ok(hub.init(name, receiver))
        await ok(hub.run(name, receiver, "topic_listen", "T"))
    print_line(ident, os.getpid())
    await asyncio.Event().wait()


def print_line(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(dsn: str) -> None:
    """Fork a child for each line; the kernel removes killed children."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        kind, ident = line.split()
        if os.fork() == 0:
            if kind == "node":
                run_node(ident, dsn)
            else:
                asyncio.run({"async": run_async_node, "hub": run_hub}[kind](ident, dsn))
            return


class NodeSpawner:
    """Starts the process of this module, and spawns nodes with it."""

    def __init__(self, dsn: str) -> None:
        module = ("-m", "tests.reliability.node_spawner")
        self._process = talking(*module, dsn, start_new_session=True)

    def spawn(self, *nodes: tuple[str, str]) -> dict[str, int]:
        """Spawn nodes, given as (kind, ident); return their process ids when all listen."""
        for kind, ident in nodes:
            self._process.stdin.write(f"{kind} {ident}\n")
        return {ident: int(pid) for ident, pid in (self._read_words() for _ in nodes)}

    def wait_for_report(self) -> int:
        return int(self._read_words()[1])

    def _read_words(self) -> list[str]:
        return self._process.stdout.readline().split()

    def kill_all(self, pids: dict[str, int]) -> float:
        """Kill several processes, as the kernel does if memory runs out; return the time before."""
        began = monotonic()
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        return began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def count_crashes(node: Node, ident: str) -> int:
    """Wait for a crash event of a node; return how many come until one second after the last."""
    count, timeout = 0, timedelta(seconds=90)
    while any(
        (message.event, message.ident) == ("crash", ident)
        for message in node.messages(timeout=timeout)
    ):
        count, timeout = count + 1, timedelta(seconds=1)
    return count


if __name__ == "__main__":
    main(sys.argv[1])
