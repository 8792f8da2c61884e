"""PgBouncer in between: found by probing; what works through it, and what does not."""

from collections.abc import Iterator

import psycopg
import pytest
from django.core import checks
from django.db import connections, transaction

from psqlmessages import Node
from psqlmessages.checks import check_databases
from psqlmessages.client.pooling import Pooling, connect, probe
from psqlmessages.commands.doctor_findings import Finding, Patient, State
from psqlmessages.commands.doctor_server import listening, pooler
from psqlmessages.django import publish, read_stream, send
from tests.django.pgbouncer import pgbouncer
from tests.sql.conftest import World


@pytest.fixture
def by_transaction(shop: World) -> Iterator[str]:
    """The address of the test database behind a pool shared by transaction."""
    with pgbouncer(shop.server, "transaction") as address:
        yield address


@pytest.fixture
def by_session(shop: World) -> Iterator[str]:
    """The address of the test database behind a pool of whole sessions."""
    with pgbouncer(shop.server, "session") as address:
        yield address


@pytest.fixture
def django_by_transaction(by_transaction: str) -> Iterator[None]:
    """Django's connection, made behind a pool shared by transaction."""
    connection = connections["default"]
    port = connection.settings_dict["PORT"]
    connection.close()
    connection.settings_dict["PORT"] = str(
        psycopg.conninfo.conninfo_to_dict(by_transaction)["port"]
    )
    yield
    connection.close()
    connection.settings_dict["PORT"] = port


def examined(address: str, check: object) -> list[Finding]:
    with connect(address) as connection:
        return list(check(Patient(address, connection)))


def test_without_a_pooler_none_is_found(shop: World) -> None:
    assert probe(shop.server.url()) is Pooling.NONE


def test_a_pool_by_transaction_is_found_each_time(by_transaction: str) -> None:
    assert [probe(by_transaction) for _ in range(5)] == [Pooling.TRANSACTION] * 5


def test_a_pool_by_transaction_is_found_even_with_one_connection_for_all(shop: World) -> None:
    with pgbouncer(shop.server, "transaction", pool_size=1) as address:
        assert probe(address) is Pooling.TRANSACTION


def test_a_pool_by_session_is_found_and_is_no_fault(by_session: str) -> None:
    assert [probe(by_session) for _ in range(3)] == [Pooling.SESSION] * 3
    assert [finding.state for finding in examined(by_session, pooler)] == [State.OK]
    assert [finding.state for finding in examined(by_session, listening)] == [State.OK]


def test_a_node_works_through_a_pool_by_session(shop: World, by_session: str) -> None:
    sender = shop.node("user2", "ASKER")
    sender.ok("topic_notify", "ORDERS")
    with Node("worker", by_session) as worker:
        worker.topic_listen("ORDERS")
        sender.ok("topic_send", "ORDERS", "x")
        bodies = (message.body for message in worker.messages() if message.type == "Topic")
        assert next(bodies) == "x"


def test_the_doctor_finds_the_pool_and_what_it_breaks(by_transaction: str) -> None:
    (found,) = examined(by_transaction, pooler)
    assert (found.state, found.found) == (
        State.WRONG, "one that shares connections by transaction",
    )  # fmt: skip
    assert "pool_mode = session" in found.mend
    (found,) = examined(by_transaction, listening)
    assert found.state is State.WRONG
    assert "did not arrive" in found.found


@pytest.mark.usefixtures("django_by_transaction")
def test_the_system_check_warns_of_it() -> None:
    (found,) = check_databases(databases=["default"])
    assert (found.id, found.level) == ("psqlmessages.W103", checks.WARNING)


@pytest.mark.usefixtures("django_by_transaction")
def test_send_works_through_it(shop: World) -> None:
    listener = shop.node("user2", "LISTENER")
    listener.ok("topic_listen", "ORDERS")
    for number in range(10):
        assert send("ORDERS", f"order {number}")
    headers = [header for header in listener.headers() if header["Type"] == "Topic"]
    assert [header["Body"] for header in headers] == [f"order {number}" for number in range(10)]


@pytest.mark.usefixtures("django_by_transaction")
def test_streams_work_through_it(shop: World) -> None:
    publish("ORDERS", "before anyone subscribes")
    for number in range(10):
        with transaction.atomic():
            bodies = [message.body for message in read_stream("worker.1", "ORDERS")]
        assert bodies == ([number - 1] if number else [])
        publish("ORDERS", number)
