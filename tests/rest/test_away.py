"""A database that is away, stalls, or ends connections: bounded times, and nothing is lost."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack

import pytest
from django.db import connection

from tests.client.proxy import Proxy
from tests.rest.callers import Answer, Caller, bearer
from tests.rest.test_queues import waits
from tests.sql.conftest import World
from tests.web.site import Site

OF_API = "application_name LIKE 'psqlmessages rest%'"
WAITS = "SELECT EXISTS (SELECT FROM psqlmessages_queue WHERE awaited_until > now() + '50 s')"


@pytest.fixture
def ways(rest: World) -> Iterator[tuple[Proxy, Proxy]]:
    known = connection.settings_dict
    with ExitStack() as stack:
        made = [Proxy(str(known["HOST"] or "127.0.0.1"), int(known["PORT"])) for _ in range(2)]
        yield tuple(stack.enter_context(proxy.serve()) for proxy in made)


@pytest.fixture
def far(new_site: Callable[..., Site], ways: tuple[Proxy, Proxy]) -> Iterator[Caller]:
    """Wanda at a site that reaches its namespaces through the proxies."""
    # The site waits this long for an answer, a connection and the user.
    names = ("client.queue_listener.ANSWER", "rest.pool.ANSWER", "rest.pool._MAX_WAIT",
             "rest.pool._CONNECT", "rest.auth._QUERY_TIMEOUT")  # fmt: skip
    given = {key: connection.settings_dict[key] for key in ("ENGINE", "NAME", "USER", "PASSWORD")}
    default, far = ({**given, "HOST": "127.0.0.1", "PORT": proxy.port} for proxy in ways)
    site = new_site(
        DATABASES={"default": default, "far": far},
        PATCHED={f"psqlmessages.{name}_SECONDS": 2 for name in names},
    )
    caller = Caller(site, bearer(site, "wanda", "worker"))
    yield caller
    caller.close()
    # Django's own connection would wait for minutes.
    site.process.kill()
    site.process.wait()


def test_stalled_and_absent_databases_time_out(far: Caller, rest: World, ways: tuple[Proxy, Proxy]):
    usual, other = ways

    def at_far(method: str, body: bytes | None = None, **query: object) -> Answer:
        return far.call(method, "q/far/orders", body, **query)

    def waits_at_far() -> "Future[Answer]":
        begun = far.begin("GET", "q/far/orders", to=60, tid="w")
        rest.wait_for(WAITS)
        return begun

    assert far.call("GET", "q").json == {"namespaces": ["default", "far"]}
    assert at_far("POST", b"x").status == 201
    assert far.take("orders").data == b"x"
    waiting = waits_at_far()
    other.stall()
    rest.owner.ok("push", "worker", "orders", "second")
    assert waiting.result(50).data == b"second"
    waiting = waits_at_far()
    other.refuse()
    for method, body in (("POST", b"x"), ("GET", None)):
        answer = at_far(method, body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert waiting.result(50).status == 503
    assert far.push("orders").status == 201
    # Without the default database users cannot be identified.
    usual.refuse()
    answer = far.call("GET", "q")
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")


def test_ended_connections_are_not_noticed(worker: Caller, rest: World):
    waiting = waits(worker, "orders", "w")
    assert rest.end_backends(OF_API) > 0
    assert worker.push("orders", b"x").status == 201
    assert waiting.result(30).data == b"x"
    assert rest.end_backends(OF_API) > 0
    assert worker.push("orders", b"y").status == 201
    assert rest.end_backends(OF_API) > 0
    assert worker.take("orders").data == b"y"
