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
from tests.reliability.counts import size

# 4 or 32 MB.
PAGES = size(512, 4096)
SMALL_QUEUE = {"max_notify_queue_pages": str(PAGES)}
FILLING = """
    SELECT pg_notify('filling', repeat('x', 7900) || n) FROM generate_series(1, %s) AS n
"""


def need_small_queue(binaries: Path) -> None:
    """Skip on a PostgreSQL whose queue has always 8 GB."""
    if major_version(binaries) < 17:
        pytest.skip("max_notify_queue_pages came with PostgreSQL 17")


@contextmanager
def full_queue(server: TestedServer) -> Iterator[None]:
    """A notification queue that is full, until whoever holds it back is gone."""
    with (
        psycopg.connect(server.superuser_url, application_name="forgetful") as holder,
        psycopg.connect(server.superuser_url, autocommit=True) as filler,
    ):
        holder.execute("LISTEN anything")
        holder.commit()
        # It listens, and sits in a transaction: from here on nothing leaves the queue.
        holder.execute("SELECT 1")
        number = 0
        for batch in (PAGES // 4, 16, 1):
            try:
                for _ in range(2 * PAGES):
                    filler.execute(FILLING, [batch])
                    number += batch
            except errors.ProgramLimitExceeded:
                continue
            raise AssertionError("the notification queue did not fill")
        assert number > PAGES // 2
        yield
        holder.rollback()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process that reads no more from its sockets, and let it go on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
