"""The ways in which a PostgreSQL goes away and comes back."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import psycopg

from project.postgres import Server
from tests.django.waiting import wait_until

FAST: Final = "stopped fast"
IMMEDIATE: Final = "stopped immediately"
BACKEND: Final = "a backend killed -9"
POSTMASTER: Final = "the postmaster killed -9"
WAYS: Final = (FAST, IMMEDIATE, BACKEND, POSTMASTER)

CLIENT = """
    SELECT pid FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1
"""
# Whatever waits for longer hangs, however busy the machine is.
LONG = 180.0
until = partial(wait_until, seconds=LONG)


def restart(server: Server, way: str) -> None:
    go_away(server, way)
    server.start()


def go_away(server: Server, way: str) -> None:
    """Let it end all its connections; after BACKEND it comes back by itself."""
    if way == FAST:
        server.stop("fast")
    elif way == IMMEDIATE:
        server.stop("immediate")
    elif way == BACKEND:
        kill_a_backend(server)
    else:
        os.kill(server.postmaster.pid, signal.SIGKILL)


def kill_a_backend(server: Server) -> None:
    """Kill the backend of any client, at which the postmaster ends all others."""
    with psycopg.connect(server.superuser_url(), autocommit=True) as watcher:

        def is_killed() -> bool:
            for (pid,) in watcher.execute(CLIENT):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
            return False

        until(is_killed)
        # It ends with this connection, which the postmaster ends.
        with suppress(psycopg.OperationalError):
            watcher.execute("SELECT pg_sleep(%s)", [LONG])
        assert watcher.closed, "the postmaster has not noticed"


@contextmanager
def restarting(
    server: Server, ways: Sequence[str], number: Callable[[], int], total: int
) -> Iterator[None]:
    is_over = threading.Event()

    def act() -> None:
        for turn, way in enumerate(ways, 1):
            while number() < total * turn // (len(ways) + 1):
                if is_over.wait(0.005):
                    return
            restart(server, way)

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        try:
            yield
        except BaseException:
            is_over.set()
            raise
        acting.result()
