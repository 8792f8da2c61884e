"""What holds the notification queue back: a listener in a transaction, or one that is stopped."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import errors

from project.postgres.binaries import major_version
from tests.conftest import TestedServer

# The least that PostgreSQL allows: 512 KiB.
SMALL_QUEUE = {"max_notify_queue_pages": "64"}
FILLING = "SELECT pg_notify('filling', repeat('x', 7900))"
# Of a page each, and there are no more.
PAGES = 64


def need_small_queue(binaries: Path) -> None:
    """Skip on a PostgreSQL whose queue has always 8 GB."""
    if major_version(binaries) < 17:
        pytest.skip("max_notify_queue_pages came with PostgreSQL 17")


@contextmanager
def sitting_in_a_transaction(server: TestedServer) -> Iterator[psycopg.Connection]:
    """Listen, and sit in a transaction: from here on nothing leaves the queue."""
    holder = psycopg.connect(server.superuser_url, application_name="forgetful")
    holder.execute("LISTEN anything")
    holder.commit()
    holder.execute("SELECT 1")
    try:
        yield holder
    finally:
        holder.close()


def fill(server: TestedServer) -> int:
    """Notify until the queue is full; how often that was."""
    with psycopg.connect(server.superuser_url, autocommit=True) as connection:
        for number in range(2 * PAGES):
            try:
                connection.execute(FILLING)
            except errors.ProgramLimitExceeded:
                return number
    raise AssertionError("the notification queue did not fill")


@contextmanager
def full_queue(server: TestedServer) -> Iterator[psycopg.Connection]:
    """A notification queue that is full, until whoever holds it back is gone."""
    with sitting_in_a_transaction(server) as holder:
        assert fill(server) > PAGES // 2
        yield holder


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process that reads no more from its sockets, and let it go on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
