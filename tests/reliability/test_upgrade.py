"""Upgrades: functions are replaced under traffic, removed and made again; what is lost is told."""

import threading
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg
import pytest
import pytest_django
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from psqlmessages import install
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.reliability.migrating import ALIAS, LATEST, contents, migrate, owners_database
from tests.sql.conftest import Program, World

BACKLOG = 10
RULES = ("user1 PUB Topic T W 10", "user2 SUB Topic T R 10", "user1 PUB Queue Q RW 1")


RELATIONS = """
    SELECT c.oid, c.oid::regclass::text FROM pg_class AS c
    WHERE c.oid >= 16384 AND c.relkind IN ('r', 'p', 'S', 'v')
      -- A sequence of an identity column is locked after its table by everybody.
      AND NOT (c.relkind = 'S' AND EXISTS (
          SELECT FROM pg_depend AS d
          WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'i'
      ))
"""
# Of the rest of the modes none makes a call wait.
LOCKED = """
    SELECT l.relation FROM pg_locks AS l
    WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.mode = ANY (%s)
"""
SHARED = ["ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"]


class Callers:
    """Programs that call all the time: what they called, what failed, and the longest wait."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.longest_seconds = 0.0
        self.over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, program: Program, name: str, call: Callable[[Program], object]) -> None:
        """Call in a thread until it is over."""

        def run() -> None:
            while not self.over.is_set():
                began = monotonic()
                try:
                    call(program)
                    self.done[name] += 1
                except psycopg.Error as error:
                    self.failed[f"{name}: {error}"] += 1
                self.longest_seconds = max(self.longest_seconds, monotonic() - began)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        """End them all."""
        self.over.set()
        for thread in self._threads:
            thread.join(30)


def test_functions_that_were_removed_come_back_and_subscribers_are_told_what_they_missed(
    own: TestedServer,
    own_world: World,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    own_world.rules(*RULES)
    publisher, reader = own_world.program("user1"), own_world.program("user2")
    reader.read("SUB", "T")
    for number in range(2 * BACKLOG):
        publisher.ok("publish", "PUB", "T", str(number))
    assert len(reader.got("SUB", "T", 60, BACKLOG)) == BACKLOG
    publisher.ok("push", "PUB", "Q", "kept")
    with django_db_blocker.unblock(), owners_database(own) as database:
        before = contents(database)
        migrate("0002_queues")
        migrate(LATEST)
        after = contents(database)
    kept = ("psqlmessages_auth", "psqlmessages_topic", "psqlmessages_element", "psqlmessages_queue")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert not after["psqlmessages_streammessage"]
    publisher.ok("publish", "PUB", "T", "after")
    assert reader.got("SUB", "T") == ["after"]
    assert reader.ok("subscription", "SUB", "T")["Recovered"] is False
    counted("an upgrade", "functions removed and made again", missed=BACKLOG, untold=0)


def test_calls_wait_for_an_installation_and_none_fails(
    own: TestedServer,
    own_world: World,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    own_world.rules(*RULES)
    callers, rounds = Callers(), size(3, 10)
    own_world.program("user2").read("SUB", "T")
    for _ in range(2):
        callers.start(
            own_world.program("user1"), "publish", lambda p: p.ok("publish", "PUB", "T", "x")
        )
        callers.start(own_world.program("user1"), "push", lambda p: p.ok("push", "PUB", "Q", "x"))
    callers.start(own_world.program("user1"), "pop", lambda p: p.elements("pop", "PUB", "Q"))
    try:
        with django_db_blocker.unblock(), owners_database(own) as database:
            for _ in range(rounds):
                with transaction.atomic(using=ALIAS):
                    install.install(database)
    finally:
        callers.stop()
    got = sum(iter(lambda: len(own_world.program("user2").got("SUB", "T")), 0))
    assert not callers.failed
    assert got == callers.done["publish"]
    counted(
        "an upgrade", "calls while functions are replaced", installations=rounds,
        calls=callers.done.total(), failed=0, lost=0, longest_wait_seconds=callers.longest_seconds,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("which", "act"),
    [("some", install.install), ("all", install.remove)],
    ids=("install", "remove"),
)
@pytest.mark.parametrize("modes", [SHARED, ["AccessExclusiveLock"]], ids=("shared", "alone"))
def test_what_calls_wait_for_is_locked_at_first(
    own: TestedServer,
    own_world: World,
    django_db_blocker: pytest_django.DjangoDbBlocker,
    which: str,
    act: Callable[[BaseDatabaseWrapper], None],
    modes: list[str],
) -> None:
    """What is locked later, while calls that hold it wait for the rest, ends in a deadlock."""
    with django_db_blocker.unblock(), owners_database(own) as database:
        database.set_autocommit(False)
        with database.cursor() as cursor:
            cursor.execute(RELATIONS)
            there = dict(cursor.fetchall())
            install.lock(cursor, which)
            first = locked(cursor, modes)
            act(database)
            later = locked(cursor, modes) - first
        database.rollback()
    assert first
    assert {there[oid] for oid in later & there.keys()} == set()


def locked(cursor: Any, modes: list[str]) -> set[int]:
    """The relations that are locked so."""
    cursor.execute(LOCKED, [modes])
    return {oid for (oid,) in cursor.fetchall()}
