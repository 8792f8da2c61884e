"""Calls that wait for locks, and what ends them: time-outs, somebody, or a forced deadlock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.conftest import TestedServer
from tests.sql.conftest import World

# Whatever is called then waits.
EVERYTHING = "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"
TABLES = """
    SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.oid) FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p') AND c.relname ^@ 'psqlmessages_'
"""
# OFFSET 0: the function is called for none but those.
END = """
    SELECT count({}(waiting.pid)) FROM (
        SELECT a.pid FROM pg_stat_activity AS a
        WHERE a.datname = current_database() AND a.wait_event_type = 'Lock' AND a.query LIKE %s
        OFFSET 0
    ) AS waiting
"""


@contextmanager
def held(world: World, what: str = "") -> Iterator[None]:
    """Within, the owner sits in a transaction that locks all tables, or what is given."""
    with psycopg.connect(world.server.url(), autocommit=True) as owner:
        lock(owner, what or EVERYTHING.format(world.owner.query(TABLES)))
        yield
        owner.execute("ROLLBACK")


def lock(owner: psycopg.Connection, statement: str) -> None:
    """Lock in a transaction; again where that is a deadlock with calls of another order."""
    while True:
        owner.execute("BEGIN")
        try:
            owner.execute(statement)
        except psycopg.errors.DeadlockDetected:
            owner.execute("ROLLBACK")
        else:
            return


class Canceller:
    """Somebody who ends each statement that waits for a lock: `how` is a function of PostgreSQL."""

    def __init__(self, server: TestedServer, how: str, like: str) -> None:
        self.ended = 0
        self._server = server
        self._statement = END.format(how)
        self._like = like
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with psycopg.connect(self._server.superuser_url, autocommit=True) as superuser:
            while not self._stop.wait(0.01):
                row = superuser.execute(self._statement, (self._like,)).fetchone()
                self.ended += row[0] if row else 0

    def __enter__(self) -> Canceller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def cancelling(world: World, like: str = "%") -> Canceller:
    """Cancel statements that wait for a lock, for a while."""
    return Canceller(world.server, "pg_cancel_backend", like)


def terminating(world: World, like: str = "%") -> Canceller:
    """End the sessions of such statements, for a while."""
    return Canceller(world.server, "pg_terminate_backend", like)


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
    """Holds what a statement locks; once somebody waits for it, wants what another one does.

    It never looks for a deadlock itself, so it is not the one to end.
    """

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
