"""Topics: who may and who does send and listen, patterns, several nodes of a session, observers."""

from typing import Any

import pytest

from tests.sql.conftest import Program, World

DONE = {"Err": "0"}
ALREADY = {"Err": "0", "Already": 1}


def topics(world: World) -> list[str]:
    """The names of all topics."""
    return world.owner.query("SELECT array_agg(name::text ORDER BY name) FROM psqlmessages_topic")


def bodies(program: Program) -> list[str]:
    """The bodies of the messages that arrived; events left out."""
    return [header["Body"] for header in program.headers() if header["Type"] == "Topic"]


def people(program: Program, function: str, topic: str) -> tuple[list[str], list[str]]:
    """The notifiers and the listeners of an answer that has nothing else."""
    answer = program.ok(function, topic)
    assert answer.keys() == {"Err", "Notifiers", "Listeners"}
    return answer["Notifiers"], answer["Listeners"]


@pytest.mark.parametrize("kind", ["notify", "listen", "observe"])
def test_beginning_and_ending_twice_say_already_the_second_time(world: World, kind: str) -> None:
    mode = {"notify": "W", "listen": "R", "observe": "O"}[kind]
    world.rules(f"user1 NODE Topic T {mode} 10")
    node = world.node("user1", "NODE")
    answers = [node.ok(f"topic_{verb}{kind}", "T") for verb in ("un", "", "", "un", "un", "")]
    assert answers == [ALREADY, DONE, ALREADY, DONE, ALREADY, DONE]


def test_topic_auth_names_the_authorized_and_topic_status_the_active(spec_world: World) -> None:
    node = spec_world.node("user2", "NODE2")
    node.ok("topic_listen", "MYTOPIC")
    assert people(node, "topic_auth", "MYTOPIC") == (["NODE1", "NODE2"], ["NODE2", "NODE3"])
    assert people(node, "topic_status", "MYTOPIC") == ([], ["NODE2"])


def test_topic_auth_names_patterns_as_the_rules_hold_them(world: World) -> None:
    world.rules("user1 NODE* Topic T R 10", "user2 SENDER Topic * W 10", "user2 EYE Topic T* O 10",
                "user2 NODE* Topic T R 10", "user2 CALLER Rpc T W 10")  # fmt: skip
    assert people(world.node("user1", "NODE7"), "topic_auth", "T") == (["SENDER"], ["NODE*"])


def test_topic_status_leaves_out_who_ended(spec_world: World) -> None:
    one, two = spec_world.node("user1", "NODE1"), spec_world.node("user2", "NODE2")
    one.ok("topic_notify", "MYTOPIC")
    two.ok("topic_notify", "MYTOPIC")
    one.ok("deinit", "NODE1")
    assert people(two, "topic_status", "MYTOPIC") == (["NODE2"], [])


@pytest.mark.parametrize("function", ["topic_auth", "topic_status"])
@pytest.mark.parametrize("mode", ["W", "R", "RW", "O"])
def test_any_rule_for_a_topic_is_enough_to_look(world: World, function: str, mode: str) -> None:
    world.rules(f"user1 NODE Topic T {mode} 10")
    world.node("user1", "NODE").ok(function, "T")


def test_a_rule_that_names_a_topic_makes_it_and_a_pattern_makes_none(world: World) -> None:
    world.rules(
        "user1 NODE Topic NAMED W 10", "user1 NODE Topic P* RW 10", "user1 NODE Rpc CALLEE W 10"
    )
    assert topics(world) == ["NAMED"]


def test_a_topic_stays_when_its_rule_goes(world: World) -> None:
    world.rules("user1 NODE Topic NAMED W 10", "user1 NODE Topic OTHER W 10")
    node = world.node("user1", "NODE")
    world.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'NAMED'")
    assert node.error("topic_notify", "NAMED")[0] == 2


@pytest.mark.parametrize("function", ["topic_listen", "topic_notify"])
def test_a_pattern_rule_makes_a_topic_when_listened_or_notified(
    world: World, function: str
) -> None:
    world.rules("user1 NODE Topic P* RW 10")
    node = world.node("user1", "NODE")
    node.ok(function, "PLAIN")
    assert topics(world) == ["PLAIN"]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        *((f"topic_{name}", ["PLAIN"]) for name in (
            "auth", "status", "unnotify", "unlisten", "observe", "unobserve",
        )),
        ("topic_send", ["PLAIN", "body"]),
        ("topic_send_many", ["PLAIN", ["body"]]),
        ("topic_send_as", ["NODE", "PLAIN", "body"]),
    ],
)  # fmt: skip
def test_a_pattern_rule_makes_no_topic_for_other_functions(
    world: World, function: str, arguments: list[Any]
) -> None:
    world.rules("user1 NODE Topic P* RW 10", "user1 NODE* Topic P* O 10")
    node = world.node("user1", "NODE")
    assert node.error(function, *arguments) == (9, "Topic PLAIN is not existent")
    assert topics(world) is None


def test_a_refused_listen_makes_no_topic(world: World) -> None:
    world.rules("user1 NODE Topic P* W 10")
    node = world.node("user1", "NODE")
    assert node.error("topic_listen", "PLAIN")[0] == 3
    assert node.error("topic_listen", "OTHER")[0] == 9
    assert topics(world) is None


@pytest.mark.parametrize(
    ("pattern", "topic", "number"),
    [
        ("A*", "A", 0), ("A*", "AB", 0), ("A*", "BA", 9), ("A*", "a", 9), ("*", "any thing", 0),
        ("A_*", "AXB", 9), ("A%*", "AXB", 9), ("A%*", "A%B", 0), ("A*B*", "A*B*C", 0),
        ("A*B*", "AXBC", 9), ("A\\*", "A\\B", 0), ("ü*", "über", 0), ("A*", "A*", 9),
    ],
)  # fmt: skip
def test_a_pattern_means_all_that_begins_so_letter_by_letter(
    world: World, pattern: str, topic: str, number: int
) -> None:
    world.rules(f"user1 NODE Topic {pattern} R 10")
    answer = world.node("user1", "NODE").call("topic_listen", topic)
    assert answer["Err"] == str(number)


@pytest.mark.parametrize("ident", ["GATE", "GATE1", "GATEWAY*2"])
def test_a_pattern_of_idents_lets_a_role_be_any_of_them(world: World, ident: str) -> None:
    world.rules("user1 GATE* Topic T R 10")
    node = world.node("user1", ident)
    assert node.ok("topic_listen", "T") == DONE
    assert people(node, "topic_status", "T") == ([], [ident])


def test_several_rules_add_up_to_the_union_of_modes(world: World) -> None:
    world.rules(
        "user3 NODE Topic T W 10", "team NODE Topic T R 10", "user3 NODE* Topic T* O 10",
    )  # fmt: skip
    node = world.node("user3", "NODE")
    answers = [node.ok(f"topic_{kind}", "T") for kind in ("notify", "listen", "observe")]
    assert answers == [DONE] * 3


def test_several_rules_add_up_to_the_longest_timeout(world: World) -> None:
    world.rules(
        "user3 NODE Topic T RW 3", "user3 NODE* Topic T W 77", "team NODE Topic T* R 5",
        "user1 NODE Topic T RW 99", "user3 NODE Topic U RW 98",
    )  # fmt: skip
    node = world.node("user3", "NODE")
    node.ok("topic_listen", "T")
    node.ok("topic_notify", "T")
    node.ok("topic_send", "T", "body", "TOKEN")
    assert node.headers()[0]["Token"].split()[1:] == ["77", "TOKEN"]


def test_a_sender_that_listens_receives_its_own_message(world: World) -> None:
    world.rules("user1 NODE Topic T RW 10")
    node = world.node("user1", "NODE")
    node.ok("topic_notify", "T")
    assert node.error("topic_send", "T", "unheard") == (10, "cannot listeners for Topic T")
    node.ok("topic_listen", "T")
    node.ok("topic_send", "T", "heard")
    assert bodies(node) == ["heard"]


def test_a_node_that_unlistened_receives_nothing(spec_world: World) -> None:
    one = spec_world.node("user1", "NODE1")
    two, three = spec_world.node("user2", "NODE2"), spec_world.node("user3", "NODE3")
    for node in (two, three):
        node.ok("topic_listen", "MYTOPIC")
    one.ok("topic_notify", "MYTOPIC")
    two.ok("topic_unlisten", "MYTOPIC")
    one.ok("topic_send", "MYTOPIC", "body")
    assert (bodies(two), bodies(three)) == ([], ["body"])


@pytest.fixture
def gateway(world: World) -> Program:
    """A session with three nodes, that listen to T; SENDER sends to it."""
    world.rules("user1 GATE* Topic T RW 10", "user2 SENDER Topic T RW 10")
    gateway = world.gateway("user1", "GATE1", "GATE2", "GATE3")
    for ident in ("GATE1", "GATE2", "GATE3"):
        gateway.ok("use", ident)
        gateway.ok("topic_listen", "T")
    gateway.payloads()
    return gateway


@pytest.fixture
def sender(world: World, gateway: Program) -> Program:
    sender = world.node("user2", "SENDER")
    sender.ok("topic_notify", "T")
    sender.payloads()
    gateway.payloads()
    return sender


def test_several_listeners_of_one_session_get_one_notification(
    gateway: Program, sender: Program
) -> None:
    sender.ok("topic_send", "T", "body")
    [header] = gateway.headers()
    assert header["Body"] == "body"
    assert "Nodes" not in header
    assert people(sender, "topic_status", "T")[1] == ["GATE1", "GATE2", "GATE3"]


def test_a_session_gets_messages_until_its_last_listener_ends(
    gateway: Program, sender: Program
) -> None:
    received = []
    for ident in ("GATE3", "GATE1", "GATE2"):
        gateway.ok("use", ident)
        gateway.ok("topic_unlisten", "T")
        answer = sender.call("topic_send", "T", f"after {ident}")
        received.append((answer["Err"], bodies(gateway)))
    assert received == [("0", ["after GATE3"]), ("0", ["after GATE1"]), ("10", [])]


def test_nodes_of_one_session_share_its_channel(gateway: Program) -> None:
    channels = {gateway.ok("init", ident)["Channel"] for ident in ("GATE1", "GATE2", "GATE4")}
    assert len(channels) == 1


def test_the_newest_node_acts_until_use_chooses_another(world: World, gateway: Program) -> None:
    gateway.ok("init", "GATE4")
    gateway.ok("topic_notify", "T")
    gateway.ok("use", "GATE2")
    gateway.ok("topic_notify", "T")
    assert people(gateway, "topic_status", "T")[0] == ["GATE2", "GATE4"]


@pytest.mark.parametrize(("mode", "number"), [("R", 3), ("RW", 21)])
@pytest.mark.parametrize("function", ["topic_send", "topic_send_many"])
def test_who_only_listens_sends_nothing(
    world: World, function: str, mode: str, number: int
) -> None:
    world.rules(f"user1 EAR Topic T {mode} 5", "user2 OTHER Topic T R 5")
    ear, other = world.node("user1", "EAR"), world.node("user2", "OTHER")
    for program in (ear, other):
        program.ok("topic_listen", "T")
        program.payloads()
    assert ear.error(function, "T", ["x"] if function.endswith("many") else "x")[0] == number
    assert other.headers() == []


def test_a_message_comes_from_the_node_that_use_chose(world: World, gateway: Program) -> None:
    for ident in ("GATE1", "GATE2"):
        gateway.ok("use", ident)
        gateway.ok("topic_notify", "T")
    for ident in ("GATE2", "GATE1"):
        gateway.ok("use", ident)
        gateway.ok("topic_send", "T", "body")
    senders = [header["From"] for header in gateway.headers() if header["Type"] == "Topic"]
    assert senders == ["GATE2", "GATE1"]


def test_after_deinit_of_the_acting_node_the_newest_left_acts(gateway: Program) -> None:
    gateway.ok("deinit", "GATE3")
    gateway.ok("topic_notify", "T")
    assert people(gateway, "topic_status", "T") == (["GATE2"], ["GATE1", "GATE2"])


def test_after_deinit_of_another_node_the_chosen_one_still_acts(gateway: Program) -> None:
    gateway.ok("use", "GATE1")
    gateway.ok("deinit", "GATE3")
    gateway.ok("topic_notify", "T")
    assert people(gateway, "topic_status", "T")[0] == ["GATE1"]


def test_after_deinit_of_the_last_node_none_acts(gateway: Program, sender: Program) -> None:
    for ident in ("GATE1", "GATE2", "GATE3"):
        gateway.ok("deinit", ident)
    assert gateway.error("topic_listen", "T") == (50, "call messages.init first")
    assert gateway.query("SELECT count(*) FROM pg_listening_channels()") == 0
