"""Rights of exchanges: which rules are missing, where, and the statement that adds each."""

from collections.abc import Iterator

import psycopg
import pytest
from django.db import connection

from project.postgres import Server
from psqlmessages.exchanges.store import permissions
from psqlmessages.exchanges.store.definitions import DefinedExchange
from psqlmessages.models import Auth
from tests.conftest import TestedServer
from tests.exchanges.asking import defined as exchange

pytestmark = pytest.mark.django_db
ROLE = Server.owner


def rule(dest: str, mode: str, ident: str = "exchange.x", role: str = ROLE) -> Auth:
    fields = {"type": "Queue", "dest": dest, "mode": mode, "timeout": 5}
    return Auth.objects.create(role=role, ident=ident, **fields)


def missing_rules(of: DefinedExchange) -> list[permissions.MissingRule]:
    return permissions.find_missing_rules([of]).rules


def test_an_exchange_reads_its_source_and_writes_its_destinations():
    assert missing_rules(exchange("a", "b", "b")) == [
        permissions.MissingRule(
            "default",
            "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES"
            f" ('{ROLE}', 'exchange.x', 'Queue', '{queue}', '{mode}', 60);",
        )
        for queue, mode in (("a", "R"), ("b", "W"))
    ]


def test_the_statements_add_only_missing_rules():
    back = exchange("it's \\", "it's \\", "b%s")
    rule("b%s", "R")
    statements = [missing.statement for missing in missing_rules(back)]
    assert statements[0].startswith("UPDATE messages.auth SET mode = 'RW' WHERE")
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
    assert missing_rules(back) == []
    assert dict(Auth.objects.values_list("dest", "mode")) == {"it's \\": "RW", "b%s": "RW"}


def test_rules_count_as_sql_counts_them():
    for fields, count in (
        ("a R exchange.x", 1), ("* RW exchange.*", 0), ("a W exchange.x", 2), ("b* RW *", 1),
        ("a R exchange.y", 2),
    ):  # fmt: skip
        rule(*fields.split())
        assert len(missing_rules(exchange("a", "b"))) == count, fields
        Auth.objects.all().delete()
    # Rules of other roles and types do not count.
    before = missing_rules(exchange("a", "b"))
    rule("a", "R", role="user1")
    Auth.objects.create(role=ROLE, ident="exchange.x", type="Topic", dest="a", mode="R", timeout=5)
    assert missing_rules(exchange("a", "b")) == before


@pytest.fixture
def eu_owner(eu: TestedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(eu.url(), autocommit=True) as owner:
        yield owner


def test_a_rule_stands_in_the_database_of_its_queue(eu_owner: psycopg.Connection):
    across = exchange("a", "eu/b")
    here, there = missing_rules(across)
    assert (here.namespace, there.namespace) == ("default", "eu")
    rule("b", "W")
    assert missing_rules(across) == [here, there]
    # Rules of the other database must be added there.
    assert [missing.namespace for missing in permissions.add_missing_rules(across)] == ["default"]
    assert eu_owner.execute("SELECT count(*) FROM messages.auth").fetchone() == (0,)
    eu_owner.execute(there.statement)
    assert missing_rules(across) == []


def test_an_unreachable_namespace_is_reported(away: None, eu_owner: psycopg.Connection):
    eu_owner.execute("ALTER SCHEMA messages RENAME TO elsewhere")
    try:
        queues = ("away/b", "eu/b", "gone/b", "b")
        found = permissions.find_missing_rules(
            [exchange("a", queue, name=queue) for queue in queues]
        )
    finally:
        eu_owner.execute("ALTER SCHEMA elsewhere RENAME TO messages")
    assert {missing.namespace for missing in found.rules} == {"default"}
    unasked = {"away": "connection", "eu": "messages", "gone": "Unknown namespace 'gone'"}
    assert sorted(found.errors) == sorted(unasked)
    assert all(why in found.errors[each] for each, why in unasked.items())
