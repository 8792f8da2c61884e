"""doctor: what holds the notification queue back, on a server of its own with a small queue."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from project.postgres import Server, binaries_of_wheel
from psqlmessages.cli import doctor_checks
from psqlmessages.cli.doctor_checks import Finding, FindingState, commit_lock, queue
from tests.django.conftest import finding_of
from tests.django.waiting import wait_until

WAITS = "SELECT wait_event = %s FROM pg_stat_activity WHERE pid = %s"
IS_FILLED = "SELECT pg_notification_queue_usage() >= 0.2"
RunCheck = Callable[..., Finding]


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with the smallest notification queue that PostgreSQL allows: 512 KiB."""
    folder = Path(tempfile.mkdtemp(prefix="queue-"))
    server = Server(folder / "server", binaries_of_wheel(18), {"max_notify_queue_pages": "64"})
    server.start()
    yield server
    server.stop("immediate")
    shutil.rmtree(folder)


@pytest.fixture
def superuser(small: Server) -> Iterator[psycopg.Connection]:
    with psycopg.connect(small.superuser_url(), autocommit=True) as connection:
        yield connection


@pytest.fixture
def listener(small: Server, superuser: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A listener that sits in a transaction, and so hears nothing."""
    connection = psycopg.connect(small.superuser_url(), application_name="forgetful")
    pid = connection.info.backend_pid
    connection.execute("LISTEN news")
    connection.commit()
    connection.execute("SELECT 1")
    yield connection
    connection.close()
    # It holds the queue back until it has ended.
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
    wait_for(superuser, gone, pid)


@pytest.fixture
def examined(small: Server, monkeypatch: pytest.MonkeyPatch) -> RunCheck:
    """What a check finds as the superuser, however short the time."""
    monkeypatch.setattr(doctor_checks, "MIN_OPEN_SECONDS", 0.0)
    monkeypatch.setattr(doctor_checks, "MIN_LOCK_SECONDS", 0.0)
    return lambda check, address=None: finding_of(check, address or small.superuser_url())


@contextmanager
def committing(server: Server, statement: str = "SELECT 1") -> Iterator[int]:
    """A transaction that notifies, at its commit in a thread of its own until the end; its pid."""
    with psycopg.connect(server.superuser_url()) as connection, ThreadPoolExecutor(1) as thread:
        connection.execute(statement)
        connection.execute("NOTIFY news")
        thread.submit(connection.commit)
        yield connection.info.backend_pid


def is_true(superuser: psycopg.Connection, condition: str, *values: object) -> bool:
    return superuser.execute(condition, values).fetchone() == (True,)


def wait_for(superuser: psycopg.Connection, condition: str, *values: object) -> None:
    wait_until(lambda: is_true(superuser, condition, *values))


def fill(connection: psycopg.Connection) -> None:
    for number in range(16):  # a quarter of the queue
        connection.execute("SELECT pg_notify('news', %s)", (f"{number}{'x' * 7900}",))


def test_a_queue_held_back_names_who_does_it_and_what_mends_it_does(
    small: Server, superuser: psycopg.Connection, listener: psycopg.Connection, examined: RunCheck
) -> None:
    fill(superuser)
    found = examined(queue)
    pid = listener.info.backend_pid
    assert found.state is FindingState.WRONG
    assert f"perhaps held back by pid {pid} (postgres, forgetful)" in found.found
    assert "is idle in transaction" in found.found
    assert f"SELECT pg_terminate_backend({pid})" in found.fix
    # A role that sees nobody is told what it lacks.
    blind = examined(queue, small.url())
    assert blind.fix.startswith("GRANT pg_read_all_stats TO psqlmessages")
    superuser.execute(found.fix.partition(";")[0])
    wait_for(superuser, "SELECT pg_notification_queue_usage() = 0")
    assert examined(queue).state is FindingState.OK


def test_a_listener_that_does_not_read_is_told_from_one_that_sits_in_a_transaction(
    superuser: psycopg.Connection, listener: psycopg.Connection, examined: RunCheck
) -> None:
    listener.commit()
    pid = listener.info.backend_pid

    def is_stuck() -> bool:
        """Whether the buffers between the server and the listener are full, and then the queue."""
        if not is_true(superuser, IS_FILLED):
            fill(superuser)
        return is_true(superuser, IS_FILLED) and is_true(superuser, WAITS, "ClientWrite", pid)

    wait_until(is_stuck)
    found = examined(queue)
    assert f"held back by pid {pid} (postgres, forgetful)" in found.found
    assert "has not read its notifications" in found.found


def test_a_commit_that_hangs_and_has_all_who_notify_wait(
    small: Server, superuser: psycopg.Connection, examined: RunCheck
) -> None:
    superuser.execute("CREATE TABLE IF NOT EXISTS written (id int)")
    superuser.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    superuser.execute("SELECT pg_reload_conf()")

    def shown() -> str:
        with psycopg.connect(small.superuser_url()) as connection:
            return connection.execute("SHOW synchronous_standby_names").fetchone()[0]

    wait_until(shown)
    # The checkpointer, which tells commits to wait, looks at new settings first.
    superuser.execute("CHECKPOINT")
    try:
        with committing(small, "INSERT INTO written VALUES (1)") as pid:
            wait_for(superuser, WAITS, "SyncRep", pid)
            with committing(small) as waiting:
                wait_for(superuser, WAITS, "object", waiting)
                found = examined(commit_lock)
                superuser.execute(found.fix.partition(";")[0])
    finally:
        superuser.execute("ALTER SYSTEM RESET synchronous_standby_names")
        superuser.execute("SELECT pg_reload_conf()")
    assert found.state is FindingState.WRONG
    assert f"for pid {pid} (which waits for SyncRep)" in found.found
    assert examined(commit_lock).state is FindingState.OK
