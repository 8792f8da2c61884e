"""What breaks under open WebSockets: the database goes away, a peer is gone in the middle."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from django.db import connection, connections
from psycopg import sql

from psqlmessages.relay.watch import in_thread
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.sql.conftest import World
from tests.web.site import Site
from tests.web.sockets import DeafPeer, Visitor

Enter = Callable[..., Visitor]

END_HUB = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE '%hub'
"""


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


@pytest.fixture
def deaf_peer(site: Site) -> Iterator[Callable[[str], DeafPeer]]:
    """Open WebSockets that read nothing, by a session's cookie."""
    with ExitStack() as opened:
        yield lambda cookie: opened.enter_context(closing(DeafPeer(site, cookie)))


# PostgreSQL


@pytest.mark.django_db(transaction=True)
def test_the_first_question_after_a_restart_is_answered(world: World) -> None:
    """The connection that answers who may be what stays open, and is made anew unnoticed."""

    def backend() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            return int(cursor.fetchone()[0])

    async def test() -> None:
        ended = await in_thread(backend)
        assert await in_thread(backend) == ended
        assert world.watcher.query("SELECT pg_terminate_backend(%s, 60000)", ended)
        assert await in_thread(backend) != ended
        await in_thread(connections.close_all)

    asyncio.run(test())


def test_a_lost_backend_is_told_and_what_was_registered_is_again(
    relay: World, alice: Visitor
) -> None:
    assert relay.watcher.query(END_HUB)
    assert alice.event("connection_lost")["Type"] == "Sys"
    assert alice.event("reconnected")["Away"] >= 0
    other = relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "still there?")
    assert alice.message()["Body"] == "still there?"


def test_while_the_database_is_away_sockets_stay_and_are_told(
    server: TestedServer, site: Site, alice: Visitor, knock: Enter
) -> None:
    cookie = site.login("bob")
    with database_away(server):
        alice.event("connection_lost")
        away = (59, "the relay has no connection to PostgreSQL")
        assert alice.error("topic_status", topic="ROOM") == away
        assert knock(cookie=cookie).closed() == (1013, "the database is away")
    alice.event("reconnected")
    alice.ok("topic_status", topic="ROOM")
    assert knock(cookie=cookie).error("topic_status", topic="ROOM")[0] == 50
    assert site.faults() == []


def test_a_right_that_ended_while_the_database_was_away_is_told(
    server: TestedServer, relay: World, alice: Visitor
) -> None:
    with database_away(server):
        alice.event("connection_lost")
        # The owner's own connection is not one of those ended.
        relay.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    alice.event("reconnected")
    event = alice.event("topic_unlisten")
    assert (event["Ident"], event["Topic"]) == ("web.alice", "ROOM")


def test_a_server_that_stops_deregisters_its_nodes(
    relay: World, site: Site, alice: Visitor
) -> None:
    other = relay.node("user2", "OTHER")
    site.stop()
    assert other.events(3)[-1] == "disconnect web.alice"
    assert site.faults() == []


# Peers


@pytest.mark.parametrize("op", ["init", "topic_listen", "rpc"])
def test_a_peer_that_is_gone_in_the_middle_of_an_operation_leaves_nothing(
    enter: Enter, relay: World, site: Site, op: str
) -> None:
    visitor = enter("alice", *(["web.alice"] if op != "init" else []))
    fields = {"ident": "web.alice", "topic": "ROOM", "node": "OTHER", "token": "t", "body": ""}
    wanted = {"init": ["ident"], "topic_listen": ["topic"], "rpc": ["node", "token", "body"]}[op]
    request = json.dumps({"op": op, **{name: fields[name] for name in wanted}})
    with relay.owner.connection.transaction():
        # The operation waits for this, and so is under way when the peer goes.
        relay.owner.connection.execute("LOCK TABLE messages._gate IN EXCLUSIVE MODE")
        visitor.connection.send(request)
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
    enter: Enter, relay: World, deaf_peer: Callable[[str], DeafPeer]
) -> None:
    deaf = deaf_peer(enter("alice").cookie)
    deaf.send('{"op":"init","ident":"web.alice"}')
    deaf.send('{"op":"topic_listen","topic":"ROOM"}')
    other = relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    relay.wait_for("SELECT EXISTS (SELECT FROM messages.topics WHERE listeners = '{web.alice}')")
    # More than the kernel holds, and less than the queue: it stays open, and full.
    other.ok("topic_send_many", "ROOM", ["x" * 4000] * 900)
    other.payloads()
    deaf.send_frame(0x88, (1000).to_bytes(2))
    assert other.events(3)[-1] == "disconnect web.alice"


def test_a_peer_that_pings_and_reads_nothing_costs_no_memory(
    enter: Enter, site: Site, deaf_peer: Callable[[str], DeafPeer]
) -> None:
    alice = enter("alice")
    deaf = deaf_peer(alice.cookie)
    before = memory_bytes(site)
    assert deaf.ping_until_it_is_read_no_more(most_bytes=100 * 2**20) < 50 * 2**20
    assert memory_bytes(site) - before < 20 * 2**20
    alice.error("topic_status", topic="ROOM")


def open_sockets(site: Site) -> int:
    return sum(1 for file in Path(f"/proc/{site.pid}/fd").iterdir() if _is_socket(file))


def _is_socket(file: Path) -> bool:
    try:
        return str(file.readlink()).startswith("socket:")
    except FileNotFoundError:
        return False


def memory_bytes(site: Site) -> int:
    pages = int(Path(f"/proc/{site.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
