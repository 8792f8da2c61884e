"""Moments that another thread waits for before it acts: no test guesses how long they take."""

from collections.abc import Callable
from threading import Event, Thread

import psycopg

SOMEBODY_SLEEPS = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND pid = coalesce(%s, pid)
    )
"""


def when(moment: Callable[[], object], act: Callable[[], object]) -> None:
    """Act in another thread, once a call has returned."""

    def wait_and_act() -> None:
        moment()
        act()

    Thread(target=wait_and_act, daemon=True).start()


def somebody_sleeps(superuser: psycopg.Connection, pid: int | None = None) -> Callable[[], None]:
    """Make a call that returns when a session of the server, or this one, is within `pg_sleep`."""

    def wait() -> None:
        pause = Event()
        while superuser.execute(SOMEBODY_SLEEPS, (pid,)).fetchone() != (True,):
            pause.wait(0.01)

    return wait
