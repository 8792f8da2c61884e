"""Upgrades: functions are replaced under traffic, removed and made again; what is lost is told."""

from collections.abc import Callable
from typing import Any

import pytest
import pytest_django
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from psqlmessages import MessagesError, install
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.reliability.crowd import crowd
from tests.reliability.locks import deadlocks
from tests.reliability.migrating import ALIAS, LATEST, contents, migrate, owners_database
from tests.reliability.work import EXACT, LIVE, Work
from tests.sql.conftest import World

FAULT = "an upgrade"
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
MODES = {
    "shared": ["ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"],
    "alone": ["AccessExclusiveLock"],
}
ACTS: dict[str, tuple[str, Callable[[BaseDatabaseWrapper], None]]] = {
    "install": ("some", install.install),
    "remove": ("all", install.remove),
}


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
    counted(FAULT, "functions removed and made again", missed=BACKLOG, untold=0)


def replace(own: TestedServer, work: Work, rounds: int) -> None:
    """Install again and again under traffic."""
    with owners_database(own) as database:
        for _ in range(rounds):
            with transaction.atomic(using=ALIAS):
                install.install(database)
            work.go_on(20)


def test_calls_wait_while_functions_are_replaced_and_none_fails(
    own: TestedServer,
    own_world: World,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    rounds, before = size(2, 10), deadlocks(own_world)
    with django_db_blocker.unblock(), Work(own_world, *EXACT, *LIVE) as work:
        work.go_on(20)
        replace(own, work, rounds)
    counted(
        FAULT, "functions are replaced under streams, queues and live messages",
        installations=rounds, **work.counts(), refused=work.refused.total(),
        longest_wait_seconds=work.longest_seconds,
    )  # fmt: skip
    work.check()
    assert not work.refused
    assert deadlocks(own_world) == before


@pytest.mark.nightly  # eight processes start; every day the test above
@pytest.mark.timeout(300)
def test_a_crowd_goes_on_while_functions_are_replaced_removed_and_made_again(
    own: TestedServer,
    own_world: World,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    names = ("stream of Node", "stream of AsyncNode", "Node.consume", "AsyncNode.consume", *LIVE)
    before, rounds, removals = deadlocks(own_world), size(2, 20), size(1, 5)
    with django_db_blocker.unblock(), crowd(own, tmp_path_factory.mktemp("site")) as made:
        made.exercise("before")
        with Work(own_world, *names, forgives=(MessagesError,)) as work:
            replace(own, work, rounds)
            refused, longest = work.refused.total(), work.longest_seconds
            # Large bodies are in tables that go with the functions.
            work.sends_long = False
            work.go_on(100)
            with owners_database(own):
                for _ in range(removals):
                    migrate("0002_queues")
                    migrate(LATEST)
                    # The exchange and the user's identity went with their tables.
                    made.write_definitions()
                    work.go_on(20)
        made.exercise("after")
    streams = [each for each in work.readers if not each.queue and not each.is_live]
    missed = sum(len(work.missing(each)) for each in streams)
    others = {each.name: len(work.missing(each)) for each in work.readers if each not in streams}
    doubled = sum(work.doubled(each) for each in work.readers if not each.may_repeat)
    counted(
        FAULT, "functions replaced, removed and made again under 36 nodes, an exchange, `run` and a"
        " site", installations=rounds, refused_meanwhile=refused, longest_wait_seconds=longest,
        removals=removals, refused=work.refused.total(), messages=work.counts()["messages"],
        lost=sum(others.values()), doubled=doubled, deadlocks=deadlocks(own_world) - before,
        missed_in_the_stream_untold=0 if work.is_told else missed,
    )  # fmt: skip
    assert refused == 0
    assert others == dict.fromkeys(others, 0)
    assert (doubled, deadlocks(own_world) - before) == (0, 0)
    assert work.is_told or not missed


def test_what_calls_wait_for_is_locked_at_first(
    own: TestedServer, own_world: World, django_db_blocker: pytest_django.DjangoDbBlocker
) -> None:
    """What is locked later, while calls that hold it wait for the rest, ends in a deadlock."""
    later: dict[tuple[str, str], set[str]] = {}
    with django_db_blocker.unblock(), owners_database(own) as database:
        for (name, (which, act)), (kind, modes) in (
            (each, mode) for each in ACTS.items() for mode in MODES.items()
        ):
            database.set_autocommit(False)
            with database.cursor() as cursor:
                cursor.execute(RELATIONS)
                there = dict(cursor.fetchall())
                install.lock(cursor, which)
                first = locked(cursor, modes)
                act(database)
                found = (locked(cursor, modes) - first) & there.keys()
            database.rollback()
            database.set_autocommit(True)
            assert first
            later[name, kind] = {there[oid] for oid in found}
    assert {key: names for key, names in later.items() if names} == {}
    assert len(later) == 4


def locked(cursor: Any, modes: list[str]) -> set[int]:
    """The relations that are locked so."""
    cursor.execute(LOCKED, [modes])
    return {oid for (oid,) in cursor.fetchall()}
