"""Topics: who may and who does send and listen, patterns, and several nodes of a session."""

from typing import Any

import pytest

from tests.sql.conftest import Program, World

DONE = {"Err": "0"}
ALREADY = {"Err": "0", "Already": 1}


def topics(world: World) -> list[str]:
    return world.owner.query("SELECT array_agg(name::text ORDER BY name) FROM psqlmessages_topic")


def people(program: Program, function: str, topic: str) -> tuple[list[str], list[str]]:
    answer = program.ok(function, topic)
    assert answer.keys() == {"Err", "Notifiers", "Listeners"}
    return answer["Notifiers"], answer["Listeners"]


def test_repeated_begins_and_ends_answer_already(world: World):
    world.rules("user3 NODE Topic T RW 10", "team NODE Topic T O 10")
    node = world.node("user3", "NODE")
    for kind in "notify", "listen", "observe":
        answers = [node.ok(f"topic_{verb}{kind}", "T") for verb in ("un", "", "", "un", "un", "")]
        assert answers == [ALREADY, DONE, ALREADY, DONE, ALREADY, DONE], kind


def test_any_rule_lets_a_node_ask_and_topic_auth_names_patterns(world: World):
    world.rules("user1 NODE* Topic T R 10", "user2 SENDER Topic * W 10", "user2 EYE Topic T* O 10",
                "user2 NODE* Topic T R 10", "user2 CALLER Rpc T W 10",
                "user3 RW Topic T RW 10")  # fmt: skip
    for role, ident in ("user1", "NODE7"), ("user2", "SENDER"), ("user2", "EYE"), ("user3", "RW"):
        node = world.node(role, ident)
        assert people(node, "topic_auth", "T") == (["RW", "SENDER"], ["NODE*", "RW"])
        node.ok("topic_status", "T")


def test_a_pattern_rule_makes_a_topic_when_listened_or_notified(world: World):
    # One that names a topic makes it, and leaves it.
    world.rules("user1 NODE Topic NAMED W 10", "user1 NODE Rpc X W 10")
    world.execute("DELETE FROM messages.auth WHERE dest = 'NAMED'")
    world.rules("user1 NODE Topic P* RW 10", "user1 NODE* Topic P* O 10", "user1 NODE Topic W* W 1")
    node = world.node("user1", "NODE")
    assert node.error("topic_notify", "NAMED")[0] == 2
    others: dict[str, tuple[Any, ...]] = {
        **{f"topic_{name}": ("PLAIN",) for name in (
            "auth", "status", "unnotify", "unlisten", "observe", "unobserve",
        )},
        "topic_send": ("PLAIN", "body"),
        "topic_send_many": ("PLAIN", ["body"]),
        "topic_send_as": ("NODE", "PLAIN", "body"),
    }  # fmt: skip
    answers = {name: node.error(name, *arguments) for name, arguments in others.items()}
    assert answers == dict.fromkeys(others, (9, "Topic PLAIN is not existent"))
    assert node.error("topic_listen", "WRITTEN")[0] == 3
    assert node.error("topic_listen", "OTHER")[0] == 9
    assert topics(world) == ["NAMED"]
    node.ok("topic_listen", "PLAIN")
    node.ok("topic_notify", "PLANE")
    assert topics(world) == ["NAMED", "PLAIN", "PLANE"]


def test_a_pattern_matches_names_by_their_exact_prefix(world: World):
    world.rules("user1 NODE Topic KEPT R 10")
    node, wrong = world.node("user1", "NODE"), []
    for pattern, topic, number in (
        ("A*", "A", 0), ("A*", "AB", 0), ("A*", "BA", 9), ("A*", "a", 9), ("*", "any thing", 0),
        ("A_*", "AXB", 9), ("A%*", "AXB", 9), ("A%*", "A%B", 0), ("A*B*", "A*B*C", 0),
        ("A*B*", "AXBC", 9), ("A\\*", "A\\B", 0), ("ü*", "über", 0), ("A*", "A*", 9),
    ):  # fmt: skip
        world.execute("DELETE FROM messages.auth WHERE dest <> 'KEPT'")
        world.execute("DELETE FROM psqlmessages_topic")
        world.rule("user1", "NODE", "Topic", pattern, "R", 10)
        if (found := node.call("topic_listen", topic)["Err"]) != str(number):
            wrong.append(f"{topic} by {pattern}: {found}")
    assert not wrong


def test_a_pattern_of_idents_lets_a_role_be_any_of_them(world: World):
    world.rules("user1 GATE* Topic T R 10", "user1 * Topic U R 10")
    idents = ["GATE", "GATE1", "GATEWAY*2"]
    node = world.node("user1", *idents)
    for pattern in "GATE*", "GATE1*", "*":
        assert node.error("init", pattern)[0] == 5
    node.each(idents, "topic_listen", "T")
    assert people(node, "topic_status", "T") == ([], idents)


def test_several_rules_add_up_to_the_union_of_modes_and_the_longest_timeout(world: World):
    world.rules(
        "user3 NODE Topic T W 3", "team NODE Topic T R 5", "user3 NODE* Topic T* O 4",
        "user3 NODE* Topic T W 77", "user1 NODE Topic T RW 99", "user3 NODE Topic U RW 98",
    )  # fmt: skip
    node = world.node("user3", "NODE")
    assert [node.ok(f"topic_{kind}", "T") for kind in ("notify", "listen", "observe")] == [DONE] * 3
    node.ok("topic_send", "T", "body", "TOKEN")
    assert node.headers()[0]["Token"].split()[1:] == ["77", "TOKEN"]


def test_a_message_reaches_all_listeners_and_no_other_node(spec_world: World):
    one, two, three = (spec_world.node(f"user{n}", f"NODE{n}") for n in (1, 2, 3))
    one.ok("topic_notify", "MYTOPIC")
    assert one.error("topic_send", "MYTOPIC", "x") == (10, "cannot listeners for Topic MYTOPIC")
    for node in two, three:
        node.ok("topic_listen", "MYTOPIC")
    two.ok("topic_notify", "MYTOPIC")
    two.ok("topic_send", "MYTOPIC", "from two")
    two.ok("topic_unlisten", "MYTOPIC")
    one.ok("topic_send", "MYTOPIC", "from one")
    assert [node.bodies() for node in (one, two, three)] == [
        [], ["from two"], ["from two", "from one"],
    ]  # fmt: skip


def test_a_listener_sends_nothing(world: World):
    world.rules("user1 EAR Topic R R 5", "user1 EAR Topic RW RW 5", "user2 OTHER Topic R* R 5")
    ear, other = world.node("user1", "EAR"), world.node("user2", "OTHER")
    for topic, number in ("R", 3), ("RW", 21):
        for program in ear, other:
            program.ok("topic_listen", topic)
        assert ear.error("topic_send", topic, "x")[0] == number
        assert ear.error("topic_send_many", topic, ["x"])[0] == number
    assert other.bodies() == []


IDENTS = ["GATE1", "GATE2", "GATE3"]


@pytest.fixture
def gateway(world: World) -> Program:
    """A session with three nodes, that listen to T; SENDER sends to it."""
    world.rules("user1 GATE* Topic T RW 10", "user2 SENDER Topic T RW 10")
    gateway = world.node("user1", *IDENTS)
    gateway.each(IDENTS, "topic_listen", "T")
    gateway.payloads()
    return gateway


def test_a_session_gets_messages_until_its_last_node_leaves(world: World, gateway: Program):
    sender = world.node("user2", "SENDER")
    sender.ok("topic_notify", "T")
    gateway.payloads()
    sender.ok("topic_send", "T", "body")
    [header] = gateway.headers()
    assert (header["Body"], "Nodes" in header) == ("body", False)
    assert people(sender, "topic_status", "T")[1] == IDENTS
    received = []
    for ident in ("GATE3", "GATE1", "GATE2"):
        gateway.ok("use", ident)
        gateway.ok("topic_unlisten", "T")
        received.append((sender.call("topic_send", "T", f"after {ident}")["Err"], gateway.bodies()))
    assert received == [("0", ["after GATE3"]), ("0", ["after GATE1"]), ("10", [])]


def test_the_newest_node_of_a_session_acts_until_use_chooses_another(gateway: Program):
    assert len({gateway.ok("init", ident)["Channel"] for ident in (*IDENTS, "GATE4")}) == 1
    for ident in "", "GATE2", "GATE1":
        if ident:
            gateway.ok("use", ident)
        gateway.ok("topic_notify", "T")
    assert people(gateway, "topic_status", "T")[0] == ["GATE1", "GATE2", "GATE4"]
    for ident in "GATE2", "GATE1":
        gateway.ok("use", ident)
        gateway.ok("topic_send", "T", "body")
    senders = [header["From"] for header in gateway.headers() if header["Type"] == "Topic"]
    assert senders == ["GATE2", "GATE1"]


def test_after_deinit_of_the_acting_node_the_newest_acts(gateway: Program):
    gateway.ok("deinit", "GATE3")
    gateway.ok("topic_notify", "T")
    assert people(gateway, "topic_status", "T") == (["GATE2"], ["GATE1", "GATE2"])
    # That of another one changes nothing.
    gateway.ok("use", "GATE1")
    gateway.ok("deinit", "GATE2")
    gateway.ok("topic_notify", "T")
    assert people(gateway, "topic_status", "T")[0] == ["GATE1"]
    gateway.ok("deinit", "GATE1")
    assert gateway.error("topic_listen", "T") == (50, "call messages.init first")
    assert gateway.query("SELECT count(*) FROM pg_listening_channels()") == 0
