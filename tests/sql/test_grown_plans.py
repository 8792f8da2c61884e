"""Plans that were made while few nodes were connected: they must do for thousands."""

import json
from collections.abc import Iterator

import pytest

from tests.conftest import TestedServer
from tests.sql.conftest import Program, World
from tests.sql.test_plans import RUNS, reads, truncate

pytestmark = pytest.mark.versions
GROWN = 5000
# Nobody analyzes: the plans of connections that are there stay as they are.
GROW = """
    INSERT INTO psqlmessages_session (id, pid, role, channel)
    SELECT 1000000 + n, {pid}, 'user3', 'bulk_' || n FROM generate_series(1, {nodes}) AS n;
    INSERT INTO psqlmessages_client (session_id, ident, role)
    SELECT 1000000 + n, 'N' || n, 'user3' FROM generate_series(1, {nodes}) AS n
"""
# Of nodes that are named before those, and of whom none is there.
BY_PATTERN = """
    INSERT INTO psqlmessages_auth (role, ident, type, dest, mode, timeout)
    SELECT 'user3', 'A' || n || '*', 'Topic', 'SHARED', 'R', 5 FROM generate_series(1, {rules}) AS n
"""
# Oneself and the other one, each a few times. One call in a second also looks after all nodes.
FEW_ROWS = 10
# Where nothing is analyzed, some statements of a call that is no send read all nodes once. Each of
# the rules would make it hundreds of times.
MOST_READ_AGAIN = 5 * GROWN
RULES_BY_PATTERN = 300


@pytest.fixture
def grown(server: TestedServer) -> Iterator[World]:
    """Two nodes, in tables that were analyzed while they were the only ones."""
    world = World(server)
    world.rules("user1 HOT Rpc COLD W 5", "user2 COLD Rpc HOT W 5")
    yield world
    truncate(world)


def fewest(program: Program, function: str, *arguments: str) -> dict[str, int]:
    """How many rows of each table the best of some calls reads."""
    found = [reads(program, function, *arguments) for _ in range(10)]
    rows = [{name: read for name, (_, read) in tables.items()} for tables in found]
    return min(rows, key=lambda tables: sum(tables.values()))


def test_a_question_and_its_answer_read_little_though_thousands_came(grown: World) -> None:
    hot, cold = grown.node("user1", "HOT"), grown.node("user2", "COLD")
    grown.owner.execute("ANALYZE")
    for _ in range(RUNS):
        hot.ok("rpc", "COLD", "TOKEN", "x")
    token = json.loads(cold.payloads(1)[0].partition("\n")[0])["Token"]
    for _ in range(RUNS):
        cold.ok("return", "HOT", token, "x")
    grown.owner.execute(GROW.format(pid=hot.pid, nodes=GROWN))
    for program, function, *arguments in (
        (hot, "rpc", "COLD", "TOKEN", "x"),
        (cold, "return", "HOT", token, "x"),
    ):
        rows = fewest(program, function, *arguments)
        assert max(rows.values()) <= FEW_ROWS, f"{function} read {rows}"


@pytest.mark.parametrize("call", [("topic_listen", "SHARED"), ("init", "HOT2")], ids=str)
def test_rules_by_pattern_do_not_each_read_the_nodes_behind_them(
    grown: World, call: tuple[str, str]
) -> None:
    grown.rules("user1 HOT Topic SHARED R 5", "user1 HOT2 Topic SHARED R 5")
    grown.owner.execute(BY_PATTERN.format(rules=RULES_BY_PATTERN))
    hot, _ = grown.node("user1", "HOT"), grown.node("user2", "COLD")
    grown.owner.execute("ANALYZE")
    for _ in range(RUNS):
        reads(hot, *call)
    grown.owner.execute(GROW.format(pid=hot.pid, nodes=GROWN))
    rows = fewest(hot, *call)
    assert rows["client"] <= MOST_READ_AGAIN, f"{call[0]} read {rows}"
