"""A database that is away, stalls, or ends connections: bounded times, and nothing is lost."""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from django.db import connection

from tests.client.proxy import Proxy
from tests.rest.callers import Answer, Caller, bearer
from tests.rest.test_queues import waits
from tests.sql.conftest import World
from tests.web.site import Site

END_THEM = """
    SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity
    WHERE application_name LIKE 'psqlmessages rest%%'
"""


def database(port: int | None = None) -> dict[str, Any]:
    """The test database as DATABASES has it, perhaps at another port."""
    known = connection.settings_dict
    given = {key: known[key] for key in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")}
    return {**given, "HOST": "127.0.0.1", "PORT": port} if port else given


@pytest.fixture
def far(new_site: Callable[..., Site], rest: World, proxy: Proxy) -> Iterator[Caller]:
    """Wanda at a site whose namespace `far` is reached through the proxy."""
    site = new_site(DATABASES={"default": database(), "far": database(proxy.port)})
    caller = Caller(site, bearer(site, "wanda", "worker"))
    yield caller
    caller.close()
    site.stop()


def at_far(caller: Caller, method: str, body: bytes | None = None, **query: object) -> Answer:
    return caller.call(method, "q/far/orders", body, **query)


def test_another_namespace_is_another_database(far: Caller):
    assert far.call("GET", "q").json == {"namespaces": ["default", "far"]}
    assert at_far(far, "POST", b"x").status == 201
    # It is the same database here, by another way.
    assert far.take("orders").data == b"x"


def test_ended_connections_are_not_noticed(worker: Caller, rest: World):
    waiting = waits(worker, "orders", "w")
    assert rest.watcher.query(END_THEM) > 0
    assert worker.push("orders", b"x").status == 201
    assert waiting.result(30).data == b"x"
    assert rest.watcher.query(END_THEM) > 0
    assert worker.push("orders", b"y").status == 201
    assert rest.watcher.query(END_THEM) > 0
    assert worker.take("orders").data == b"y"


def test_an_open_change_of_rules_holds_up_no_reader(new_site: Callable[..., Site], rest: World):
    # An answer of the database that is held up would come after minutes.
    answer = {"rest.pool.ANSWER_SECONDS": 600, "rest.listening.ANSWER_SECONDS": 600}
    site = new_site(PATCHED={f"psqlmessages.{name}": value for name, value in answer.items()})
    worker = Caller(site, bearer(site, "wanda", "worker"))
    with rest.owner.connection.transaction(force_rollback=True):
        rest.owner.connection.execute("UPDATE messages.auth SET timeout = 61")
        waiting = waits(worker, "orders", "w")
        assert worker.push("orders", b"x").status == 201
        assert waiting.result(30).data == b"x"
        waiting = waits(worker, "orders", "w")
        assert worker.push("orders", b"y").status == 201
        assert waiting.result(30).data == b"y"
    worker.close()


@pytest.mark.slow  # an answer that does not come is waited for
def test_connections_that_stall_are_given_up_and_the_reader_is_served(
    far: Caller, rest: World, proxy: Proxy
):
    at_far(far, "POST", b"first")
    waiting = far.begin("GET", "q/far/orders", to=60, tid="w")
    assert waiting.result(30).data == b"first"
    waiting = far.begin("GET", "q/far/orders", to=60, tid="w")
    rest.wait_for(
        "SELECT EXISTS (SELECT FROM psqlmessages_queue WHERE awaited_until > now() + '50 s')"
    )
    proxy.stall()
    rest.owner.ok("push", "worker", "orders", "second")
    assert waiting.result(50).data == b"second"


@pytest.mark.slow  # an answer that does not come is waited for
def test_while_a_database_is_away_calls_and_readers_are_told_so_in_time(
    far: Caller, rest: World, proxy: Proxy
):
    at_far(far, "POST", b"first")
    at_far(far, "GET")
    waiting = far.begin("GET", "q/far/orders", to=60, tid="w")
    rest.wait_for(
        "SELECT EXISTS (SELECT FROM psqlmessages_queue WHERE awaited_until > now() + '50 s')"
    )
    proxy.refuse()
    answer = at_far(far, "POST", b"x")
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert waiting.result(50).status == 503
    for method in ("GET", "POST"):
        begun = monotonic()
        assert at_far(far, method, b"x").status == 503
        assert monotonic() - begun < 30
    assert far.push("orders").status == 201


@pytest.mark.slow  # an answer that does not come is waited for
def test_where_it_cannot_be_told_who_calls_that_is_503(
    new_site: Callable[..., Site], rest: World, proxy: Proxy
):
    site = new_site(DATABASES={"default": database(proxy.port)})
    caller = Caller(site, bearer(site, "wanda", "worker"))
    assert caller.call("GET", "q").status == 200
    proxy.refuse()
    begun = monotonic()
    answer = caller.call("GET", "q")
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert monotonic() - begun < 50
    # Django's own connection waits for the server, and would for minutes.
    assert site.process is not None
    site.process.kill()
    site.process.wait()
