"""At once: what the one statement of the common case checks all by itself."""

import json
import re

import pytest

from tests.sql.conftest import Pair, Program, World, parse

LONG = "x" * 9000
# Any session may say so of itself; get_data then asks nothing but its own statement.
FETCH = """
    SELECT CASE WHEN set_config(
        'messages.evaluated', to_hex(date_part('epoch', clock_timestamp())::bigint), false
    ) <> '' THEN messages.get_data(%s) END
"""
PIDS = ("UPDATE psqlmessages_session SET pid = %s WHERE channel = %s",
        "UPDATE psqlmessages_membership SET pid = %s WHERE channel = %s")  # fmt: skip


def settings(program: Program) -> dict[str, str]:
    """The settings that a session knows itself by."""
    names = ("channel", "node")
    return {name: program.query(f"SELECT current_setting('messages.{name}')") for name in names}


def put(program: Program, **values: str) -> None:
    """Set them, as any role may."""
    for name, value in values.items():
        program.query("SELECT set_config(%s, %s, false)", f"messages.{name}", value)


def inherit(world: World, heir: Program, dead: Program) -> dict[str, str]:
    """End a session, and give its pid to another backend; the settings it had."""
    had = settings(dead)
    world.kill(dead)
    for update in PIDS:
        world.execute(update, [heir.pid, had["channel"]])
    return had


@pytest.fixture
def nodes(spec_world: World) -> Pair:
    """NODE1 of user1, which sends and was asked; NODE2 of user2, which listens and asked."""
    one, two = spec_world.node("user1", "NODE1"), spec_world.node("user2", "NODE2")
    one.ok("topic_notify", "MYTOPIC")
    two.ok("topic_listen", "MYTOPIC")
    two.ok("rpc", "NODE1", "TOKEN", "question")
    return one, two


def asked(node: Program) -> str:
    """The token of the last question."""
    return str(node.headers()[-1]["Token"])


def refusals(program: Program, token: str) -> set[int]:
    """Do what NODE1 may do; how that is refused."""
    calls = [
        ("topic_send", "MYTOPIC", "x"), ("rpc", "NODE2", "TOKEN", "x"),
        ("return", "NODE2", token, "x"),
    ]  # fmt: skip
    return {program.error(*call)[0] for call in calls}


def fetched(program: Program, payload: str) -> tuple[str, bool]:
    """Call get_data; the number it answers, and whether a body follows."""
    line, newline, _ = program.query(FETCH, payload).partition("\n")
    return json.loads(line)["Err"], bool(newline)


@pytest.fixture
def payload(nodes: Pair) -> str:
    """The payload of a long message of NODE1 to MYTOPIC."""
    nodes[0].ok("topic_send", "MYTOPIC", LONG)
    return nodes[1].payloads()[-1]


def test_who_has_settings_or_pid_of_another_session_is_no_node(world: World, nodes: Pair) -> None:
    """Only the connection itself has all three: its role, its pid and its channel."""
    world.rules("hostile NODE1 Topic MYTOPIC W 5", "hostile NODE1 Rpc NODE2 W 5")
    token, thief = asked(nodes[0]), world.program("user1")
    put(thief, **settings(nodes[0]))
    assert refusals(thief, token) == {50}
    heir, stranger = world.program("user1"), world.program("hostile")
    had = inherit(world, heir, nodes[0])
    put(heir, node=had["node"])
    assert refusals(heir, token) == {50}
    for update in PIDS:
        world.execute(update, [stranger.pid, had["channel"]])
    put(stranger, **had)
    assert refusals(stranger, token) == {50}


def test_the_right_to_ask_is_that_of_the_acting_node_and_of_its_role(
    world: World, nodes: Pair
) -> None:
    world.rules("user1 TWIN Topic ELSE R 5", "user1 TWIN Topic NODE2 W 5")
    nodes[0].ok("init", "TWIN")
    refused = 2, "cannot use Rpc to NODE2"
    assert nodes[0].error("rpc", "NODE2", "TOKEN", "x") == refused
    nodes[0].ok("use", "NODE1")
    world.execute("UPDATE messages.auth SET role = 'user2' WHERE type = 'Rpc' AND ident = 'NODE1'")
    assert nodes[0].error("rpc", "NODE2", "TOKEN", "x") == refused


def test_nobody_but_the_listening_node_fetches_a_body(
    world: World, nodes: Pair, payload: str
) -> None:
    world.rules("user3 THIRD Topic OTHER R 5", "user2 BESIDE Topic OTHER R 5")
    third = world.node("user3", "THIRD")
    third.ok("topic_listen", "OTHER")
    assert [fetched(node, payload) for node in (nodes[0], third)] == [("13", False)] * 2
    assert fetched(nodes[1], payload) == ("0", True)
    nodes[1].ok("init", "BESIDE")
    assert fetched(nodes[1], payload) == ("13", False)


def test_the_node_of_a_dead_session_with_the_same_pid_fetches_nothing_at_once(
    world: World, nodes: Pair, payload: str
) -> None:
    world.rules("user2 BESIDE Topic OTHER R 5")
    beside = world.node("user2", "BESIDE")
    put(beside, node=inherit(world, beside, nodes[1])["node"])
    assert fetched(beside, payload) == ("50", False)


def test_who_has_no_session_locks_no_table_of_bodies(world: World, payload: str) -> None:
    stranger = world.program("hostile")
    with stranger.connection.transaction():
        assert fetched(stranger, payload) == ("50", False)
        slot = parse(payload)["Dkey"].split(".")[1]
        held = stranger.query(
            "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()"
            " AND relation = to_regclass(%s)",
            f"psqlmessages_body_{slot}",
        )
    assert held == 0


def test_each_table_of_bodies_is_read_by_the_same_statement(world: World) -> None:
    source = world.owner.query(
        "SELECT prosrc FROM pg_proc WHERE oid = to_regproc('messages._select_body')"
    )
    _, *parts = re.split(r"WHEN ([0-9]+) THEN", source.partition("ELSE NULL")[0])
    statements = {
        int(slot): re.sub(rf"(_body_|b\.slot = ){slot}\b", r"\1N", statement).strip()
        for slot, statement in zip(parts[::2], parts[1::2], strict=True)
    }
    assert list(statements) == list(range(21))
    assert len(set(statements.values())) == 1
