"""Exchanges of a role that has SERIALIZABLE by default: they keep to READ COMMITTED."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from project.postgres import Server
from tests.conftest import TestedServer
from tests.exchanges.conftest import eu, eu_database, field, wide_field
from tests.exchanges.field import Field, working
from tests.reliability.counts import counted, size

__all__ = ["eu", "eu_database", "field", "wide_field"]

FAILED = "could not serialize access"
FIELDS = {"within": "field", "between": "wide_field"}


@contextmanager
def serializable(server: TestedServer) -> Iterator[None]:
    """Whoever connects as the owner meanwhile begins in SERIALIZABLE."""
    setting = f"ALTER ROLE {Server.owner} {{}} default_transaction_isolation"
    with psycopg.connect(server.superuser_url, autocommit=True) as superuser:
        superuser.execute(f"{setting.format('SET')} = 'serializable'")
        try:
            yield
        finally:
            superuser.execute(setting.format("RESET"))


def failures(server: TestedServer) -> int:
    """How often the server has refused for want of an order, by now."""
    return server.server.home.log.read_text(errors="replace").count(FAILED)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "where",
    [
        "within",
        pytest.param("between", marks=pytest.mark.nightly),  # a second database is migrated
    ],
)
@pytest.mark.parametrize("how", ["reserve", "pop"])
def test_an_exchange_keeps_to_read_committed(
    request: pytest.FixtureRequest, where: str, how: str
) -> None:
    field: Field = request.getfixturevalue(FIELDS[where])
    server = field.default.server
    before = failures(server)
    queues = ["b", "c"] if where == "within" else ["eu/b", "eu/c"]
    consumer = {"reserve": how == "reserve", "parallel": 3, "wsize": 10}
    field.define(x={"consumer": consumer, "src": "a", "dst": queues})
    bodies: list[str] = []
    with serializable(server), working(), working():
        for number in range(size(20, 200)):
            part = [f"{number}.{each}" for each in range(20)]
            field.default.push_many("a", part)
            bodies += part
        field.until_idle(60)
    bed = field.beds["default" if where == "within" else "eu"]
    found = [sorted(bed.bodies(queue)) for queue in "bc"]
    refused = failures(server) - before
    assert found == [sorted(bodies)] * 2
    counted(
        "serialization failure", f"an exchange {where} databases ({how}), serializable",
        elements=len(bodies), failures=refused, lost=0, doubled=0,
    )  # fmt: skip
    assert refused == 0
