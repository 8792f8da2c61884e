"""Plans: at 100,000 rules and 10,000 connected nodes no hot call reads a big table whole."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import TestedServer
from tests.reliability.counts import size
from tests.sql.conftest import TABLES, Pair, Program, World
from tests.sql.reads import large_reads

NODES, RULES_EACH, SESSIONS = size(5_000, 10_000), 10, 50
LARGE = ("auth", "client", "membership", "observation", "topic", "body")
# Up to 100,000 rules are made first.
# In their order: the last test empties the database that the others share.
pytestmark = [
    pytest.mark.versions, pytest.mark.timeout(900), pytest.mark.random_order(disabled=True),
]  # fmt: skip

# Node N<n> may use a topic of its own, T<n>, six that it shares with others, S<n>, and a
# pattern, P<n>.*; observe O<n>*; and ask a node. Odd nodes listen to their topics, even ones send.
BULK = [
    """
    INSERT INTO psqlmessages_auth (role, ident, type, dest, mode, timeout)
    SELECT 'user' || 1 + mod(node, 3), 'N' || node, CASE WHEN rule = 1 THEN 'Rpc' ELSE 'Topic' END,
           CASE rule WHEN 0 THEN 'T' || node WHEN 1 THEN 'N' || mod(node * 7, %(nodes)s)
               WHEN 2 THEN 'P' || node || '.*' WHEN 3 THEN 'O' || node || '*'
               ELSE 'S' || mod(node + rule * %(nodes)s / 10, %(nodes)s) END,
           CASE rule WHEN 1 THEN 'W' WHEN 3 THEN 'O' ELSE 'RW' END, 5
    FROM generate_series(1, %(nodes)s) AS node, generate_series(0, %(rules)s - 1) AS rule
    """,
    """
    INSERT INTO psqlmessages_session (id, pid, role, channel)
    SELECT s, %(pid)s, 'user1', 'bulk_' || s FROM generate_series(1, %(sessions)s) AS s
    """,
    """
    INSERT INTO psqlmessages_client (session_id, ident, role)
    SELECT 1 + mod(node, %(sessions)s), 'N' || node, 'user' || 1 + mod(node, 3)
    FROM generate_series(1, %(nodes)s) AS node
    """,
    # By what earlier tests had there, a join may be planned that takes minutes.
    "ANALYZE",
    """
    INSERT INTO psqlmessages_membership
        (client_id, topic_id, kind, channel, pid, role, header, timeout)
    SELECT c.id, t.id, kind, 'bulk_' || c.session_id, %(pid)s, c.role, '', 5
    FROM psqlmessages_client AS c
    JOIN psqlmessages_auth AS a ON a.ident = c.ident AND a.type = 'Topic'
    JOIN psqlmessages_topic AS t ON t.name = a.dest
    JOIN unnest(ARRAY['notify', 'listen']) AS kind
        ON kind = CASE WHEN mod(right(c.ident, 1)::int, 2) = 1 THEN 'listen' ELSE 'notify' END
    """,
    """
    INSERT INTO psqlmessages_observation (client_id, pattern, channel)
    SELECT c.id, 'O' || substr(c.ident, 2) || '*', 'bulk_' || c.session_id
    FROM psqlmessages_client AS c
    """,
    "ANALYZE",
    "SELECT messages._rebuild_topics(ARRAY(SELECT id FROM psqlmessages_topic))",
]
# PostgreSQL reads a table of a few bodies as a whole, whatever its indexes.
MORE_BODIES = """
    INSERT INTO psqlmessages_body (slot, id, topic_id, expires_at, header, body)
    SELECT slot, gen_random_uuid(), topic_id, expires_at, header, 'x'
    FROM psqlmessages_body, generate_series(1, 1000) WHERE length(body) = 9000
"""
# An event reads its hearers, of whom no topic has many, and a second node of each session.
MOST_ROWS = 50
RUNS = 8


@pytest.fixture(scope="module")
def full(server: TestedServer) -> Iterator[World]:
    """The database with all those rules and nodes; their sessions live on one connection."""
    world = World(server)
    try:
        holder = world.program()
        # The first evaluation after a GRANT looks at every node, which is not what is tested.
        world.execute("DELETE FROM messages._role_memberships")
        known = "SELECT EXISTS (SELECT FROM messages._role_memberships) FROM messages.evaluate()"
        world.wait_for(known)
        lock = "SELECT count(pg_advisory_lock(1886612839, s)) FROM generate_series(1, %s) AS s"
        holder.query(lock, SESSIONS)
        values = {"nodes": NODES, "rules": RULES_EACH, "sessions": SESSIONS, "pid": holder.pid}
        for statement in BULK:
            world.execute(statement, values)
        world.rules(
            "user1 HOT Topic HOT RW 500", "user1 HOT Topic NEW.* RW 5", "user1 HOT Rpc COLD W 500",
            "user2 COLD Topic HOT RW 5", "user2 COLD Rpc HOT W 5", "user1 HOT Topic S77 RW 5",
        )  # fmt: skip
        world.execute("ANALYZE")
        yield world
    finally:
        tables = ", ".join(f"psqlmessages_{name}" for name in TABLES)
        world.execute(f"TRUNCATE {tables}")
        world.execute("ANALYZE")
        world.close()


@pytest.fixture
def nodes(full: World) -> Iterator[Pair]:
    """HOT, which sends to topic HOT and listens to it, and COLD, which does so too."""
    hot = full.node("user1", "HOT", notify="HOT", listen="HOT")
    cold = full.node("user2", "COLD", notify="HOT", listen="HOT")
    full.forget()
    yield hot, cold
    for node, ident in (hot, "HOT"), (cold, "COLD"):
        node.execute("ROLLBACK")
        node.ok("deinit", ident)


def assert_reads_little(program: Program, function: str, *arguments: object) -> None:
    # Every ten seconds one call looks for topics that nobody uses: not twice in a row.
    for _ in range(2):
        wrong = large_reads(program, LARGE, MOST_ROWS, function, *arguments)
        if not wrong:
            return
    raise AssertionError(f"{function} (scans, rows): {wrong}")


CALLS: list[tuple[Any, ...]] = [
    ("topic_send", "HOT", "x"), ("topic_send", "HOT", "x", "TOKEN"),
    ("topic_send", "HOT", "x" * 9000), ("topic_send_many", "HOT", ["x"] * 10),
    ("topic_send_as", "HOT", "HOT", "x"), ("rpc", "COLD", "TOKEN", "x"),
    ("rpc_many", ["COLD"] * 10, ["TOKEN"] * 10, ["x"] * 10), ("topic_listen", "S77"),
    ("topic_listen", "NEW.1"), ("topic_notify", "S77"), ("topic_status", "HOT"),
    ("topic_auth", "HOT"), ("init", "HOT"),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]} {len(str(call))}")
def test_no_frequent_call_scans_a_large_table(nodes: Pair, call: tuple[Any, ...]):
    # From the sixth run on PostgreSQL may choose a generic plan.
    for _ in range(RUNS):
        assert_reads_little(nodes[0], *call)


def test_answers_and_stored_bodies_scan_no_large_table(full: World, nodes: Pair):
    hot, cold = nodes
    for call in ("rpc", "COLD", "TOKEN", "x" * 9000), ("topic_send", "HOT", "x" * 9000, "TOKEN"):
        hot.ok(*call)
        payload = cold.payloads(1)[0]
        full.execute(MORE_BODIES)
        for _ in range(RUNS):
            assert_reads_little(cold, "get_data", payload)
            token = json.loads(payload)["Token"]
            assert_reads_little(cold, "return", "HOT", token, "x")
            assert_reads_little(cold, "return_many", ["HOT"] * 3, [token] * 3, ["x"] * 3)
