"""Exchanges between databases: no copy is lost or doubled, one that is down delays only its own."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import dj_database_url
import psycopg
import pytest
from django.contrib.auth.models import User
from django.test import AsyncClient

from psqlmessages.django import push
from psqlmessages.exchanges.engine import remote
from psqlmessages.exchanges.store import permissions
from psqlmessages.models import ExchangeCount, WebIdentity
from psqlmessages.monitor.graph import read_graph
from psqlmessages.rest.auth import token_for
from psqlmessages.rest.namespaces import get_database
from psqlmessages.testing import allow_topic
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.exchanges.conftest import namespace
from tests.exchanges.field import Bed, Field, flow, working
from tests.temporary_server import temporary_server

pytestmark = pytest.mark.usefixtures("committing")

HOP = "x-hop-count"
COUNT = """
    SELECT count(*) FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s
"""
TRIES = COUNT.replace("count(*)", "coalesce(min(e.tries), 0)")
DUE = """
    UPDATE psqlmessages_element SET available_at = clock_timestamp()
    WHERE queue_id = (SELECT id FROM psqlmessages_queue WHERE name = %s) AND lease IS NULL
"""


@pytest.fixture
def _slow_answers(monkeypatch) -> None:
    """A slow answer of the other database is not a failure."""
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 60)
    monkeypatch.setattr(remote, "_TIMEOUT", "SET LOCAL statement_timeout = '60s'")


def numbers(bed: Bed, queue: str) -> list[str]:
    return sorted(bed.bodies(queue), key=int)


@pytest.mark.usefixtures("_slow_answers")
@pytest.mark.parametrize("reserve", [True, False])
def test_copies_go_to_both_databases_as_they_were_pushed(wide_field: Field, reserve: bool):
    field, eu = wide_field, wide_field.beds["eu"]
    late = ("eu/late", '{"delay": 1000}')
    changed = ("eu/b", '{"headers": {"lane": 2}, "body": msg.body}')
    destinations = ("b", "eu/b", late, changed, ("c", "msg.headers.lane == 2"))
    field.define(
        x1=flow("a", *destinations, reserve=reserve, parallel=2),
        x2=flow("strays", ("eu/b", "false"), reserve=reserve),
        x3=flow("junk", ("eu/b", "false"), reserve=reserve) | {"no_route": "discard"},
    )
    field.default.push("junk", "gone")
    bodies = ["text", "", {"a": [1, 2.5, None]}, 0, None, b"\x00"]
    for body in bodies:
        field.default.push("a", body, lane=1)
    field.default.push("strays", "it")
    field.default.push("strays", "old", x_hop_count=17)
    field.run_until_idle()
    for bed, queue, lanes in (
        (field.default, "a", ()), (field.default, "b", (1,)), (field.default, "c", (2,)),
        (eu, "b", (1, 2)), (field.default, "junk", ()),
    ):  # fmt: skip
        copies = [str((body, {"lane": lane, HOP: 1})) for body in bodies for lane in lanes]
        assert sorted(map(str, bed.contents(queue))) == sorted(copies), queue
    assert len(eu.bodies("late")) == len(bodies)
    for queue, body, hop in (("__no_route__", "it", 1), ("__too_many_hops__", "old", 17)):
        assert field.default.contents(queue) == [(body, {HOP: hop, "x-exchange-name": "x2"})]


class ToEu:
    """A router: the models of psqlmessages are in the database "eu"."""

    def db_for_read(self, model: Any, **_hints: object) -> str | None:
        return "eu" if model._meta.app_label == "psqlmessages" else None


def test_the_setting_database_chooses_the_database_of_all_parts(wide_field: Field, settings):
    eu = wide_field.beds["eu"]
    settings.PSQLMESSAGES = {"NODE": "W", "DATABASE": "eu"}
    allow_topic("ROOM")
    stella = User.objects.create_superuser("stella")
    WebIdentity.objects.create(user=stella, ident="W")
    client, token = AsyncClient(), token_for(stella, timedelta(1))
    definition = {"src": {"ns": "eu", "queue": "a"}, "dst": [{"ns": "eu", "queue": "b"}]}

    async def ask(method: str, path: str, body: object) -> tuple[int, Any]:
        call, headers = getattr(client, method), {"authorization": f"Bearer {token}"}
        answer = await call(f"/api/{path}", body, "application/json", headers=headers)
        get_database("eu").pool._close_idle()
        return answer.status_code, answer.json()

    assert asyncio.run(ask("post", "topics/ROOM", {"a": 1})) == (200, {"heard": False})
    assert asyncio.run(ask("put", "x/x1", definition))[0] == 201
    assert asyncio.run(ask("put", "x/x1", definition))[0] == 409
    push("a", "it")
    with working():
        wait_until(lambda: eu.bodies("b") == ["it"])
    settings.DATABASE_ROUTERS = [ToEu()]
    graph = json.loads(asyncio.run(read_graph()) or "")
    assert (graph["home"], [each["name"] for each in graph["exchanges"]]) == ("eu", ["x1"])
    stella.delete()


def test_a_mute_server_is_skipped(wide_field: Field, monkeypatch):
    """The server accepts connections and never answers."""
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 2)
    # The worker also reads rules there, and the fixture `eu` allows a minute for it.
    monkeypatch.setattr(permissions, "_CONNECT_SECONDS", 3)
    field, attempts = wide_field, 0
    with socket.create_server(("127.0.0.1", 0), backlog=100) as mute:
        mute.setblocking(False)
        with namespace("mute", HOST="127.0.0.1", PORT=str(mute.getsockname()[1])):
            field.define(x1=flow("a", "mute/b", "eu/b", "b", wsize=2))
            field.default.push_many("a", ["it"] * 20)
            with working():
                for bed in field.beds.values():
                    field.until(lambda: bed.query(COUNT, "b") == 20)  # noqa: B023
        with suppress(BlockingIOError):
            while mute.accept()[0].close() is None:
                attempts += 1
    assert 1 <= attempts < 10


def test_a_copy_that_was_delivered_is_remembered_until_all_are(wide_field: Field):
    """This holds even if the other database loses the keys and the definition changes."""
    field, eu = wide_field, wide_field.beds["eu"]
    field.define(x1=flow("a", "eu/b", "eu/c", "b"))
    eu.connection.execute("UPDATE messages.auth SET dest = 'b' WHERE ident = 'exchange.*'")
    field.default.push_many("a", ["1", "2"])
    with working():
        field.until(lambda: field.default.query(TRIES, "a") >= 1)
    assert sorted(eu.bodies("b")) == ["1", "2"]
    eu.connection.execute("DELETE FROM psqlmessages_elementkey")
    eu.connection.execute("UPDATE messages.auth SET dest = '*'")
    field.define(x1=flow("a", "d", "b", "eu/c", "eu/b", "eu/b"))
    field.default.connection.execute(DUE, ("a",))
    with working():
        field.until(lambda: not field.default.bodies("a"))
    for bed, queue in ((field.default, "b"), (field.default, "d"), (eu, "c")):
        assert sorted(bed.bodies(queue)) == ["1", "2"], queue
    assert sorted(eu.bodies("b")) == ["1", "1", "2", "2"]


@pytest.mark.usefixtures("_slow_answers")
def test_without_reserve_failures_in_another_database_lose_the_copy(wide_field: Field, away: None):
    field = wide_field
    field.define(x1=flow("a", "away/b", "eu/b", "b", reserve=False))
    field.default.push("a", "it")
    field.run_until_idle()
    assert field.default.bodies("a") == []
    assert field.default.bodies("b") == field.beds["eu"].bodies("b") == ["it"]
    rows = ExchangeCount.objects.filter(count__gt=0)
    counts = {(row.outcome, row.destination): row.count for row in rows}
    assert counts == {("failed", -1): 1, ("to", 1): 1, ("to", 2): 1}


@pytest.mark.usefixtures("_slow_answers")
def test_a_copy_that_the_other_database_refuses_fails_alone(wide_field: Field):
    field, eu = wide_field, wide_field.beds["eu"]
    selector = 'msg.headers.n == 2 ? {"headers": {"x": "' + "y" * 900 + '"}} : {}'
    field.define(x1=flow("a", ("eu/b", selector), "b"))
    eu.connection.execute(
        "ALTER TABLE psqlmessages_element ADD CONSTRAINT short CHECK (length(headers::text) < 500)"
    )
    try:
        for number in range(5):
            field.default.push("a", str(number), n=number)
        field.run_until_idle()
        assert sorted(eu.bodies("b")) == ["0", "1", "3", "4"]
        assert sorted(field.default.bodies("b")) == ["0", "1", "2", "3", "4"]
        assert field.default.bodies("a") == ["2"]
    finally:
        eu.connection.execute("ALTER TABLE psqlmessages_element DROP CONSTRAINT short")


@pytest.fixture(scope="module")
def far_server(server: TestedServer, tmp_path_factory) -> Iterator[TestedServer]:
    with temporary_server(tmp_path_factory.mktemp("far"), server.server.binaries) as second:
        yield second


@pytest.fixture
def far(server: TestedServer, far_server: TestedServer) -> Iterator[Field]:
    """A field whose namespace "far" is on a server of its own."""
    with namespace("far", **dj_database_url.parse(far_server.url())):
        field = Field({"default": Bed(server), "far": Bed(far_server)})
        yield field
        field.close()


def restart(bed: Bed) -> None:
    bed.server.server.start()
    bed.connection.close()
    bed.connection = psycopg.connect(bed.server.url(), autocommit=True)


def test_a_server_down_holds_up_only_itself(far: Field, caplog):
    field, near, bed = far, far.default, far.beds["far"]
    x1 = flow("a", "far/b", "b", parallel=2)
    field.define(x1=x1, x2=flow("c", "to far", "d"), x3=flow("to far", "far/d"))
    bodies = [str(number) for number in range(600)]
    with working():
        near.push_many("a", bodies[:200])
        field.until(lambda: bed.query(COUNT, "b") == 200)
        bed.server.server.stop("immediate")
        near.push_many("a", bodies[200:400])
        for number in range(20):
            near.push("c", str(number))
            field.until(lambda: near.query(COUNT, "d") == number + 1)  # noqa: B023
        # The queue to the other database contains exactly the elements that have not arrived.
        field.until(lambda: near.query(COUNT, "c") == 0)
        assert numbers(near, "to far") == bodies[:20]
        field.until(lambda: near.query(COUNT, "b") == 400)
        restart(bed)
        near.push_many("a", bodies[400:])
        for queue in ("a", "to far"):
            field.until(lambda: near.query(COUNT, queue) == 0)  # noqa: B023
    assert numbers(near, "b") == numbers(bed, "b") == bodies
    assert numbers(near, "d") == numbers(bed, "d") == bodies[:20]
    assert len(caplog.records) < 30
