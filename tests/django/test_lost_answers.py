"""Django's connections: a lost answer ends the wait for it, a slow one does not."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import OperationalError, connections, transaction
from pytest_django import Settings

from project.postgres import Server
from psqlmessages import silent_connections
from tests.client.proxy import Lost, Proxy
from tests.django.conftest import Changed
from tests.exchanges.conftest import namespace
from tests.sql.conftest import World

# Longer than ANSWER_SECONDS and three probes of the server.
SLOW = "SELECT pg_sleep(4)"
SECONDS = 30
IS_SLEEPING = "SELECT count(*) = 1 FROM pg_stat_activity WHERE query = %s AND state = 'active'"

Far = Callable[..., Future[Any]]


@pytest.fixture
def far(shop: World, proxy: Proxy, settings: Settings) -> Iterator[Far]:
    """Call something in a thread whose connection "far" of Django's leads through a proxy."""
    settings.PSQLMESSAGES = {"NODE": "shop", "ANSWER_SECONDS": 1}
    place = {"HOST": "127.0.0.1", "PORT": str(proxy.port), "OPTIONS": {"connect_timeout": 2}}
    with namespace("far", **place), ThreadPoolExecutor(1) as thread:
        yield thread.submit
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
    fetched("SELECT 1")
    own = connections["far"].connection
    own.autocommit = True
    own.execute("LISTEN slow")
    try:
        return list(own.notifies(timeout=4, stop_after=1))
    finally:
        connections.close_all()


# Twice eight seconds of waiting: the setting is nightly.
@pytest.mark.parametrize("tracks", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_slow_queries_and_notifications_are_awaited(far: Far, changed: Changed, tracks: str):
    before, alter = silent_connections.count_closed(), f"ALTER ROLE {Server.owner}"
    changed(f"{alter} SET track_activities = {tracks}", f"{alter} RESET track_activities")
    with ThreadPoolExecutor(1) as other:
        slow, listening = far(fetched, SLOW), other.submit(notified)
        assert (slow.result(SECONDS), listening.result(SECONDS)) == ("", [])
    assert far(fetched, "SELECT 1").result(SECONDS) == 1
    assert silent_connections.count_closed() == before


# Losing only the requests has the same effect as losing all, and takes seconds.
@pytest.mark.parametrize(
    "lost", [pytest.param("requests", marks=pytest.mark.nightly), "answers", "all"]
)
def test_after_a_lost_answer_the_connection_is_new(shop: World, far: Far, proxy: Proxy, lost: Lost):
    before = silent_connections.count_closed()
    pid = far(fetched, "SELECT pg_backend_pid()").result(SECONDS)
    if lost == "answers":
        cut = far(made, "cut", SLOW)
        shop.wait_for(IS_SLEEPING, SLOW)
    proxy.stall(lost)
    if lost != "answers":
        cut = far(made, "cut")
    assert isinstance(cut.exception(SECONDS), OperationalError)
    assert silent_connections.count_closed() == before + 1
    # The locks of the old connection are released.
    shop.wait_for("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", pid)
    far(connections.close_all).result(SECONDS)
    far(made, "cut").result(SECONDS)
    assert shop.owner.query("SELECT count(*) FROM auth_group") == 1
