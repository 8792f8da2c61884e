"""Exchanges of a role that has SERIALIZABLE by default: they keep to READ COMMITTED."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from project.postgres import Server
from tests.conftest import TestedServer
from tests.exchanges.conftest import eu, eu_database, wide_field
from tests.exchanges.field import Field, working
from tests.reliability.counts import counted, size

__all__ = ["eu", "eu_database", "wide_field"]

pytestmark = pytest.mark.django_db(transaction=True)

FAILED = "could not serialize access"


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


@pytest.mark.parametrize("where", ["within", "between"])
@pytest.mark.parametrize("how", ["reserve", "pop"])
def test_an_exchange_keeps_to_read_committed(wide_field: Field, where: str, how: str) -> None:
    field, server = wide_field, wide_field.default.server
    before = failures(server)
    queues = ["b", "c"] if where == "within" else ["eu/b", "eu/c"]
    field.define(
        x={
            "consumer": {"reserve": how == "reserve", "parallel": 3, "wsize": 10},
            "src": "a",
            "dst": queues,
        }
    )
    bodies: list[str] = []
    with serializable(server), working(), working():
        for number in range(size(20, 200)):
            part = [f"{number}.{each}" for each in range(20)]
            field.default.push_many("a", part)
            bodies += part
        field.until_idle(60)
    bed = field.beds["default" if where == "within" else "eu"]
    found = [bed.bodies(queue) for queue in "bc"]
    refused = failures(server) - before
    lost = sum(len(set(bodies) - set(each)) for each in found)
    doubled = sum(len(each) - len(set(each)) for each in found)
    counted(
        "serialization failure", f"an exchange {where} databases ({how}), serializable",
        elements=len(bodies), failures=refused, lost=lost, doubled=doubled,
    )  # fmt: skip
    assert (refused, lost, doubled) == (0, 0, 0)
