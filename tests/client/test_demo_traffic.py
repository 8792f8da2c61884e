"""The demonstration's nodes take up again what an administrator takes away and gives back."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.client.programs import Program, started
from tests.client.test_node import poll_until
from tests.conftest import TestedServer

BOARD = "role = 'psqlmessages_demo2' AND ident = 'DEMO.BOARD'"
PRICES = f"{BOARD} AND dest = 'DEMO.PRICES'"


@pytest.fixture
def traffic(server: TestedServer, owner: psycopg.Connection) -> Iterator[Program]:
    """Live traffic; every node has what it needs."""
    with started("demo", "--traffic", "--brief", dsn=server.url()) as program:
        program.until("Live traffic follows")
        poll_until(lambda: listens(owner, "DEMO.BOARD", "DEMO.PRICES"))
        poll_until(lambda: sends(owner, "DEMO.TICKER", "DEMO.PRICES"))
        yield program
        program.interrupt()
        assert "Traceback" not in program.printed
        assert program.end() == 0


def listens(owner: psycopg.Connection, ident: str, topic: str) -> bool:
    return in_topic(owner, "listeners", ident, topic)


def sends(owner: psycopg.Connection, ident: str, topic: str) -> bool:
    return in_topic(owner, "notifiers", ident, topic)


def in_topic(owner: psycopg.Connection, column: str, ident: str, topic: str) -> bool:
    query = f"SELECT 1 FROM messages.topics WHERE topic = %s AND %s = ANY({column})"
    return owner.execute(query, (topic, ident)).fetchone() is not None


def change(owner: psycopg.Connection, mode: str, which: str) -> None:
    owner.execute(f"UPDATE messages.auth SET mode = '{mode}' WHERE {which}")


def test_a_listener_whose_right_returns_listens_again(
    owner: psycopg.Connection, traffic: Program
) -> None:
    change(owner, "W", PRICES)
    assert not listens(owner, "DEMO.BOARD", "DEMO.PRICES")
    change(owner, "R", PRICES)
    poll_until(lambda: listens(owner, "DEMO.BOARD", "DEMO.PRICES"))


def test_a_sender_whose_right_returns_sends_again(
    owner: psycopg.Connection, traffic: Program
) -> None:
    change(owner, "R", "ident = 'DEMO.TICKER'")
    assert not sends(owner, "DEMO.TICKER", "DEMO.PRICES")
    change(owner, "W", "ident = 'DEMO.TICKER'")
    poll_until(lambda: sends(owner, "DEMO.TICKER", "DEMO.PRICES"))


def test_a_node_without_any_rule_registers_again_once_it_has_one(
    owner: psycopg.Connection, traffic: Program
) -> None:
    owner.execute(f"UPDATE messages.auth SET ident = 'AWAY' WHERE {BOARD}")
    assert not listens(owner, "DEMO.BOARD", "DEMO.STOCK")
    owner.execute("UPDATE messages.auth SET ident = 'DEMO.BOARD' WHERE ident = 'AWAY'")
    for topic in ("DEMO.ORDERS", "DEMO.PRICES", "DEMO.STOCK"):
        poll_until(lambda topic=topic: listens(owner, "DEMO.BOARD", topic))


def test_a_right_lost_while_the_connection_was_lost_is_taken_up_again(
    server: TestedServer, owner: psycopg.Connection, superuser: psycopg.Connection, traffic: Program
) -> None:
    change(owner, "W", PRICES)
    superuser.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE usename = 'psqlmessages_demo2'"
    )
    poll_until(lambda: listens(owner, "DEMO.BOARD", "DEMO.STOCK"))
    change(owner, "R", PRICES)
    poll_until(lambda: listens(owner, "DEMO.BOARD", "DEMO.PRICES"))


def test_brief_prints_the_titles_and_the_result_alone(traffic: Program) -> None:
    lines = traffic.printed.splitlines()
    assert lines[0].startswith("1. The owner allows it")
    assert [line[0] for line in lines[:7]] == list("1234567")
    assert lines[7].endswith("steps went as expected.")
    assert [line for line in lines[8:] if line] == ["Live traffic follows; Ctrl-C ends it."]
