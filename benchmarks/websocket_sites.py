"""Sites with many WebSockets, each a Daphne: one with the relay, others with a Channels group."""

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

from benchmarks.brokers import PeerMissing
from benchmarks.websocket_clients import Endpoint
from benchmarks.websocket_users import SENDER, TOPIC, ident_of
from project.postgres import Server
from psqlmessages.client.node import Node

ROOT = Path(__file__).parents[1]
WAIT_SECONDS = 15
LOG_CHARACTERS = 3000


class Site(Protocol):
    """A side of the benchmark: where its WebSockets connect, and how to send to all of them."""

    name: str
    pid: int

    def endpoint(self, number: int) -> Endpoint:
        """Return the endpoint of the WebSocket with this number."""

    def send(self, body: str) -> None:
        """Send to all WebSockets."""


@dataclass
class RelaySite:
    """Our side: each WebSocket is the node of a different user, with a token."""

    pid: int
    port: int
    node: Node
    tokens: list[str] = field(repr=False)
    name: str = "relay"

    def endpoint(self, number: int) -> Endpoint:
        """Return an endpoint whose node receives no events, and listens to the topic."""
        requests = (
            json.dumps({"op": "init", "ident": ident_of(number), "events": False}),
            json.dumps({"op": "topic_listen", "topic": TOPIC}),
        )
        headers = {"Authorization": f"Bearer {self.tokens[number]}"}
        return Endpoint(self.port, "/ws/node/", headers, requests)

    def send(self, body: str) -> None:
        """Call topic_send."""
        self.node.topic_send(TOPIC, body)


class GroupSite:
    """A peer: WebSockets in one group of a channel layer."""

    def __init__(self, pid: int, port: int, layer: str, redis_port: int) -> None:
        from benchmarks.channels_application import create_layer

        self.name = layer
        self.pid = pid
        self._port = port
        self._layer = create_layer(layer, redis_port)
        self._loop = asyncio.new_event_loop()

    def endpoint(self, number: int) -> Endpoint:
        """Return an endpoint whose consumer joins the group."""
        return Endpoint(self._port, "/")

    def send(self, body: str) -> None:
        """Call group_send."""
        from benchmarks.channels_application import GROUP

        sending = self._layer.group_send(GROUP, {"type": "group.message", "text": body})
        self._loop.run_until_complete(sending)

    def close(self) -> None:
        """Close the connections to Redis."""
        self._loop.run_until_complete(self._layer.flush())
        self._loop.close()


@contextmanager
def relay_site(server: Server, sockets: int) -> Iterator[RelaySite]:
    """Run the example project, with a user for each WebSocket."""
    environment = {
        **os.environ,
        "DATABASE_URL": server.url(),
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "SECRET_KEY": "of the benchmark alone",
        "DEBUG": "0",
        "PLAIN_HTTP": "1",
        "ALLOWED_HOSTS": "127.0.0.1",
    }
    command = [sys.executable, "-m", "benchmarks.websocket_users", str(sockets)]
    tokens = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    with (
        _daphne("project.asgi:application", environment) as (pid, port),
        Node(SENDER, server.url()) as node,
    ):
        node.topic_notify(TOPIC)
        yield RelaySite(pid, port, node, json.loads(tokens.stdout))


@contextmanager
def group_site(layer: str, redis_port: int) -> Iterator[GroupSite]:
    """Run the application of Channels; raise PeerMissing if channels_redis is not installed."""
    try:
        import channels_redis  # noqa: F401
    except ImportError:
        install = "pip install -r benchmarks/requirements.txt"
        raise PeerMissing(f"channels-redis is not installed: {install}") from None
    environment = {**os.environ, "LAYER": layer, "REDIS_PORT": str(redis_port)}
    with _daphne("benchmarks.channels_application:application", environment) as (pid, port):
        group = GroupSite(pid, port, layer, redis_port)
        try:
            yield group
        finally:
            group.close()


@contextmanager
def _daphne(application: str, environment: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    # The socket listens before the process runs, so that early connections wait.
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        port = listening.getsockname()[1]
        command = [
            sys.executable, "-m", "daphne", "--fd", str(listening.fileno()),
            "--verbosity", "0", "--websocket_connect_timeout", "60", application,
        ]  # fmt: skip
        # Print the log only after an error: it is long when a thousand WebSockets end.
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
