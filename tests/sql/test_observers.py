"""Observers, who see topics and are no listeners; and which nodes of a session an event is for."""

import json

import pytest

from tests.sql.conftest import Program, World, parse

RULES = [
    "user1 SENDER Topic PRICES W 10", "user1 SENDER Topic P* W 10",
    "user1 SENDER Topic ORDERS W 10", "user2 LISTENER Topic PRICES R 10",
    "user2 LISTENER Topic P* R 10", "user2 LISTENER Topic ORDERS R 10",
    "user3 EYE Topic P* O 10", "user3 EYE Topic ORDERS O 10",
]  # fmt: skip

# At the edges of what a pattern means, in the order of the index, and behind them.
BEGIN_SO = ["P", "P ", "PA", "P~", "P\u00e9", "P\U0010ffff", "P" + 99 * "\U0010ffff"]
BEGIN_ELSE = ["O", "O~", "O" + 99 * "\U0010ffff", "Q", "p", "\U0010ffff"]


@pytest.fixture
def world(world: World) -> World:
    world.rules(*RULES)
    return world


@pytest.fixture
def sender(world: World) -> Program:
    return world.node("user1", "SENDER", notify="PRICES")


@pytest.fixture
def listener(world: World) -> Program:
    return world.node("user2", "LISTENER", listen="PRICES")


@pytest.fixture
def eye(world: World) -> Program:
    return world.node("user3", "EYE")


def test_patterns_see_later_topics(world: World, sender: Program, listener: Program, eye: Program):
    eye.ok("topic_observe", "P*")
    world.rules("user2 LISTENER Topic PLATES R 10")
    for topic in "PLATES", "PENS":
        listener.ok("topic_listen", topic)
        sender.ok("topic_send_as", "SENDER", topic, topic)
    assert eye.bodies() == ["PLATES", "PENS"]
    names = [*BEGIN_SO, *BEGIN_ELSE]
    for name in names:
        world.rule("user1", "SENDER", "Topic", name, "W", 10)
    world.rule("user2", "LISTENER", "Topic", "*", "R", 10)
    for name in names:
        listener.ok("topic_listen", name)
        sender.ok("topic_notify", name)
        sender.ok("topic_send", name, name)
    assert eye.bodies() == BEGIN_SO


def test_a_message_arrives_once_though_observed_twice(world: World, sender: Program):
    world.rules("user3 EYE2 Topic P* O 10", "user3 EYE2 Topic PRICES R 10")
    eye = world.node("user3", "EYE", observe="P* PRICES PRI*")
    eye.ok("init", "EYE2")
    eye.ok("topic_observe", "P*")
    eye.ok("topic_listen", "PRICES")
    sender.ok("topic_send", "PRICES", "one")
    sender.ok("topic_send_many", "PRICES", ["two", "three"])
    assert eye.bodies() == ["one", "two", "three"]


def test_an_observer_is_no_listener(sender: Program, listener: Program, eye: Program):
    eye.ok("topic_observe", "PRICES")
    assert "EYE" not in str([eye.ok(name, "PRICES") for name in ("topic_status", "topic_auth")])
    eye.payloads()
    listener.ok("topic_unlisten", "PRICES")
    assert eye.events() == ["topic_unlisten LISTENER PRICES", "topic_none_listen PRICES"]
    for function, *arguments in (
        ("topic_send", "PRICES", "body"), ("topic_send_many", "PRICES", ["body"]),
        ("topic_send_as", "SENDER", "PRICES", "body"),
    ):  # fmt: skip
        assert sender.error(str(function), *arguments)[0] == 10
    assert eye.bodies() == []


def test_an_observation_lasts(world: World, sender: Program, listener: Program, eye: Program):
    world.rules("user3 STAYS Topic PRICES O 9", "team EYE Topic PRICES R 9", "user1 B Topic P* O 9")

    def seen() -> list[str]:
        sender.ok("topic_send", "PRICES", "body")
        return eye.bodies()

    with eye.connection.transaction(force_rollback=True):
        eye.ok("topic_observe", "PRICES")
    assert seen() == [], "it was rolled back"
    second = world.node("user1", "B")
    for observed in ("P*", "PR*"):
        eye.ok("topic_observe", observed)
        second.ok("topic_observe", observed)
        second.ok("topic_unobserve", observed)
    assert seen() == ["body"], "another observer ended"
    eye.ok("topic_unobserve", "P*")
    assert eye.ok("topic_unobserve", "PRICES") == {"Err": "0", "Already": 1}
    assert seen() == ["body"], "another observation ended"
    eye.ok("topic_listen", "PRICES")
    eye.ok("topic_unlisten", "PRICES")
    assert seen() == ["body"], "it listened meanwhile"
    eye.ok("topic_unobserve", "PR*")
    assert seen() == []
    eye.ok("topic_observe", "P*")
    eye.ok("init", "STAYS")
    eye.ok("deinit", "EYE")
    assert seen() == [], "it is registered no more"


def test_only_the_observer_hears_of_its_loss(world: World, listener: Program, eye: Program):
    world.rules("user3 EYE Rpc NOBODY W 10")
    eye.ok("topic_observe", "P*")
    eye.payloads(), listener.payloads()
    world.execute("DELETE FROM messages.auth WHERE mode = 'O'")
    assert eye.events() == ["topic_unobserve EYE P*"]
    assert listener.events() == []


def test_observing_needs_a_rule_of_mode_o(sender: Program, eye: Program):
    cases = [
        (eye, "*", 2), (eye, "O*", 2), (eye, "ORDERS*", 2), (eye, "Q", 9), (eye, "PNEW", 9),
        (sender, "PRICES", 3), (sender, "P*", 3), (sender, "PR*", 3), (sender, "*", 2),
    ]  # fmt: skip
    found = [program.error("topic_observe", observed)[0] for program, observed, _ in cases]
    assert found == [number for _, _, number in cases]
    for function in "topic_listen", "topic_notify":
        assert eye.error(function, "ORDERS")[0] == 3
    for function in "topic_listen", "topic_notify", "topic_status", "topic_auth":
        assert sender.error(function, "P*") == (9, "Topic P* is not existent")


def gateway_of(world: World, number: int) -> tuple[Program, list[str]]:
    """A session of that many nodes that may hear of SUBJECT, and of one that may not."""
    idents = [f"GATE{index:02}" for index in range(number)]
    world.rules("user1 SUBJECT Topic T RW 9", "user2 GATE* Topic T RW 9", "user2 DEAF Topic U R 9")
    gateway = world.node("user2", *idents, "DEAF")
    gateway.payloads()
    return gateway, idents


@pytest.mark.parametrize("number", [1, 20, 21])
def test_an_event_names_up_to_20_nodes_and_audience_names_more(world: World, number: int):
    gateway, idents = gateway_of(world, number)
    world.node("user1", "SUBJECT").ok("topic_listen", "T")
    payloads = gateway.payloads(2)
    expected = idents if number <= 20 else None
    assert [parse(payload).get("Nodes") for payload in payloads] == [expected] * 2
    answers = [gateway.ok("audience", payload) for payload in payloads]
    assert answers == [{"Err": "0", "Nodes": idents}] * 2


def test_names_that_would_not_fit_into_an_event_are_left_to_audience(world: World):
    idents = [f"{index:02}" + "😀" * 98 for index in range(20)]
    world.rules("user1 SUBJECT Topic T RW 10", "user2 * Topic T RW 10")
    gateway = world.node("user2", *idents)
    gateway.payloads()
    world.node("user1", "SUBJECT")
    [payload] = gateway.payloads()
    assert "Nodes" not in parse(payload)
    assert gateway.ok("audience", payload)["Nodes"] == idents


def test_audience_names_the_nodes_of_this_session_that_may_hear(world: World):
    gateway, both = gateway_of(world, 2)
    world.node("user2", "GATE_OF_ANOTHER_SESSION")
    cases = [
        ({"Evt": "topic_none_listen", "Topic": "T"}, both),
        ({"Evt": "topic_listen", "Topic": "U", "Ident": "X"}, ["DEAF"]),
        ({"Evt": "topic_listen", "Topic": "T", "Ident": "GATE01"}, ["GATE00"]),
        ({"Evt": "connect", "Ident": "SUBJECT"}, both),
        ({"Evt": "crash", "Ident": "NOBODY"}, []),
        ({"Evt": "topic_listen", "Topic": "NOWHERE", "Ident": "X"}, []),
    ]
    for event, nodes in cases:
        assert gateway.ok("audience", json.dumps({"Type": "Sys", **event}))["Nodes"] == nodes, event
