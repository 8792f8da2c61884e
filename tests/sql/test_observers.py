"""Observers, who see topics and are no listeners; and which nodes of a session an event is for."""

import json

import pytest

from tests.sql.conftest import Program, World, parse

RULES = [
    "user1 SENDER Topic PRICES W 10",
    "user1 SENDER Topic P* W 10",
    "user1 SENDER Topic ORDERS W 10",
    "user2 LISTENER Topic PRICES R 10",
    "user2 LISTENER Topic P* R 10",
    "user2 LISTENER Topic ORDERS R 10",
    "user3 EYE Topic P* O 10",
    "user3 EYE Topic ORDERS O 10",
]

# At the edges of what a pattern means, in the order of the index, and behind them.
BEGIN_SO = ["P", "P ", "PA", "P~", "P\u00e9", "P\U0010ffff", "P" + 99 * "\U0010ffff"]
BEGIN_ELSE = ["O", "O~", "O" + 99 * "\U0010ffff", "Q", "p", "\U0010ffff"]


@pytest.fixture
def market(world: World) -> World:
    world.rules(*RULES)
    return world


@pytest.fixture
def sender(market: World) -> Program:
    """Sends to PRICES."""
    sender = market.node("user1", "SENDER")
    sender.ok("topic_notify", "PRICES")
    return sender


@pytest.fixture
def listener(market: World) -> Program:
    """Listens to PRICES."""
    listener = market.node("user2", "LISTENER")
    listener.ok("topic_listen", "PRICES")
    return listener


@pytest.fixture
def eye(market: World) -> Program:
    return market.node("user3", "EYE")


def bodies(program: Program) -> list[str]:
    """The bodies of the messages that arrived; events left out."""
    return [header["Body"] for header in program.headers() if header["Type"] == "Topic"]


@pytest.mark.parametrize("observed", ["PRICES", "PRICES*", "PRI*", "P*"])
def test_an_observer_receives_what_listeners_receive(
    sender: Program, listener: Program, eye: Program, observed: str
) -> None:
    eye.ok("topic_observe", observed)
    sender.ok("topic_send", "PRICES", "body", "TOKEN", "json")
    [seen] = [header for header in eye.headers() if header["Type"] == "Topic"]
    assert seen in listener.headers()


def test_an_observer_receives_messages_of_each_kind_of_send(
    sender: Program, listener: Program, eye: Program
) -> None:
    eye.ok("topic_observe", "P*")
    sender.ok("topic_send_many", "PRICES", ["1", "2"])
    sender.ok("topic_send_as", "SENDER", "PRICES", "3")
    assert bodies(eye) == ["1", "2", "3"]


@pytest.mark.parametrize("observed", ["ORDERS", "PX*", "PRICES2"])
def test_an_observer_of_something_else_receives_nothing(
    market: World, sender: Program, listener: Program, eye: Program, observed: str
) -> None:
    market.rules("user1 SENDER Topic PRICES2 W 10")
    eye.ok("topic_observe", observed)
    sender.ok("topic_send", "PRICES", "body")
    assert bodies(eye) == []


def test_a_pattern_sees_topics_that_a_rule_makes_later(
    market: World, sender: Program, listener: Program, eye: Program
) -> None:
    eye.ok("topic_observe", "P*")
    market.rules("user2 LISTENER Topic PLATES R 10")
    listener.ok("topic_listen", "PLATES")
    sender.ok("topic_send_as", "SENDER", "PLATES", "body")
    assert bodies(eye) == ["body"]


def test_a_pattern_sees_topics_that_a_listener_makes_later(
    sender: Program, listener: Program, eye: Program
) -> None:
    eye.ok("topic_observe", "P*")
    listener.ok("topic_listen", "PENS")
    sender.ok("topic_notify", "PENS")
    sender.ok("topic_send", "PENS", "body")
    assert bodies(eye) == ["body"]


def test_a_pattern_sees_all_topics_that_begin_so_and_no_other(market: World, eye: Program) -> None:
    names = [*BEGIN_SO, *BEGIN_ELSE]
    for name in names:
        market.rule("user1", "SENDER", "Topic", name, "W", 10)
    market.rule("user2", "LISTENER", "Topic", "*", "R", 10)
    sender = market.node("user1", "SENDER")
    listener = market.node("user2", "LISTENER")
    for name in names:
        listener.ok("topic_listen", name)
        sender.ok("topic_notify", name)
    eye.ok("topic_observe", "P*")
    for name in names:
        sender.ok("topic_send", name, name)
    assert bodies(eye) == BEGIN_SO


def test_a_message_arrives_once_at_who_observes_it_in_several_ways(
    market: World, sender: Program, listener: Program, eye: Program
) -> None:
    market.rules("user3 EYE2 Topic P* O 10", "user3 EYE2 Topic PRICES R 10")
    for observed in ("P*", "PRICES", "PRI*"):
        eye.ok("topic_observe", observed)
    eye.ok("init", "EYE2")
    eye.ok("topic_observe", "P*")
    eye.ok("topic_listen", "PRICES")
    sender.ok("topic_send", "PRICES", "body")
    assert bodies(eye) == ["body"]


def test_an_observer_counts_as_no_listener_for_a_send(sender: Program, eye: Program) -> None:
    eye.ok("topic_observe", "PRICES")
    numbers = [
        sender.error("topic_send", "PRICES", "body")[0],
        sender.error("topic_send_many", "PRICES", ["body"])[0],
        sender.error("topic_send_as", "SENDER", "PRICES", "body")[0],
    ]
    assert numbers == [10, 10, 10]
    assert bodies(eye) == []


@pytest.mark.parametrize("function", ["topic_status", "topic_auth"])
def test_an_observer_is_named_in_no_list(eye: Program, function: str) -> None:
    eye.ok("topic_observe", "PRICES")
    assert "EYE" not in str(eye.ok(function, "PRICES"))


def test_the_last_listener_is_the_last_although_an_observer_stays(
    sender: Program, listener: Program, eye: Program
) -> None:
    eye.ok("topic_observe", "PRICES")
    eye.payloads()
    listener.ok("topic_unlisten", "PRICES")
    assert eye.events() == ["topic_unlisten LISTENER PRICES", "topic_none_listen PRICES"]


@pytest.mark.parametrize("end", ["topic_unobserve", "deinit"])
def test_an_observer_that_ended_receives_nothing(
    market: World, sender: Program, listener: Program, eye: Program, end: str
) -> None:
    market.rules("user3 STAYS Topic PRICES O 10")
    eye.ok("topic_observe", "P*")
    eye.ok("init", "STAYS")
    eye.ok("use", "EYE")
    eye.ok(end, {"topic_unobserve": "P*", "deinit": "EYE"}[end])
    sender.ok("topic_send", "PRICES", "body")
    assert bodies(eye) == []


def test_an_observer_is_told_alone_that_it_may_observe_no_more(
    market: World, listener: Program, eye: Program
) -> None:
    market.rules("user3 EYE Rpc NOBODY W 10")
    eye.ok("topic_observe", "P*")
    eye.payloads()
    listener.payloads()
    market.owner.query(
        "WITH d AS (DELETE FROM messages.auth WHERE mode = 'O' RETURNING 1) SELECT count(*) FROM d"
    )
    assert eye.events() == ["topic_unobserve EYE P*"]
    assert listener.events() == []


def test_ending_one_of_two_observations_leaves_the_other(
    sender: Program, listener: Program, eye: Program
) -> None:
    for observed in ("P*", "PR*"):
        eye.ok("topic_observe", observed)
    eye.ok("topic_unobserve", "P*")
    assert eye.ok("topic_unobserve", "PRICES") == {"Err": "0", "Already": 1}
    sender.ok("topic_send", "PRICES", "body")
    assert bodies(eye) == ["body"]


def test_an_observer_that_ends_leaves_the_others(
    market: World, sender: Program, listener: Program, eye: Program
) -> None:
    market.rules("user1 SECOND Topic P* O 10")
    second = market.node("user1", "SECOND")
    for program in (eye, second):
        program.ok("topic_observe", "P*")
    second.ok("topic_unobserve", "P*")
    sender.ok("topic_send", "PRICES", "body")
    assert bodies(eye) == ["body"]


def test_an_observer_that_listens_too_goes_on_when_it_unlistens(
    market: World, sender: Program, listener: Program, eye: Program
) -> None:
    market.rules("team EYE Topic PRICES R 10")
    eye.ok("topic_observe", "PRICES")
    eye.ok("topic_listen", "PRICES")
    eye.ok("topic_unlisten", "PRICES")
    sender.ok("topic_send", "PRICES", "body")
    assert bodies(eye) == ["body"]


def test_a_rolled_back_observe_sees_nothing(
    sender: Program, listener: Program, eye: Program
) -> None:
    eye.connection.execute("BEGIN")
    eye.ok("topic_observe", "PRICES")
    eye.connection.execute("ROLLBACK")
    sender.ok("topic_send", "PRICES", "body")
    assert bodies(eye) == []


@pytest.mark.parametrize(
    ("ident", "observed", "number"),
    [
        ("EYE", "*", 2), ("EYE", "O*", 2), ("EYE", "ORDERS*", 2), ("EYE", "Q", 9),
        ("SENDER", "PRICES", 3), ("SENDER", "P*", 3), ("SENDER", "PR*", 3), ("SENDER", "*", 2),
        ("EYE", "PNEW", 9),
    ],
)  # fmt: skip
def test_only_what_a_rule_with_mode_o_covers_whole_can_be_observed(
    market: World, ident: str, observed: str, number: int
) -> None:
    node = market.node("user3" if ident == "EYE" else "user1", ident)
    assert node.error("topic_observe", observed)[0] == number


@pytest.mark.parametrize("function", ["topic_listen", "topic_notify"])
def test_mode_o_allows_neither_to_listen_nor_to_send(eye: Program, function: str) -> None:
    assert eye.error(function, "ORDERS")[0] == 3


@pytest.mark.parametrize("function", ["topic_listen", "topic_notify", "topic_status", "topic_auth"])
def test_a_pattern_is_no_name_of_a_topic(sender: Program, function: str) -> None:
    assert sender.error(function, "P*") == (9, "Topic P* is not existent")


def gateway_of(world: World, number: int) -> tuple[Program, list[str]]:
    """A session of that many nodes that may hear of SUBJECT, and of one that may not."""
    idents = [f"GATE{index:02}" for index in range(number)]
    world.rules(
        "user1 SUBJECT Topic T RW 10", "user2 GATE* Topic T RW 10", "user2 DEAF Topic OTHER R 10"
    )
    gateway = world.gateway("user2", *idents, "DEAF")
    gateway.payloads()
    return gateway, idents


@pytest.mark.parametrize("number", [1, 2, 20])
def test_up_to_20_nodes_of_a_session_are_named_in_an_event(world: World, number: int) -> None:
    gateway, idents = gateway_of(world, number)
    world.node("user1", "SUBJECT").ok("topic_listen", "T")
    assert [header["Nodes"] for header in gateway.headers()] == [idents, idents]


@pytest.mark.parametrize("number", [21, 50])
def test_more_than_20_nodes_are_named_by_audience_only(world: World, number: int) -> None:
    gateway, idents = gateway_of(world, number)
    world.node("user1", "SUBJECT").ok("topic_listen", "T")
    payloads = gateway.payloads(2)
    assert all("Nodes" not in parse(payload) for payload in payloads)
    answers = [gateway.ok("audience", payload) for payload in payloads]
    assert answers == [{"Err": "0", "Nodes": idents}] * 2


def test_a_session_of_one_node_is_told_no_nodes(spec_world: World) -> None:
    one = spec_world.node("user1", "NODE1")
    spec_world.node("user2", "NODE2")
    assert "Nodes" not in one.headers()[0]


def test_the_node_an_event_is_about_is_not_among_the_nodes_told(world: World) -> None:
    gateway, _ = gateway_of(world, 3)
    gateway.ok("use", "GATE01")
    gateway.ok("topic_notify", "T")
    [payload] = gateway.payloads()
    assert parse(payload)["Nodes"] == ["GATE00", "GATE02"]
    assert gateway.ok("audience", payload)["Nodes"] == ["GATE00", "GATE02"]


def test_a_none_event_is_for_the_node_that_caused_it_too(world: World) -> None:
    gateway, idents = gateway_of(world, 3)
    gateway.ok("use", "GATE01")
    gateway.ok("topic_notify", "T")
    gateway.ok("topic_unnotify", "T")
    headers = {header["Evt"]: header["Nodes"] for header in gateway.headers()}
    assert headers["topic_none_notify"] == idents


def test_a_rule_by_pattern_lets_all_nodes_hear_that_begin_so_and_no_other(world: World) -> None:
    world.rules("user1 SUBJECT Topic T RW 10", "user2 P* Topic T R 10")
    for name in BEGIN_ELSE:
        world.rule("user2", name, "Topic", "OTHER", "R", 10)
    gateway = world.gateway("user2", *BEGIN_SO, *BEGIN_ELSE)
    gateway.payloads()
    world.node("user1", "SUBJECT").ok("topic_notify", "T")
    connected, notified = gateway.headers()
    assert connected["Nodes"] == notified["Nodes"] == sorted(BEGIN_SO)


def test_names_that_would_not_fit_into_an_event_are_left_to_audience(world: World) -> None:
    idents = [f"{index:02}" + "😀" * 98 for index in range(20)]
    world.rules("user1 SUBJECT Topic T RW 10", "user2 * Topic T RW 10")
    gateway = world.gateway("user2", *idents)
    gateway.payloads()
    world.node("user1", "SUBJECT")
    [payload] = gateway.payloads()
    assert "Nodes" not in parse(payload)
    assert gateway.ok("audience", payload)["Nodes"] == idents


@pytest.mark.parametrize(
    ("event", "nodes"),
    [
        ({"Evt": "topic_none_listen", "Topic": "T"}, ["GATE00", "GATE01"]),
        ({"Evt": "topic_listen", "Topic": "OTHER", "Ident": "X"}, ["DEAF"]),
        ({"Evt": "topic_listen", "Topic": "T", "Ident": "GATE01"}, ["GATE00"]),
        ({"Evt": "connect", "Ident": "SUBJECT"}, ["GATE00", "GATE01"]),
        ({"Evt": "crash", "Ident": "NOBODY"}, []),
        ({"Evt": "topic_listen", "Topic": "NOWHERE", "Ident": "X"}, []),
    ],
    ids=str,
)
def test_audience_names_the_nodes_of_this_session_that_may_hear(
    world: World, event: dict[str, str], nodes: list[str]
) -> None:
    gateway, _ = gateway_of(world, 2)
    world.node("user2", "GATE_OF_ANOTHER_SESSION")
    assert gateway.ok("audience", json.dumps({"Type": "Sys", **event}))["Nodes"] == nodes
