"""Exchanges between databases: nothing is lost, nothing is doubled, and who is down waits alone."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

import dj_database_url
import psycopg
import pytest

from project.postgres import Server
from psqlmessages.graph import remote
from psqlmessages.models import ExchangeCount
from tests.conftest import TestedServer
from tests.exchanges.conftest import namespace
from tests.exchanges.field import Bed, Field, working
from tests.own_server import own_server

pytestmark = pytest.mark.django_db(transaction=True)

HOP = "x-hop-count"
# With DOWN_SECONDS=30 in the environment it is as long as an ordinary restart elsewhere.
DOWN_SECONDS = float(os.environ.get("DOWN_SECONDS", "6"))
SOME = """
    SELECT count(*) > %s FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'b'
"""
TRIES = """
    SELECT min(e.tries) FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s
"""
PAUSE = "UPDATE psqlmessages_queue SET is_paused = true WHERE name = %s RETURNING 1"
DUE = """
    UPDATE psqlmessages_element SET available_at = clock_timestamp()
    WHERE queue_id = (SELECT id FROM psqlmessages_queue WHERE name = %s) AND lease IS NULL
"""


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that stands still for some seconds is not taken for one that is away."""
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 60)
    monkeypatch.setattr(remote, "_TIMEOUT", "SET LOCAL statement_timeout = '60s'")


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("reserve", [True, False])
def test_copies_go_to_both_databases_as_they_were_pushed(wide_field: Field, reserve: bool) -> None:
    field, eu = wide_field, wide_field.beds["eu"]
    field.define(
        x1={
            "consumer": {"reserve": reserve, "parallel": 2},
            "src": "a",
            "dst": [
                "b",
                "eu/b",
                {"queue": "eu/late", "selector": '{"delay": 1000}'},
                {"queue": "eu/b", "selector": '{"headers": {"lane": 2}, "body": msg.body}'},
                {"queue": "c", "selector": "msg.headers.lane == 2"},
            ],
        }
    )
    bodies = ["text", "", {"a": [1, 2.5, None]}, 0, None, b"\x00"]
    for body in bodies:
        field.default.push("a", body, lane=1)
    field.run_until_idle()
    one, two = {"lane": 1, HOP: 1}, {"lane": 2, HOP: 1}
    assert sorted(map(str, field.default.contents("b"))) == sorted(
        str((body, one)) for body in bodies
    )
    assert sorted(map(str, field.default.contents("c"))) == sorted(
        str((body, two)) for body in bodies
    )
    assert sorted(map(str, eu.contents("b"))) == sorted(
        str((body, headers)) for body in bodies for headers in (one, two)
    )
    assert len(eu.bodies("late")) == len(bodies)
    assert field.default.bodies("a") == []


def test_a_chain_goes_through_both_databases(wide_field: Field) -> None:
    field = wide_field
    field.define(
        x1={"src": "a", "dst": ["eu/a"]},
        x2={"src": "eu/a", "dst": ["eu/b"]},
        x3={"src": "eu/b", "dst": ["c"]},
    )
    field.default.push("a", "it")
    with working():
        field.until(lambda: field.default.bodies("c"))
    assert field.default.contents("c") == [("it", {HOP: 3})]


@pytest.mark.parametrize("reserve", [True, False])
def test_what_is_put_aside_stays_in_the_namespace_of_the_source(
    wide_field: Field, reserve: bool
) -> None:
    field = wide_field
    field.define(
        x1={
            "consumer": {"reserve": reserve},
            "src": "a",
            "dst": [{"queue": "eu/b", "selector": "false"}],
        }
    )
    field.default.push("a", "it")
    field.default.push("a", "old", x_hop_count=17)
    field.run_until_idle()
    assert field.default.contents("__no_route__") == [("it", {HOP: 1, "x-exchange-name": "x1"})]
    assert field.default.contents("__too_many_hops__") == [
        ("old", {HOP: 17, "x-exchange-name": "x1"})
    ]


def test_a_namespace_that_is_away_holds_up_itself_alone(
    wide_field: Field, away: None, caplog: pytest.LogCaptureFixture
) -> None:
    field, eu = wide_field, wide_field.beds["eu"]
    field.define(x1={"src": "a", "dst": ["away/b", "eu/b", "b"]}, x2={"src": "c", "dst": ["eu/c"]})
    bodies = [str(number) for number in range(300)]
    field.default.push_many("a", bodies)
    field.default.push_many("c", bodies)
    with working():
        field.until(lambda: sorted(eu.bodies("b"), key=int) == bodies)
        field.until(lambda: sorted(field.default.bodies("b"), key=int) == bodies)
        field.until(lambda: sorted(eu.bodies("c"), key=int) == bodies)
        field.until(lambda: (field.default.query(TRIES, "a") or 0) >= 3)
    assert len(field.default.bodies("a")) == 300
    assert {len(bed.bodies("b")) for bed in field.beds.values()} == {300}
    assert len(caplog.records) < 20


def test_destinations_that_are_paused_or_removed_take_copies_all_the_same(
    wide_field: Field,
) -> None:
    field = wide_field
    field.define(x1={"src": "a", "dst": ["b", "c"]})
    field.default.push("a", "one")
    with working():
        field.until(lambda: field.default.bodies("b") == field.default.bodies("c") == ["one"])
        field.default.query(PAUSE, "b")
        field.default.query("SELECT messages._remove_queue(%s)", "c")
        field.default.push("a", "two")
        field.until(lambda: field.default.bodies("c") == ["two"])
    assert field.default.bodies("b") == ["one", "two"]


@pytest.fixture
def mute() -> Iterator[None]:
    """The namespace "mute", whose server takes connections and never says a word."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=100) as listener,
        namespace("mute", HOST="127.0.0.1", PORT=str(listener.getsockname()[1])),
    ):
        yield


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mute")
def test_a_server_that_never_answers_is_not_waited_for_each_time(wide_field: Field) -> None:
    field = wide_field
    field.define(x1={"consumer": {"wsize": 2}, "src": "a", "dst": ["mute/b", "eu/b", "b"]})
    bodies = [str(number) for number in range(200)]
    field.default.push_many("a", bodies)
    began = monotonic()
    with working():
        for bed in field.beds.values():
            field.until(lambda: len(bed.bodies("b")) == 200, 400)  # noqa: B023
    # A hundred batches, and five seconds until one finds that nobody answers.
    assert monotonic() - began < 300


def test_what_was_delivered_is_remembered_until_all_is(
    wide_field: Field,
) -> None:
    """Also where the other database has forgotten the keys of the copies meanwhile."""
    field, eu = wide_field, wide_field.beds["eu"]
    field.define(x1={"src": "a", "dst": ["eu/b", "eu/c", "b"]})
    eu.connection.execute("UPDATE messages.auth SET dest = 'b' WHERE ident = 'exchange.*'")
    field.default.push_many("a", ["1", "2"])
    with working():
        field.until(lambda: (field.default.query(TRIES, "a") or 0) >= 1)
        assert sorted(eu.bodies("b")) == ["1", "2"]
        eu.connection.execute("DELETE FROM psqlmessages_elementkey")
        eu.connection.execute("UPDATE messages.auth SET dest = '*'")
        field.default.connection.execute(DUE, ("a",))
        field.until_idle()
        field.until(lambda: not field.default.bodies("a"))
    assert sorted(eu.bodies("b")) == sorted(eu.bodies("c")) == ["1", "2"]
    assert sorted(field.default.bodies("b")) == ["1", "2"]


def test_a_definition_that_changes_between_two_tries_gives_no_copy_twice(
    wide_field: Field,
) -> None:
    field, eu = wide_field, wide_field.beds["eu"]
    field.define(x1={"src": "a", "dst": ["eu/b", "eu/c", "b"]})
    eu.connection.execute("UPDATE messages.auth SET dest = 'b' WHERE ident = 'exchange.*'")
    field.default.push("a", "it")
    with working():
        field.until(lambda: (field.default.query(TRIES, "a") or 0) >= 1)
    field.define(x1={"src": "a", "dst": ["d", "b", "eu/c", "eu/b", "eu/b"]})
    eu.connection.execute("UPDATE messages.auth SET dest = '*'")
    field.default.connection.execute(DUE, ("a",))
    with working():
        field.until(lambda: not field.default.bodies("a"))
    assert (field.default.bodies("b"), field.default.bodies("d")) == (["it"], ["it"])
    assert (eu.bodies("b"), eu.bodies("c")) == (["it", "it"], ["it"])


@pytest.mark.usefixtures("_patient")
def test_without_reserve_what_fails_elsewhere_is_lost_there_and_counted(
    wide_field: Field, away: None
) -> None:
    field = wide_field
    field.define(x1={"consumer": {"reserve": False}, "src": "a", "dst": ["away/b", "eu/b", "b"]})
    field.default.push("a", "it")
    field.run_until_idle()
    assert field.default.bodies("a") == []
    assert field.default.bodies("b") == field.beds["eu"].bodies("b") == ["it"]
    rows = ExchangeCount.objects.filter(count__gt=0)
    counts = {(row.outcome, row.destination): row.count for row in rows}
    assert counts == {("failed", -1): 1, ("to", 1): 1, ("to", 2): 1}


@pytest.mark.usefixtures("_patient")
def test_a_copy_that_the_other_database_refuses_fails_alone(wide_field: Field) -> None:
    field, eu = wide_field, wide_field.beds["eu"]
    selector = 'msg.headers.n == 2 ? {"headers": {"x": "' + "y" * 900 + '"}} : {}'
    field.define(x1={"src": "a", "dst": [{"queue": "eu/b", "selector": selector}, "b"]})
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


@dataclass
class Far:
    """A field whose namespace "far" is on a server of its own."""

    field: Field
    server: Server

    @property
    def bed(self) -> Bed:
        return self.field.beds["far"]

    def restart(self, mode: Literal["fast", "immediate"]) -> None:
        self.server.stop(mode)
        self.start()

    def start(self) -> None:
        self.server.start()
        self.bed.connection.close()
        self.bed.connection = psycopg.connect(self.server.url(), autocommit=True)


@pytest.fixture
def far(server: TestedServer, tmp_path: Path) -> Iterator[Far]:
    with (
        own_server(tmp_path, server.server.binaries) as second,
        namespace("far", **dj_database_url.parse(second.url())),
    ):
        field = Field({"default": Bed(server), "far": Bed(second)})
        yield Far(field, second.server)
        field.close()


def test_a_server_that_is_down_for_a_while_holds_up_itself_alone(
    far: Far, caplog: pytest.LogCaptureFixture
) -> None:
    field = far.field
    field.define(
        x1={"consumer": {"parallel": 2}, "src": "a", "dst": ["far/b", "b"]},
        x2={"src": "c", "dst": ["d"]},
    )
    numbers = [str(number) for number in range(900)]
    slowest = 0.0
    with working():
        field.default.push_many("a", numbers[:300])
        field.until(lambda: len(far.bed.bodies("b")) == 300)
        far.server.stop("immediate")
        down = monotonic()
        field.default.push_many("a", numbers[300:600])
        while monotonic() - down < DOWN_SECONDS:
            began = monotonic()
            count = len(field.default.bodies("d"))
            field.default.push("c", "it")
            field.until(lambda: len(field.default.bodies("d")) > count)  # noqa: B023
            slowest = max(slowest, monotonic() - began)
        field.until(lambda: len(field.default.bodies("b")) == 600)
        far.start()
        field.default.push_many("a", numbers[600:])
        field.until(lambda: len(far.bed.bodies("b")) >= 900, 60)
        field.until(lambda: not field.default.bodies("a"))
    print(f"\nup again after {DOWN_SECONDS} s; the slowest of the others took {slowest:.2f} s")
    for bed in field.beds.values():
        assert sorted(bed.bodies("b"), key=int) == numbers
    assert slowest < 30
    assert len(caplog.records) < 30


def test_a_staging_queue_takes_in_what_another_database_cannot_yet(far: Far) -> None:
    field = far.field
    field.define(x1={"src": "a", "dst": ["to far", "b"]}, x2={"src": "to far", "dst": ["far/b"]})
    bodies = [str(number) for number in range(50)]
    far.server.stop("fast")
    with working():
        field.default.push_many("a", bodies)
        field.until(lambda: sorted(field.default.bodies("b"), key=int) == bodies)
        field.until(lambda: not field.default.bodies("a"))
        assert sorted(field.default.bodies("to far"), key=int) == bodies
        far.start()
        field.until(lambda: sorted(far.bed.bodies("b"), key=int) == bodies, 60)
        field.until(lambda: not field.default.bodies("to far"))


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_source_that_restarts_loses_and_doubles_nothing(
    far: Far, mode: Literal["fast", "immediate"]
) -> None:
    field = far.field
    field.define(
        x1={"consumer": {"parallel": 2, "wsize": 50}, "src": "far/a", "dst": ["far/b", "b"]},
        x2={"consumer": {"wsize": 50}, "src": "far/c", "dst": ["far/d"]},
    )
    numbers = [str(number) for number in range(2000)]
    with working():
        for start in range(0, 2000, 500):
            far.bed.push_many("a", numbers[start : start + 500])
            far.bed.push_many("c", numbers[start : start + 500])
            field.until(lambda: field.default.query(SOME, start))  # noqa: B023
            far.restart(mode)
        # What was reserved and got lost with its connection comes back with its lease's end.
        far.bed.connection.execute(
            "UPDATE psqlmessages_element SET available_at = now() WHERE lease IS NOT NULL"
        )
        field.until(lambda: not far.bed.bodies("a") and not far.bed.bodies("c"), 60)
    for bed, queue in ((field.default, "b"), (far.bed, "b"), (far.bed, "d")):
        assert sorted(bed.bodies(queue), key=int) == numbers
