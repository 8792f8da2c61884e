"""Django behind a PgBouncer in transaction mode."""

from collections.abc import Iterator

import pytest
from django.core import checks
from django.db import connection, transaction
from psycopg.conninfo import conninfo_to_dict

from psqlmessages.checks import check_databases
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
from tests.django.pgbouncer import pgbouncer
from tests.sql.conftest import World


@pytest.fixture
def _django_by_transaction(shop: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    connection.close()
    with pgbouncer(shop.server, "transaction") as address, monkeypatch.context() as behind:
        behind.setitem(connection.settings_dict, "PORT", conninfo_to_dict(address)["port"])
        yield
        connection.close()


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
