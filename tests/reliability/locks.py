"""Calls that wait for locks, and what ends them: time-outs, somebody, or a forced deadlock."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

import psycopg

from tests.conftest import TestedServer
from tests.reliability.restarts import until
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


class Ender:
    """Ends each statement that waits for a lock; `ended`: how many."""

    def __init__(self, url: str) -> None:
        self.url, self.ended, self.is_over = url, 0, threading.Event()

    def run(self, statement: str, like: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as superuser:
            while not self.is_over.wait(0.01):
                self.ended += superuser.execute(statement, (like,)).fetchone()[0]


@contextmanager
def ending(world: World, how: str = "pg_cancel_backend", like: str = "%") -> Iterator[Ender]:
    """Within, statements that wait for a lock are ended by a function of PostgreSQL."""
    ender = Ender(world.server.superuser_url)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ender.run, END.format(how), like)
        try:
            yield ender
        finally:
            ender.is_over.set()
            running.result()


WAITED_FOR = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity AS a
        WHERE a.datname = current_database() AND %s = ANY (pg_blocking_pids(a.pid))
    )
"""


def deadlocks(tested: TestedServer, text: str = "deadlock detected") -> int:
    """How many deadlocks, or other errors, the server has logged by now."""
    return tested.server.home.log.read_text(errors="replace").count(text)


class Opponent:
    """Holds what a statement locks; once somebody waits for it, wants what another one does.

    It never looks for a deadlock itself, so it is not the one to end.
    """

    def __init__(self, world: World, *, holds: str, wants: str) -> None:
        self._url, self._wants = world.server.superuser_url, wants
        self._connection = psycopg.connect(self._url, autocommit=True)
        self._connection.execute("SET deadlock_timeout = '60s'")
        self._connection.execute("BEGIN")
        self._connection.execute(holds)
        self.has_met = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        pid = self._connection.info.backend_pid
        with self._connection, psycopg.connect(self._url, autocommit=True) as watcher:
            until(lambda: watcher.execute(WAITED_FOR, (pid,)).fetchone() == (True,))
            self._connection.execute(self._wants)
            self._connection.execute("ROLLBACK")
            self.has_met = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(90)
