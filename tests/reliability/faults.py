"""Faults that tests cause: restarts, locks, deadlocks, a full disk; Django on such a server."""

import os
import shutil
import signal
import subprocess
import threading
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
from tests.sql.simultaneous import in_background

FAST: Final = "stopped fast"
IMMEDIATE: Final = "stopped immediately"
BACKEND: Final = "a backend killed -9"
POSTMASTER: Final = "the postmaster killed -9"
RESTARTS: Final = (FAST, IMMEDIATE, BACKEND, POSTMASTER)

ANY_CLIENT = """
    SELECT pid FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1
"""
# A test that takes longer hangs, even on a busy machine.
TIMEOUT_SECONDS = 180.0
until = partial(wait_until, seconds=TIMEOUT_SECONDS)


def restart(server: Server, how: str) -> None:
    stop_or_kill(server, how)
    server.start()


def stop_or_kill(server: Server, how: str) -> None:
    """End all connections of a server; after BACKEND, the server restarts itself."""
    if how == FAST:
        server.stop("fast")
    elif how == IMMEDIATE:
        server.stop("immediate")
    elif how == BACKEND:
        kill_backend(server)
    else:
        os.kill(server.postmaster.pid, signal.SIGKILL)


def kill_backend(server: Server) -> None:
    """Kill the backend of any client; the postmaster then ends all others."""
    with psycopg.connect(server.superuser_url(), autocommit=True) as watcher:

        def is_killed() -> bool:
            for (pid,) in watcher.execute(ANY_CLIENT):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
            return False

        until(is_killed)
        # Wait until the postmaster ends this connection.
        with suppress(psycopg.OperationalError):
            watcher.execute("SELECT pg_sleep(%s)", [TIMEOUT_SECONDS])
        assert watcher.closed, "the postmaster has not ended the other backends"


@contextmanager
def restarting(
    server: Server, restarts: Sequence[str], progress: Callable[[], int], total: int
) -> Iterator[None]:
    """Restart a server at equal steps of progress, while the block runs."""
    has_failed = threading.Event()

    def act() -> None:
        for turn, how in enumerate(restarts, 1):
            while progress() < total * turn // (len(restarts) + 1):
                if has_failed.wait(0.005):
                    return
            restart(server, how)

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        try:
            yield
        except BaseException:
            has_failed.set()
            raise
        acting.result()


# Calls that wait for locks, and how they end: by a timeout, by another session, or by a deadlock.

LOCK_TABLES = "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"
TABLES = """
    SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.oid) FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p') AND c.relname ^@ 'psqlmessages_'
"""
# OFFSET 0: PostgreSQL must not call the function for other sessions.
END_WAITING = """
    SELECT count({}(waiting.pid)) FROM (
        SELECT a.pid FROM pg_stat_activity AS a
        WHERE a.datname = current_database() AND a.wait_event_type = 'Lock'
        OFFSET 0
    ) AS waiting
"""
BLOCKS_A_SESSION = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity AS a
        WHERE a.datname = current_database() AND %s = ANY (pg_blocking_pids(a.pid))
    )
"""


@contextmanager
def tables_locked(world: World) -> Iterator[None]:
    """Lock all tables in a transaction of the owner, so that every call waits."""
    with psycopg.connect(world.server.url(), autocommit=True) as owner:
        statement, is_locked = LOCK_TABLES.format(world.owner.query(TABLES)), False
        while not is_locked:
            owner.execute("BEGIN")
            try:
                owner.execute(statement)
                is_locked = True
            except psycopg.errors.DeadlockDetected:
                # Calls lock in another order.
                owner.execute("ROLLBACK")
        yield
        owner.execute("ROLLBACK")


@contextmanager
def cancel_waiting(world: World, function: str) -> Iterator[None]:
    """End each statement that waits for a lock, by a function of PostgreSQL."""
    must_stop = threading.Event()

    def run() -> None:
        with psycopg.connect(world.server.superuser_url, autocommit=True) as superuser:
            while not must_stop.wait(0.01):
                superuser.execute(END_WAITING.format(function))

    with in_background(run):
        try:
            yield
        finally:
            must_stop.set()


def count_logged(tested: TestedServer, text: str = "deadlock detected") -> int:
    return tested.server.home.log.read_text(errors="replace").count(text)


@contextmanager
def forced_deadlock(world: World, *, holds: str, wants: str) -> Iterator[None]:
    """Cause a deadlock: take a lock, and when a session waits for it, request another lock.

    This transaction has a longer deadlock_timeout, so PostgreSQL aborts the other one.
    """
    url = world.server.superuser_url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET deadlock_timeout = '60s'")
        connection.execute("BEGIN")
        connection.execute(holds)
        pid = connection.info.backend_pid

        def run() -> None:
            with psycopg.connect(url, autocommit=True) as watcher:
                until(lambda: watcher.execute(BLOCKS_A_SESSION, (pid,)).fetchone() == (True,))
            connection.execute(wants)
            connection.execute("ROLLBACK")

        with in_background(run):
            yield


# A disk that can be full: a small tmpfs, and a file that takes its free space.


class Disk:
    """A file system in memory, and the file that fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, spare: int = 0) -> int:
        """Take all free space but the spare bytes; return the number of bytes taken."""
        taken = 0
        with self._ballast.open("ab", buffering=0) as file:
            before = file.tell()
            for chunk in (b"\0" * 16384, b"\0" * 4096):
                with suppress(OSError):
                    while (written := os.write(file.fileno(), chunk)) == len(chunk):
                        taken += written
            taken = max(0, taken - spare)
            file.truncate(before + taken)
        return taken

    def free_up(self, size: int) -> None:
        os.truncate(self._ballast, self._ballast.stat().st_size - size)

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Mount a disk; skip the test if that is not permitted."""
    folder.mkdir()
    options = ("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    try:
        subprocess.run(["mount", *options], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"only root can mount a small disk: {getattr(error, 'stderr', error)}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def move_tables(tested: TestedServer, disk: Disk) -> None:
    """Move the tables onto the disk; the write-ahead log stays in its place."""
    place, owner = disk.folder / "tables", tested.server.home.data.stat()
    place.mkdir(mode=0o700)
    os.chown(place, owner.st_uid, owner.st_gid)
    with psycopg.connect(tested.server.superuser_url(), autocommit=True) as superuser:
        superuser.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        superuser.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s",
            (tested.database,),
        )
        superuser.execute(f"ALTER DATABASE {tested.database} SET TABLESPACE small")


@contextmanager
def log_moved(tested: TestedServer, disk: Disk) -> Iterator[None]:
    """Keep the write-ahead log on the disk for a while."""
    moved, usual = disk.folder / "wal", tested.server.home.data / "pg_wal"
    tested.server.stop()
    subprocess.run(["cp", "-a", str(usual), str(moved)], check=True)
    shutil.rmtree(usual)
    usual.symlink_to(moved)
    tested.server.start()
    yield
    tested.server.stop()
    usual.unlink()
    subprocess.run(["cp", "-a", str(moved), str(usual)], check=True)
    tested.server.start()


@contextmanager
def django_on(server: TestedServer) -> Iterator[None]:
    """Let Django use another server, as if DATABASES named it."""
    settings = connections.settings["default"]
    address = dj_database_url.parse(server.url())
    changed = {key: address[key] for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT")}
    before = {key: settings[key] for key in changed}
    connections["default"].close()
    settings.update(changed)
    try:
        yield
    finally:
        connections["default"].close()
        settings.update(before)


@contextmanager
def running_exchange(world: World, *rules: str) -> Iterator[Field]:
    """Define an exchange that copies the queue a to b and c; replace the rules by these."""
    with django_on(world.server):
        field = Field({"default": Bed(world.server)})
        try:
            field.define(x={"src": "a", "dst": ["b", "c"]})
            world.rules(*rules)
            yield field
        finally:
            field.close()


def copies(field: Field) -> list[list[str]]:
    return [sorted(field.default.bodies(queue)) for queue in "bc"]
