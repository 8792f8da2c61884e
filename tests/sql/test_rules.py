"""Rules: a change acts at once on connected nodes, whatever statement makes it."""

from collections.abc import Callable

import psycopg
import pytest
from django.core.management import call_command

from tests.sql.conftest import Program, World, parse

LOST = ["topic_unlisten B T", "topic_none_listen T"]
MANY = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT 'user2', 'B', type, 'M' || number || star, CASE type WHEN 'Rpc' THEN 'W' ELSE 'R' END, 5
    FROM generate_series(1, 100) AS number, unnest(ARRAY['', '*']) AS star,
         unnest(ARRAY['Topic', 'Rpc', 'Queue']) AS type
"""
UNSENT = ["topic_unnotify A T", "topic_none_notify T"]
# A second may be over before what was kept for so long is fetched.
PROLONG = "UPDATE psqlmessages_body SET expires_at = expires_at + interval '1 h'"


@pytest.fixture
def nodes(world: World) -> tuple[Program, Program, Program]:
    """A, which sends to T; B, which listens; O, which observes it."""
    world.rules(
        "user1 A Topic T W 5", "user2 B Topic T R 5", "user3 O Topic T O 5",
        "user1 A Topic ELSE R 5", "user2 B Topic ELSE R 5", "user3 O Topic ELSE R 5",
    )  # fmt: skip
    nodes = world.node("user1", "A"), world.node("user2", "B"), world.node("user3", "O")
    nodes[0].ok("topic_notify", "T")
    nodes[1].ok("topic_listen", "T")
    nodes[2].ok("topic_observe", "T")
    for node in nodes:
        node.payloads()
    return nodes


def losses(ident: str, mode: str) -> pytest.MarkDecorator:
    """Ways to take a node's right to T."""
    changes = {
        "DELETE": "DELETE FROM messages.auth",
        "UPDATE mode": f"UPDATE messages.auth SET mode = '{mode}'",
        "UPDATE dest": "UPDATE messages.auth SET dest = 'OTHER'",
        "UPDATE dest pattern": "UPDATE messages.auth SET dest = 'T.*'",
        "UPDATE type": "UPDATE messages.auth SET type = 'Queue', mode = 'R'",
        "UPDATE ident": "UPDATE messages.auth SET ident = 'SOMEBODY'",
        "UPDATE role": "UPDATE messages.auth SET role = 'hostile'",
        "UPDATE role that is not there": "UPDATE messages.auth SET role = 'no such role'",
    }
    return pytest.mark.parametrize(
        "change",
        [f"{change} WHERE ident = '{ident}' AND dest = 'T'" for change in changes.values()],
        ids=list(changes),
    )


@losses("B", "W")
def test_a_listener_that_lost_its_right_is_unlistened_and_told(
    world: World, nodes: tuple[Program, Program, Program], change: str
) -> None:
    world.owner.connection.execute(change)
    # Whoever has no rule for a topic any more hears of its own loss, and of nothing else there.
    own = LOST if "SET mode" in change else LOST[:1]
    assert [node.events() for node in nodes] == [LOST, own, LOST]
    assert nodes[0].error("topic_send", "T", "x")[0] == 10


@losses("A", "R")
def test_a_sender_that_lost_its_right_is_unnotified_and_told(
    world: World, nodes: tuple[Program, Program, Program], change: str
) -> None:
    world.owner.connection.execute(change)
    own = UNSENT if "SET mode" in change else UNSENT[:1]
    assert [node.events() for node in nodes] == [own, UNSENT, UNSENT]
    assert nodes[0].error("topic_send", "T", "x")[0] in (2, 3)


@losses("O", "R")
def test_an_observer_that_lost_its_right_receives_no_more(
    world: World, nodes: tuple[Program, Program, Program], change: str
) -> None:
    world.owner.connection.execute(change)
    nodes[0].ok("topic_send", "T", "x")
    assert "Topic" not in [header["Type"] for header in nodes[2].headers()]
    assert nodes[1].headers()[-1]["Body"] == "x"


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM messages.auth WHERE ident = 'B'",
        "UPDATE messages.auth SET ident = 'SOMEBODY' WHERE ident = 'B'",
        "UPDATE messages.auth SET role = 'hostile' WHERE ident = 'B'",
    ],
)
def test_a_node_left_without_a_rule_is_disconnected_as_its_former_rules_have_it_told(
    world: World, nodes: tuple[Program, Program, Program], change: str
) -> None:
    world.rules("hostile STRANGER Topic APART R 5")
    stranger = world.node("hostile", "STRANGER")
    world.owner.connection.execute(change)
    told = [*LOST, "disconnect B"]
    assert [node.events() for node in nodes] == [told, [LOST[0], "disconnect B"], told]
    assert stranger.events() == []
    assert nodes[1].error("topic_status", "T")[0] == 50
    assert nodes[1].error("init", "B")[0] == 5


@pytest.mark.parametrize("ident", ["ASKER", "ASKED"])
def test_both_ends_of_a_removed_rpc_rule_hear_of_a_disconnect(world: World, ident: str) -> None:
    world.rules("user1 ASKER Rpc ASKED W 5", "user2 ASKED Topic OWN R 5")
    asker, asked = world.node("user1", "ASKER"), world.node("user2", "ASKED")
    asker.payloads()
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = %s", [ident])
    assert [asker.events(), asked.events()] == [[f"disconnect {ident}"]] * 2


def test_truncate_disconnects_everybody(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    world.owner.connection.execute("TRUNCATE psqlmessages_auth")
    for node, ident in zip(nodes, "ABO", strict=True):
        assert f"disconnect {ident}" in node.events()
        assert node.error("topic_status", "T")[0] == 50
    assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 0


@pytest.mark.django_db(transaction=True)
def test_after_a_flush_no_node_is_left_and_all_can_begin_again(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    call_command("flush", interactive=False, verbosity=0)
    assert [node.error("topic_status", "T")[0] for node in nodes] == [50, 50, 50]
    world.rules("user1 A Topic T W 5", "user2 B Topic T R 5")
    for node, ident in zip(nodes, "AB", strict=False):
        assert "Already" not in node.ok("init", ident)
    nodes[1].ok("topic_listen", "T")
    nodes[0].ok("topic_notify", "T")
    nodes[0].ok("topic_send", "T", "x")
    assert nodes[1].headers()[-1]["Body"] == "x"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE messages.auth SET dest = 'T*' WHERE dest = 'T'",
        "UPDATE messages.auth SET ident = ident || '*' WHERE dest = 'T'",
        "UPDATE messages.auth SET mode = 'RW' WHERE mode <> 'O'",
        "DELETE FROM messages.auth WHERE dest = 'ELSE'",
    ],
)
def test_who_keeps_its_right_by_other_rules_notices_nothing(
    world: World, nodes: tuple[Program, Program, Program], change: str
) -> None:
    world.owner.connection.execute(change)
    nodes[0].ok("topic_send", "T", "x")
    heard = [[header["Type"] for header in node.headers()] for node in nodes]
    assert heard == [[], ["Topic"], ["Topic"]]


def test_the_right_stays_while_one_of_two_rules_gives_it(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    world.rules("user2 B* Topic T* R 5")
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'B' AND dest = 'T'")
    assert nodes[1].ok("topic_listen", "T")["Already"] == 1
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'B*'")
    assert nodes[1].events() == LOST[:1]


def test_many_rules_removed_in_one_statement_tell_each_loss_once(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    world.rules("user1 A Topic M* R 5")
    world.owner.connection.execute(MANY)
    for number in range(1, 101):
        nodes[1].ok("topic_listen", f"M{number}")
    nodes[0].payloads()
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'B' AND dest ^@ 'M'")
    lost = [[f"topic_unlisten B M{n}", f"topic_none_listen M{n}"] for n in range(1, 101)]
    assert sorted(nodes[0].events()) == sorted(event for pair in lost for event in pair)


def test_many_rules_added_in_one_statement_make_their_topics(world: World) -> None:
    world.owner.connection.execute(MANY)
    topics = world.owner.query("SELECT array_agg(name) FROM psqlmessages_topic")
    assert sorted(topics) == sorted(f"M{number}" for number in range(1, 101))


def test_a_widened_right_holds_at_once(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    assert nodes[0].error("topic_listen", "T")[0] == 3
    world.owner.connection.execute("UPDATE messages.auth SET mode = 'RW' WHERE mode = 'W'")
    assert nodes[0].ok("topic_listen", "T") == {"Err": "0"}


@pytest.mark.parametrize(
    ("change", "timeout"),
    [
        ("UPDATE messages.auth SET timeout = 3 WHERE ident = 'A'", 50),
        ("UPDATE messages.auth SET timeout = 77", 77),
        ("UPDATE messages.auth SET timeout = 60, dest = 'T*' WHERE ident = 'A' AND mode = 'W'", 60),
        ("DELETE FROM messages.auth WHERE ident = '*'", 5),
    ],
)
def test_a_changed_timeout_holds_from_the_next_send_on(
    world: World, nodes: tuple[Program, Program, Program], change: str, timeout: int
) -> None:
    world.rules("user1 * Topic T W 50")
    assert sent_timeouts(nodes) == [50, 50]
    world.owner.connection.execute(change)
    assert sent_timeouts(nodes) == [timeout, timeout]


def sent_timeouts(nodes: tuple[Program, Program, Program]) -> list[int]:
    """Send a large body with a token: the timeouts in the key and in the token."""
    nodes[0].ok("topic_send", "T", "x" * 9000, "TOKEN")
    header = parse(nodes[1].payloads()[-1])
    return [int(header["Dkey"].split(".")[0]), int(header["Token"].split(" ")[1])]


def test_an_owner_of_no_table_may_change_rules_where_it_is_granted_the_view(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    grantee = world.program("hostile")
    world.owner.connection.execute(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON messages.auth TO hostile"
    )
    try:
        made = grantee.query(
            "INSERT INTO messages.auth (timeout, dest, role, ident, type, mode)"
            " VALUES (5, 'NEW', 'user1', 'A', 'Topic', 'RW') RETURNING id"
        )
        nodes[0].ok("topic_listen", "NEW")
        grantee.connection.execute("UPDATE messages.auth SET mode = 'W' WHERE id = %s", [made])
        assert nodes[0].events() == ["topic_unlisten A NEW", "topic_none_listen NEW"]
        grantee.connection.execute("DELETE FROM messages.auth WHERE ident = 'A'")
        assert nodes[0].events()[-1] == "disconnect A"
    finally:
        world.owner.connection.execute("REVOKE ALL ON messages.auth FROM hostile")


@pytest.mark.parametrize("timeout", [1, 999_999_999, 2_147_483_647])
def test_a_request_can_be_answered_whatever_the_timeout_of_its_rule(
    world: World, timeout: int
) -> None:
    world.rules(f"user1 ASKER Rpc ASKED W {timeout}", "user2 ASKED Topic OWN R 5")
    asker, asked = world.node("user1", "ASKER"), world.node("user2", "ASKED")
    asker.ok("rpc", "ASKED", "TOKEN", "x" * 9000)
    request = asked.payloads(1)[0]
    world.owner.connection.execute(PROLONG)
    asked.ok("get_data", request)
    asked.ok("return", "ASKER", parse(request)["Token"], "y" * 9000)
    world.owner.connection.execute(PROLONG)
    asker.ok("get_data", asker.payloads()[-1])


@pytest.mark.parametrize("type_", ["Topic", "Rpc"])
def test_a_rule_for_a_role_that_does_not_exist_harms_nobody(
    world: World, nodes: tuple[Program, Program, Program], type_: str
) -> None:
    mode = "RW" if type_ == "Topic" else "W"
    world.rule("no such role", "*", type_, "*", mode, 5)
    world.rule("no such role", "A", type_, "T", mode, 5)
    nodes[0].ok("topic_send", "T", "x")
    nodes[1].ok("topic_unlisten", "T")
    nodes[1].ok("deinit", "B")
    nodes[1].ok("init", "B")
    assert nodes[1].error("init", "C")[0] == 5


def test_a_role_may_use_the_rule_of_an_ident_that_another_role_has_too(world: World) -> None:
    world.rules("user1 BOTH Topic T R 5", "user2 BOTH Topic T W 5")
    assert world.node("user2", "BOTH").error("topic_listen", "T")[0] == 3


def test_no_rule_is_read_that_is_not_committed(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    with world.owner.connection.transaction(force_rollback=True):
        world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'B'")
    nodes[0].ok("topic_send", "T", "x")
    assert [header["Type"] for header in nodes[1].headers()] == ["Topic"]


def test_a_rule_that_is_refused_changes_nothing(
    world: World, nodes: tuple[Program, Program, Program]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        world.rule("user1", "A", "Topic", "HALF", "X", 5)
    assert nodes[0].error("topic_status", "HALF")[0] == 9


def test_names_with_blanks_around_are_other_names(
    world: World, new_role: Callable[[str], Program]
) -> None:
    world.rule(" user1", " A", "Topic", "T ", "RW", 5)
    program = new_role(" user1")
    program.ok("init", " A")
    assert world.program("user1").error("init", " A")[0] == 5
    assert program.error("topic_listen", "T")[0] == 9
    program.ok("topic_listen", "T ")


@pytest.mark.parametrize("timeout", ["100ms", pytest.param("0", marks=pytest.mark.slow)])
def test_a_rule_that_cannot_be_saved_beside_another_says_why_and_what_to_do(
    world: World, timeout: str
) -> None:
    # Who asks for no timeout waits ten seconds.
    world.rules("user1 N Topic T RW 5")
    other = world.program()
    other.connection.execute("BEGIN")
    other.connection.execute("DELETE FROM messages.auth")
    world.owner.connection.execute(f"SET lock_timeout = '{timeout}'; SET statement_timeout = '40s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="another change of") as caught:
        world.rules("user1 N Topic U RW 5")
    assert "psqlmessages doctor" in (caught.value.diag.message_hint or "")
    other.connection.execute("ROLLBACK")
    world.rules("user1 N Topic U RW 5")
    assert world.owner.query("SHOW lock_timeout") == timeout


@pytest.mark.parametrize("act", ["a rule that goes", "a topic that is observed"])
def test_an_evaluation_in_an_open_transaction_is_waited_for_by_nobody(
    world: World, nodes: tuple[Program, Program, Program], act: str
) -> None:
    world.rules("user1 DEAD Topic T R 5", "user3 O Topic T* O 5")
    dying = world.node("user1", "DEAD")
    dying.ok("topic_listen", "T")
    nodes[0].ok("evaluate")
    world.kill(dying)
    waiting = world.owner if act == "a rule that goes" else nodes[2]
    waiting.connection.execute("SET lock_timeout = '30s'")
    with nodes[0].connection.transaction():
        assert nodes[0].ok("evaluate")["Events"] > 0
        take_or_observe(waiting)


def take_or_observe(program: Program) -> None:
    """As the owner, take B's rules; as a node, observe more."""
    if program.query("SELECT session_user::text") == "user3":
        program.ok("topic_observe", "T*")
    else:
        program.connection.execute("DELETE FROM messages.auth WHERE ident = 'B'")
