"""Moments that another thread waits for before it acts: no test guesses how long they take."""

from collections.abc import Callable
from threading import Thread

import psycopg

from tests.django.waiting import wait_until

SOMEBODY_SLEEPS = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND pid = coalesce(%s, pid)
    )
"""


def when(moment: Callable[[], object], act: Callable[[], object]) -> Thread:
    """Act in another thread, once a call has returned."""

    def wait_and_act() -> None:
        moment()
        act()

    thread = Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def somebody_sleeps(superuser: psycopg.Connection, pid: int | None = None) -> Callable[[], object]:
    """Make a call that returns when a session of the server, or this one, is within `pg_sleep`."""
    return lambda: wait_until(lambda: superuser.execute(SOMEBODY_SLEEPS, (pid,)).fetchone()[0])
