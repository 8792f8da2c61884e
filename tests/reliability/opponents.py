"""Forced deadlocks: an opponent who locks in the opposite order, and is not the one to end."""

from __future__ import annotations

import threading

import psycopg

from tests.sql.conftest import World

# Those under test look for a deadlock after so long; an opponent never does.
QUICK = {"deadlock_timeout": "300ms"}
WAITED_FOR = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity AS a
        WHERE a.datname = current_database() AND %s = ANY (pg_blocking_pids(a.pid))
    )
"""


def deadlocks(world: World) -> int:
    """How many deadlocks the server has ended by now."""
    return world.server.server.home.log.read_text(errors="replace").count("deadlock detected")


class Opponent:
    """Holds what a statement locks; once somebody waits for it, wants what another one does."""

    def __init__(self, world: World, *, holds: str, wants: str) -> None:
        self._url = world.server.superuser_url
        self._holds, self._wants = holds, wants
        self._is_ready = threading.Event()
        self.has_met = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with (
            psycopg.connect(self._url, autocommit=True) as connection,
            psycopg.connect(self._url, autocommit=True) as watcher,
        ):
            connection.execute("SET deadlock_timeout = '60s'")
            connection.execute("BEGIN")
            connection.execute(self._holds)
            self._is_ready.set()
            pause = threading.Event()
            for _ in range(12_000):
                row = watcher.execute(WAITED_FOR, (connection.info.backend_pid,)).fetchone()
                if row and row[0]:
                    break
                pause.wait(0.005)
            else:
                return
            connection.execute(self._wants)
            connection.execute("ROLLBACK")
            self.has_met = True

    def __enter__(self) -> Opponent:
        self._thread.start()
        assert self._is_ready.wait(90)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
