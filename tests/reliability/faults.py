"""Faults and what undoes them: restarts, locks, deadlocks, a full disk; Django on such a server."""

import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import dj_database_url
import psycopg
import pytest
from django.db import connections

from project.postgres import Server
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.exchanges.field import Bed, Field
from tests.sql.conftest import World

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


# Calls that wait for locks, and what ends them: timeouts, somebody, or a deadlock

# Every call then waits.
EVERYTHING = "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"
TABLES = """
    SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.oid) FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p') AND c.relname ^@ 'psqlmessages_'
"""
# OFFSET 0: the function is called for no other session.
END = """
    SELECT count({}(waiting.pid)) FROM (
        SELECT a.pid FROM pg_stat_activity AS a
        WHERE a.datname = current_database() AND a.wait_event_type = 'Lock' AND a.query LIKE %s
        OFFSET 0
    ) AS waiting
"""
WAITED_FOR = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity AS a
        WHERE a.datname = current_database() AND %s = ANY (pg_blocking_pids(a.pid))
    )
"""


@contextmanager
def held(world: World) -> Iterator[None]:
    """Let a transaction of the owner lock all tables."""
    with psycopg.connect(world.server.url(), autocommit=True) as owner:
        statement, is_held = EVERYTHING.format(world.owner.query(TABLES)), False
        while not is_held:
            owner.execute("BEGIN")
            try:
                owner.execute(statement)
                is_held = True
            except psycopg.errors.DeadlockDetected:
                # With calls that lock in another order.
                owner.execute("ROLLBACK")
        yield
        owner.execute("ROLLBACK")


@contextmanager
def ending(world: World, how: str = "pg_cancel_backend", like: str = "%") -> Iterator[Counter[str]]:
    """End each statement that waits for a lock, by a function of PostgreSQL; count them."""
    ended, is_over = Counter[str](), threading.Event()

    def run() -> None:
        with psycopg.connect(world.server.superuser_url, autocommit=True) as superuser:
            while not is_over.wait(0.01):
                ended[how] += superuser.execute(END.format(how), (like,)).fetchone()[0]

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield ended
        finally:
            is_over.set()
            running.result()


def deadlocks(tested: TestedServer, text: str = "deadlock detected") -> int:
    """How many deadlocks, or other errors, the server has logged by now."""
    return tested.server.home.log.read_text(errors="replace").count(text)


@contextmanager
def opposed(world: World, *, holds: str, wants: str) -> Iterator[None]:
    """Cause a deadlock: hold a lock, and when a session waits for it, want another lock.

    This transaction does not look for deadlocks, so PostgreSQL aborts the other one.
    """
    url = world.server.superuser_url
    with psycopg.connect(url, autocommit=True) as connection, ThreadPoolExecutor(1) as pool:
        connection.execute("SET deadlock_timeout = '60s'")
        connection.execute("BEGIN")
        connection.execute(holds)
        pid = connection.info.backend_pid

        def run() -> None:
            with psycopg.connect(url, autocommit=True) as watcher:
                until(lambda: watcher.execute(WAITED_FOR, (pid,)).fetchone() == (True,))
            connection.execute(wants)
            connection.execute("ROLLBACK")

        running = pool.submit(run)
        yield
        running.result(90)


# A disk that can be full: a small tmpfs, and a file that takes what is left of it


class Disk:
    """A file system in memory, of so many megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, spare: int = 0) -> int:
        """Take all that is left, once more too, but for some bytes; return how many that were."""
        taken = 0
        with self._ballast.open("ab", buffering=0) as file:
            before = file.tell()
            for chunk in (b"\0" * 16384, b"\0" * 4096):
                while (written := _written(file.fileno(), chunk)) == len(chunk):
                    taken += written
            taken = max(0, taken - spare)
            file.truncate(before + taken)
        return taken

    def give(self, size: int) -> None:
        os.truncate(self._ballast, self._ballast.stat().st_size - size)

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


def _written(descriptor: int, chunk: bytes) -> int:
    try:
        return os.write(descriptor, chunk)
    except OSError:
        return 0


@contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Mount one; the test is skipped where that is not permitted."""
    folder.mkdir()
    how = ("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    try:
        subprocess.run(["mount", *how], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", error)
        pytest.skip(f"a disk that can be full is mounted by root: {why}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def move_tables(own: TestedServer, disk: Disk) -> None:
    """Move the database onto the disk; the log of changes and the rest stay where they are."""
    place, owner = disk.folder / "tables", own.server.home.data.stat()
    place.mkdir(mode=0o700)
    os.chown(place, owner.st_uid, owner.st_gid)
    with psycopg.connect(own.server.superuser_url(), autocommit=True) as superuser:
        superuser.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        superuser.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s",
            (own.database,),
        )
        superuser.execute(f"ALTER DATABASE {own.database} SET TABLESPACE small")


def move_log(own: TestedServer, disk: Disk) -> None:
    """Move the log of changes (WAL) onto the disk."""
    own.server.stop()
    there, here = disk.folder / "wal", own.server.home.data / "pg_wal"
    subprocess.run(["cp", "-a", str(here), str(there)], check=True)
    shutil.rmtree(here)
    here.symlink_to(there)
    own.server.start()


def move_log_back(own: TestedServer, disk: Disk) -> None:
    own.server.stop()
    there, here = disk.folder / "wal", own.server.home.data / "pg_wal"
    here.unlink()
    subprocess.run(["cp", "-a", str(there), str(here)], check=True)
    own.server.start()


# Django and an exchange on a server of a test's own


@contextmanager
def django_at(own: TestedServer) -> Iterator[None]:
    """Let the project use a server of the test's own, as if DATABASES named it."""
    known = connections.settings["default"]
    address = dj_database_url.parse(own.url())
    changed = {key: address[key] for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT")}
    before = {key: known[key] for key in changed}
    connections["default"].close()
    known.update(changed)
    try:
        yield
    finally:
        connections["default"].close()
        known.update(before)


@contextmanager
def exchange(world: World, *rules: str) -> Iterator[Field]:
    """An exchange that copies the queue a to b and c; other rules than these are removed."""
    with django_at(world.server):
        field = Field({"default": Bed(world.server)})
        try:
            field.define(x={"src": "a", "dst": ["b", "c"]})
            world.rules(*rules)
            yield field
        finally:
            field.close()


def copies(field: Field) -> list[list[str]]:
    return [sorted(field.default.bodies(queue)) for queue in "bc"]
