"""Sites with a crowd of WebSockets, each one Daphne: the relay's, and one of Channels' groups."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.brokers import NotHere
from benchmarks.crowd import Place
from benchmarks.crowd_users import SENDER, TOPIC, ident_of
from project.postgres import Server
from psqlmessages.client.node import Node

ROOT = Path(__file__).parents[1]
WAIT_SECONDS = 15
LOG_CHARACTERS = 3000


class Site(Protocol):
    """One side: where its WebSockets are, and how all of them are told something."""

    name: str
    pid: int

    def place(self, number: int) -> Place:
        """Say where and how to connect a WebSocket."""

    def send(self, body: str) -> None:
        """Send to all."""


@dataclass
class Relay:
    """Ours: each WebSocket is a node of a user of its own, let in by a token."""

    pid: int
    port: int
    node: Node
    tokens: list[str] = field(repr=False)
    name: str = "relay"

    def place(self, number: int) -> Place:
        """Register a node that hears of nothing but its topic, and listen."""
        hellos = (
            json.dumps({"op": "init", "ident": ident_of(number), "events": False}),
            json.dumps({"op": "topic_listen", "topic": TOPIC}),
        )
        headers = {"Authorization": f"Bearer {self.tokens[number]}"}
        return Place(self.port, "/ws/node/", headers, hellos)

    def send(self, body: str) -> None:
        """Send by topic_send."""
        self.node.topic_send(TOPIC, body)


class Group:
    """Theirs: WebSockets in one group of a channel layer."""

    def __init__(self, pid: int, port: int, layer: str, redis_port: int) -> None:
        from benchmarks.group_application import layer_of

        self.name = layer
        self.pid = pid
        self._port = port
        self._layer = layer_of(layer, redis_port)
        self._loop = asyncio.new_event_loop()

    def place(self, number: int) -> Place:
        """Connect: the consumer joins the group by itself."""
        return Place(self._port, "/")

    def send(self, body: str) -> None:
        """Send by group_send."""
        from benchmarks.group_application import GROUP

        telling = self._layer.group_send(GROUP, {"type": "told", "text": body})
        self._loop.run_until_complete(telling)

    def close(self) -> None:
        """Let go of the connections to Redis."""
        self._loop.run_until_complete(self._layer.flush())
        self._loop.close()


@contextmanager
def relay_site(server: Server, sockets: int) -> Iterator[Relay]:
    """Run the example project, with as many users."""
    environment = {
        **os.environ,
        "DATABASE_URL": server.url(),
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "SECRET_KEY": "of the benchmark alone",
        "DEBUG": "0",
        "PLAIN_HTTP": "1",
        "ALLOWED_HOSTS": "127.0.0.1",
    }
    command = [sys.executable, "-m", "benchmarks.crowd_users", str(sockets)]
    made = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    with (
        _daphne("project.asgi:application", environment) as (pid, port),
        Node(SENDER, server.url()) as node,
    ):
        node.topic_notify(TOPIC)
        yield Relay(pid, port, node, json.loads(made.stdout))


@contextmanager
def group_site(layer: str, redis_port: int) -> Iterator[Group]:
    """Run the application of Channels; NotHere where channels_redis is not installed."""
    try:
        import channels_redis  # noqa: F401
    except ImportError:
        raise NotHere("there is no channels-redis: benchmarks/requirements.txt") from None
    environment = {**os.environ, "LAYER": layer, "REDIS_PORT": str(redis_port)}
    with _daphne("benchmarks.group_application:application", environment) as (pid, port):
        group = Group(pid, port, layer, redis_port)
        try:
            yield group
        finally:
            group.close()


@contextmanager
def _daphne(application: str, environment: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    # The socket listens before the process runs: whoever comes early waits.
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        port = listening.getsockname()[1]
        command = [
            sys.executable, "-m", "daphne", "--fd", str(listening.fileno()),
            "--verbosity", "0", "--websocket_connect_timeout", "60", application,
        ]  # fmt: skip
        # What it says while a thousand WebSockets end with it is of no interest.
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stderr=log, pass_fds=[listening.fileno()]
        )
    try:
        yield process.pid, port
    except BaseException:
        log.seek(0)
        print(f"{application}: {log.read()[-LOG_CHARACTERS:]}", file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)
        log.close()


def memory_bytes(pid: int) -> int:
    """Read the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
