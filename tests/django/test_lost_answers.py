"""Django's connections: a lost answer ends the wait for it, a slow one does not."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any

import psycopg
import pytest
import pytest_django
from django.contrib.auth.models import Group
from django.db import OperationalError, connections, transaction
from pytest_django import Settings

from project.postgres import Server
from psqlmessages import lost_answers
from tests.client.proxy import Lost, Proxy
from tests.conftest import TestedServer
from tests.exchanges.conftest import namespace
from tests.sql.conftest import World

# More than ANSWER_SECONDS, and the three times that the server is asked.
SLOW = "SELECT pg_sleep(4)"
SECONDS = 30
IS_THERE = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
IS_SLEEPING = "SELECT count(*) = 1 FROM pg_stat_activity WHERE query = %s AND state = 'active'"


@pytest.fixture
def world(server: TestedServer) -> Iterator[World]:
    """An empty message system, and no group."""
    world = World(server)
    yield world
    world.owner.connection.execute("DELETE FROM auth_group")
    world.close()


@pytest.fixture
def far(
    world: World,
    proxy: Proxy,
    settings: Settings,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> Iterator[ThreadPoolExecutor]:
    """A thread whose connection "far" of Django's leads through the proxy."""
    settings.PSQLMESSAGES = {"NODE": "shop", "ANSWER_SECONDS": 1}
    place = {"HOST": "127.0.0.1", "PORT": str(proxy.port), "OPTIONS": {"connect_timeout": 2}}
    with (
        django_db_blocker.unblock(),
        namespace("far", **place),
        ThreadPoolExecutor(1) as thread,
    ):
        yield thread
        thread.submit(connections.close_all).result(SECONDS)


def fetched(query: str) -> Any:
    with connections["far"].cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchone()[0]


def made(name: str, query: str = "SELECT 1") -> None:
    with transaction.atomic(using="far"):
        Group.objects.using("far").create(name=name)
        fetched(query)


def notified() -> list[psycopg.Notify]:
    own = connections["far"].connection
    own.autocommit = True
    own.execute("LISTEN slow")
    return list(own.notifies(timeout=4, stop_after=1))


# Twice eight seconds of waiting: the setting is nightly.
@pytest.mark.parametrize("tracks", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_a_slow_query_is_waited_for_and_so_are_notifications(
    world: World, far: ThreadPoolExecutor, tracks: str
) -> None:
    before = lost_answers.closed()
    alter = f"ALTER ROLE {Server.owner} SET track_activities = {tracks}"
    world.superuser().connection.execute(alter)
    try:
        assert far.submit(fetched, SLOW).result(SECONDS) == ""
        assert far.submit(notified).result(SECONDS) == []
        assert far.submit(fetched, "SELECT 1").result(SECONDS) == 1
    finally:
        world.superuser().connection.execute(f"ALTER ROLE {Server.owner} RESET track_activities")
    assert lost_answers.closed() == before


# What only requests lose is lost with all of them too, and waits seconds.
@pytest.mark.parametrize(
    "lost", [pytest.param("requests", marks=pytest.mark.nightly), "answers", "all"]
)
def test_a_lost_answer_is_an_error_and_the_next_query_uses_a_new_connection(
    world: World, far: ThreadPoolExecutor, proxy: Proxy, lost: Lost
) -> None:
    before = lost_answers.closed()
    pid = far.submit(fetched, "SELECT pg_backend_pid()").result(SECONDS)
    if lost == "answers":
        cut = far.submit(made, "cut", SLOW)
        world.wait_for(IS_SLEEPING, SLOW)
        proxy.stall(lost)
    else:
        proxy.stall(lost)
        cut = far.submit(made, "cut")
    began = monotonic()
    assert isinstance(failure(cut), OperationalError)
    assert monotonic() - began < SECONDS
    assert lost_answers.closed() == before + 1
    # Nothing that it had locked stays so.
    world.wait_for(f"SELECT NOT ({IS_THERE})", pid)
    far.submit(connections.close_all).result(SECONDS)
    far.submit(made, "cut").result(SECONDS)
    assert world.owner.query("SELECT count(*) FROM auth_group") == 1


@pytest.mark.nightly  # it waits for every time-out of new connections
def test_a_server_that_cannot_be_reached_ends_the_wait_too(
    far: ThreadPoolExecutor, proxy: Proxy
) -> None:
    far.submit(fetched, "SELECT 1").result(SECONDS)
    proxy.stall(new=True)
    assert isinstance(failure(far.submit(fetched, "SELECT 1")), OperationalError)
    proxy.heal()


def failure(future: Future[Any]) -> BaseException | None:
    return future.exception(2 * SECONDS)
