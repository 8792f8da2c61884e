"""What breaks under open WebSockets: the database goes away, a peer is gone in the middle."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.sql.conftest import World
from tests.web.attackers import CLOSE, LAST, TEXT, Attacker, frame
from tests.web.site import Site
from tests.web.sockets import Visitor

Enter = Callable[..., Visitor]


@contextmanager
def database_away(server: TestedServer) -> Iterator[None]:
    """Refuse and end all connections of ordinary roles to the test database."""
    database = sql.Identifier(server.database)
    with psycopg.connect(server.server.superuser_url("postgres"), autocommit=True) as superuser:
        allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        superuser.execute(allow.format(database, sql.SQL("false")))
        try:
            superuser.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                " AND (application_name LIKE '%%hub' OR query ~ 'auth_user|WebIdentity')",
                [server.database],
            )
            yield
        finally:
            superuser.execute(allow.format(database, sql.SQL("true")))


@pytest.fixture
def alice(enter: Enter) -> Visitor:
    """The node web.alice, listening to ROOM."""
    visitor = enter("alice", "web.alice")
    visitor.ok("topic_listen", topic="ROOM")
    return visitor


# PostgreSQL


def test_while_the_database_is_away_sockets_stay_and_are_told(
    server: TestedServer, relay: World, site: Site, alice: Visitor, knock: Enter
) -> None:
    cookie = site.login("bob")
    alice.ok("topic_listen", topic="WEB.1")
    with database_away(server):
        assert alice.event("connection_lost")["Type"] == "Sys"
        away = (59, "the relay has no connection to PostgreSQL")
        assert alice.error("topic_status", topic="ROOM") == away
        assert knock(cookie=cookie).closed() == (1013, "the database is away")
        # The owner's own connection is not one of those ended.
        relay.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'WEB.*'")
    assert alice.event("reconnected")["Away"] >= 0
    # A right that ended meanwhile is told; the others are registered again.
    event = alice.event("topic_unlisten")
    assert (event["Ident"], event["Topic"]) == ("web.alice", "WEB.1")
    other = relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "still there?")
    assert alice.message()["Body"] == "still there?"
    assert knock(cookie=cookie).error("topic_status", topic="ROOM")[0] == 50
    assert site.faults() == []


# Peers


@pytest.mark.parametrize("op", ["init", "topic_listen", "rpc"])
def test_a_peer_that_is_gone_in_the_middle_of_an_operation_leaves_nothing(
    enter: Enter, relay: World, site: Site, op: str
) -> None:
    visitor = enter("alice", *(["web.alice"] if op != "init" else []))
    fields = {
        "init": {"ident": "web.alice"},
        "topic_listen": {"topic": "ROOM"},
        "rpc": {"node": "OTHER", "token": "t", "body": ""},
    }
    with relay.owner.connection.transaction():
        # The operation waits for this, and so is under way when the peer goes.
        relay.owner.connection.execute("LOCK TABLE messages._gate IN EXCLUSIVE MODE")
        visitor.connection.send(json.dumps({"op": op, **fields[op]}))
        visitor.break_off()
    relay.wait_for("SELECT NOT EXISTS (SELECT FROM psqlmessages_client WHERE ident = 'web.alice')")
    assert site.faults() == []


def test_sockets_that_come_and_go_leave_nothing(
    enter: Enter, knock: Enter, relay: World, site: Site
) -> None:
    cookie = enter("alice").cookie
    before = open_sockets(site)
    # Fewer than one user may have, however late the site learns that they went.
    for _ in range(15):
        visitor = knock(cookie=cookie)
        visitor.connection.send('{"op":"init","ident":"web.alice"}')
        visitor.connection.send('{"op":"topic_listen","topic":"ROOM"}')
        visitor.break_off()
    relay.wait_for("SELECT NOT EXISTS (SELECT FROM psqlmessages_client WHERE ident = 'web.alice')")
    # The hub's connection and the watch's may be new.
    wait_until(lambda: open_sockets(site) <= before + 2)
    enter("alice", "web.alice")
    assert site.faults() == []


def test_a_peer_that_says_goodbye_but_reads_nothing_is_let_go(
    enter: Enter, relay: World, site: Site
) -> None:
    with closing(Attacker(site, is_deaf=True)) as deaf:
        assert deaf.open(site, enter("alice").cookie).startswith("HTTP/1.1 101")
        deaf.send(frame(TEXT | LAST, b'{"op":"init","ident":"web.alice"}'))
        deaf.send(frame(TEXT | LAST, b'{"op":"topic_listen","topic":"ROOM"}'))
        other = relay.node("user2", "OTHER")
        other.ok("topic_notify", "ROOM")
        relay.wait_for(
            "SELECT EXISTS (SELECT FROM messages.topics WHERE listeners = '{web.alice}')"
        )
        # More than the kernel holds, and less than the queue: it stays open, and full.
        other.ok("topic_send_many", "ROOM", ["x" * 4000] * 900)
        other.payloads()
        deaf.send(frame(CLOSE | LAST, (1000).to_bytes(2)))
        assert other.events(3)[-1] == "disconnect web.alice"


def open_sockets(site: Site) -> int:
    return sum(1 for file in Path(f"/proc/{site.pid}/fd").iterdir() if _is_socket(file))


def _is_socket(file: Path) -> bool:
    try:
        return str(file.readlink()).startswith("socket:")
    except FileNotFoundError:
        return False
