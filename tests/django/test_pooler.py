"""PgBouncer in between: found by probing; what works through it, and what does not."""

from collections.abc import Iterator

import pytest
from django.core import checks
from django.db import connection, transaction
from psycopg.conninfo import conninfo_to_dict

from psqlmessages import Node
from psqlmessages.checks import check_databases
from psqlmessages.cli.doctor_checks import FindingState, listening, pooler
from psqlmessages.client.connect import PoolerKind, detect_pooler
from psqlmessages.django import (
    pop,
    publish,
    push,
    read_stream,
    reserve,
    reserve_many,
    send,
)
from psqlmessages.testing import allow_queue
from tests.django.conftest import finding_of
from tests.django.pgbouncer import pgbouncer
from tests.sql.conftest import Program, World


@pytest.fixture
def by_transaction(shop: World) -> Iterator[str]:
    with pgbouncer(shop.server, "transaction") as address:
        yield address


@pytest.fixture
def _django_by_transaction(by_transaction: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    connection.close()
    port = conninfo_to_dict(by_transaction)["port"]
    with monkeypatch.context() as behind:
        behind.setitem(connection.settings_dict, "PORT", str(port))
        yield
        connection.close()


def test_a_pool_by_transaction_is_found_each_time_with_what_it_breaks(
    shop: World, by_transaction: str
) -> None:
    assert detect_pooler(shop.server.url()) is PoolerKind.NONE
    assert [detect_pooler(by_transaction) for _ in range(5)] == [PoolerKind.TRANSACTION] * 5
    for check, said in ((pooler, "shares connections by transaction"), (listening, "not arrive")):
        found = finding_of(check, by_transaction)
        assert found.state is FindingState.WRONG
        assert said in found.found
    assert "pool_mode = session" in finding_of(pooler, by_transaction).fix


def test_a_pool_by_transaction_is_found_even_with_one_connection_for_all(shop: World) -> None:
    with pgbouncer(shop.server, "transaction", pool_size=1) as address:
        assert detect_pooler(address) is PoolerKind.TRANSACTION


def test_a_node_works_through_a_pool_by_session_which_is_no_fault(
    shop: World, sender: Program
) -> None:
    with pgbouncer(shop.server, "session") as address:
        assert [detect_pooler(address) for _ in range(3)] == [PoolerKind.SESSION] * 3
        for check in (pooler, listening):
            assert finding_of(check, address).state is FindingState.OK
        with Node("worker", address) as worker:
            worker.topic_listen("ORDERS")
            sender.ok("topic_send", "ORDERS", "x")
            bodies = (message.body for message in worker.messages() if message.type == "Topic")
            assert next(bodies) == "x"


@pytest.mark.usefixtures("_django_by_transaction")
def test_the_system_check_warns_and_what_needs_no_node_works_through_it(shop: World) -> None:
    (found,) = check_databases(databases=["default"])
    assert (found.id, found.level) == ("psqlmessages.W103", checks.WARNING)
    listener = shop.node("user2", "LISTENER", listen="ORDERS")
    allow_queue("orders")
    for number in range(10):
        assert send("ORDERS", f"order {number}")
        with transaction.atomic():
            bodies = [message.body for message in read_stream("worker.1", "ORDERS")]
        assert number == 0 or bodies == [number, f"order {number}"]
        publish("ORDERS", number + 1)
        push("orders", number)
        with transaction.atomic():
            assert [element.body for element in pop("orders")] == [number]
        push("orders", number)
        (element,) = reserve_many("orders", 1)
        element.rollback()
        with reserve("orders") as element:
            assert element.tries == 1
    heard = [body for body in listener.bodies() if body.startswith("order")]
    assert heard == [f"order {number}" for number in range(10)]
