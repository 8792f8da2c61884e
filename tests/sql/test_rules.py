"""Rules: a change acts at once on connected nodes, whatever statement makes it."""

import psycopg
import pytest

from tests.sql.conftest import Program, World, parse

Nodes = tuple[Program, Program, Program]
LOST = ["topic_unlisten B T", "topic_none_listen T"]
# Ways to take a right to T. Whoever keeps another rule for it hears of all that follows.
LOSSES = [
    "DELETE FROM messages.auth", "UPDATE messages.auth SET mode = '{mode}'",
    "UPDATE messages.auth SET dest = 'OTHER'", "UPDATE messages.auth SET dest = 'T.*'",
    "UPDATE messages.auth SET type = 'Queue', mode = 'R'",
    "UPDATE messages.auth SET ident = 'SOMEBODY'", "UPDATE messages.auth SET role = 'hostile'",
    "UPDATE messages.auth SET role = 'no such role'",
]  # fmt: skip


@pytest.fixture
def nodes(world: World) -> Nodes:
    return make_nodes(world)


def make_nodes(world: World) -> Nodes:
    world.rules(
        "user1 A Topic T W 5", "user2 B Topic T R 5", "user3 O Topic T O 5",
        "user1 A Topic ELSE R 5", "user2 B Topic ELSE R 5", "user3 O Topic ELSE R 5",
    )  # fmt: skip
    sender, listener = world.node("user1", "A", notify="T"), world.node("user2", "B", listen="T")
    nodes = (sender, listener, world.node("user3", "O", observe="T"))
    world.forget()
    return nodes


@pytest.mark.parametrize("loss", LOSSES)
def test_a_node_that_lost_its_right_leaves_the_topic_and_gets_an_event(world: World, loss: str):
    for ident, mode in zip("ABO", "RWR", strict=True):
        world.begin()
        nodes = make_nodes(world)
        world.execute(f"{loss.format(mode=mode)} WHERE ident = '{ident}' AND dest = 'T'")
        if ident == "O":
            assert [node.events() for node in nodes] == [[], [], ["topic_unobserve O T"]]
            nodes[0].ok("topic_send", "T", "x")
            assert [node.bodies() for node in nodes] == [[], ["x"], []]
            continue
        lost = {"A": ["topic_unnotify A T", "topic_none_notify T"], "B": LOST}[ident]
        told = [lost, lost, lost]
        told["ABO".index(ident)] = lost if "SET mode" in loss else lost[:1]
        assert [node.events() for node in nodes] == told
        assert nodes[0].error("topic_send", "T", "x")[0] in {"A": (2, 3), "B": (10,)}[ident]


@pytest.mark.parametrize("loss", ["DELETE FROM messages.auth", *LOSSES[5:7]])
def test_a_node_left_without_a_rule_is_disconnected(world: World, nodes: Nodes, loss: str):
    world.rules("hostile STRANGER Topic APART R 5")
    stranger = world.node("hostile", "STRANGER")
    world.execute(f"{loss} WHERE ident = 'B'")
    told = [*LOST, "disconnect B"]
    assert [node.events() for node in nodes] == [told, [LOST[0], "disconnect B"], told]
    assert stranger.events() == []
    assert nodes[1].error("topic_status", "T")[0] == 50
    assert nodes[1].error("init", "B")[0] == 5


def test_both_ends_of_a_removed_rpc_rule_hear_of_a_disconnect(world: World):
    for ident in "ASKER", "ASKED":
        world.begin()
        world.rules("user1 ASKER Rpc ASKED W 5", "user2 ASKED Topic OWN R 5")
        asker, asked = world.node("user1", "ASKER"), world.node("user2", "ASKED")
        asker.payloads()
        world.execute("DELETE FROM messages.auth WHERE ident = %s", [ident])
        assert [asker.events(), asked.events()] == [[f"disconnect {ident}"]] * 2


def test_truncate_disconnects_everybody(world: World, nodes: Nodes):
    world.execute("TRUNCATE psqlmessages_auth")
    for node, ident in zip(nodes, "ABO", strict=True):
        assert f"disconnect {ident}" in node.events()
        assert node.error("topic_status", "T")[0] == 50
    assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 0


def test_a_node_that_keeps_its_right_by_other_rules_is_unaffected(world: World, nodes: Nodes):
    world.rules("no_such_role * Topic * RW 5", "no_such_role A Rpc T W 5", "user1 X Topic U R 5")
    with world.owner.connection.transaction(force_rollback=True):
        world.execute("DELETE FROM messages.auth WHERE ident = 'B'")
    for change in (
        "UPDATE messages.auth SET dest = 'T*' WHERE dest = 'T'",
        "UPDATE messages.auth SET ident = ident || '*' WHERE dest = 'T*'",
        "UPDATE messages.auth SET mode = 'RW' WHERE mode <> 'O' AND type = 'Topic'",
        "DELETE FROM messages.auth WHERE dest = 'ELSE'",
        "DELETE FROM messages.auth WHERE role = 'no_such_role'",
    ):
        world.execute(change)
        nodes[0].ok("topic_send", "T", "x")
        heard = [[header["Type"] for header in node.headers()] for node in nodes]
        assert heard == [[], ["Topic"], ["Topic"]], change


def test_a_widened_right_and_a_changed_timeout_hold_at_once(world: World, nodes: Nodes):
    world.rules("user1 * Topic T W 50")
    assert sent_timeouts(nodes) == [50, 50]
    for change, timeout in (
        ("UPDATE messages.auth SET timeout = 3 WHERE ident = 'A'", 50),
        ("UPDATE messages.auth SET timeout = 60, dest = 'T*' WHERE ident = 'A' AND mode = 'W'", 60),
        ("UPDATE messages.auth SET timeout = 77", 77),
        ("UPDATE messages.auth SET timeout = 5 WHERE ident <> '*'", 77),
        ("DELETE FROM messages.auth WHERE ident = '*'", 5),
    ):
        world.execute(change)
        assert sent_timeouts(nodes) == [timeout, timeout], change
    assert nodes[0].error("topic_listen", "T")[0] == 3
    world.execute("UPDATE messages.auth SET mode = 'RW' WHERE mode = 'W'")
    assert nodes[0].ok("topic_listen", "T") == {"Err": "0"}


def sent_timeouts(nodes: Nodes) -> list[int]:
    """Send a large body with a token: the timeouts in the key and in the token."""
    nodes[0].ok("topic_send", "T", "x" * 9000, "TOKEN")
    header = parse(nodes[1].payloads()[-1])
    return [int(header["Dkey"].split(".")[0]), int(header["Token"].split(" ")[1])]


def test_a_role_that_is_granted_the_view_may_change_rules(world: World, nodes: Nodes):
    grantee = world.program("hostile")
    world.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON messages.auth TO hostile")
    try:
        insert = "INSERT INTO messages.auth (timeout, dest, role, ident, type, mode)"
        rule = "(5, 'NEW', 'user1', 'A', 'Topic', 'RW')"
        made = grantee.query(f"{insert} VALUES {rule} RETURNING id")
        nodes[0].ok("topic_listen", "NEW")
        grantee.execute("UPDATE messages.auth SET mode = 'W' WHERE id = %s", [made])
        assert nodes[0].events() == ["topic_unlisten A NEW", "topic_none_listen NEW"]
        grantee.execute("DELETE FROM messages.auth WHERE ident = 'A'")
        assert nodes[0].events()[-1] == "disconnect A"
    finally:
        world.execute("REVOKE ALL ON messages.auth FROM hostile")


@pytest.mark.parametrize(
    "timeout",
    # Who asks for no timeout waits ten seconds.
    ["100ms", pytest.param("0", marks=pytest.mark.nightly)],
)
def test_a_rule_that_cannot_be_saved_says_why_and_what_to_do(world: World, timeout: str):
    with world.owner.connection.transaction():
        world.owner.query("SELECT messages._limit_lock_wait()")
        assert world.owner.query("SHOW lock_timeout") == "10s"
    world.rules("user1 N Topic T RW 5")
    other = world.program()
    other.execute("BEGIN")
    other.execute("DELETE FROM messages.auth")
    world.execute(f"SET lock_timeout = '{timeout}'; SET statement_timeout = '40s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="another change of") as caught:
        world.rules("user1 N Topic U RW 5")
    assert "psqlmessages doctor" in (caught.value.diag.message_hint or "")
    other.execute("ROLLBACK")
    world.rules("user1 N Topic U RW 5")
    assert world.owner.query("SHOW lock_timeout") == timeout


GOOD = {"role": "r", "ident": "A", "type": "Topic", "dest": "T", "mode": "RW", "timeout": 5}
BROKEN: dict[str, list[dict[str, object]]] = {
    "rule_is_unique": [{"mode": "W", "timeout": 9}],
    "rule_names_are_not_empty": [{"role": ""}, {"ident": ""}, {"dest": ""}],
    "rule_timeout_is_positive": [{"dest": "X", "timeout": 0}, {"dest": "X", "timeout": -1}],
    "rule_type_is_known": [{"type": "topic"}],
    "rule_mode_is_known": [{"dest": "X", "mode": "WR"}],
    "rule_for_rpc_has_mode_w": [{"type": "Rpc", "mode": "RW"}, {"type": "Rpc", "mode": "R"}],
    "rule_to_administer_is_for_a_queue": [{"type": "Topic", "mode": "A"}],
    "rule_to_observe_is_for_a_topic": [{"type": "Queue", "mode": "O"}],
}


def test_a_rule_that_breaks_a_constraint_is_refused_by_its_name(world: World):
    wrong = []
    world.rule(*GOOD.values())
    for name, fields in ((name, each) for name, all_ in BROKEN.items() for each in all_):
        found = None
        try:
            world.rule(*(GOOD | fields).values())
        except psycopg.errors.IntegrityError as refused:
            found = refused.diag.constraint_name
        if found != name:
            wrong.append(f"{name}: {found}, by {fields}")
    assert not wrong
    of_rules = "conrelid = 'psqlmessages_auth'::regclass AND contype IN ('c', 'u')"
    names = "SELECT array_agg(conname::text ORDER BY conname) FROM pg_constraint"
    assert world.owner.query(f"{names} WHERE {of_rules}") == sorted(BROKEN)
