"""topic_send_as: a node without a session sends, under the same rules."""

import pytest

from tests.sql.conftest import Program, World

EVERYTHING = """
    SELECT (SELECT count(*) FROM psqlmessages_session), (SELECT count(*) FROM psqlmessages_client),
           (SELECT count(*) FROM psqlmessages_membership)
"""


@pytest.fixture
def listener(world: World) -> Program:
    """Listens to T; user1 and the members of team may send as WEB, team's members as SHOP*."""
    world.rules(
        "user1 WEB Topic T W 100",
        "user1 WEB Topic READ R 10",
        "team WEB Topic T W 300",
        "team SHOP* Topic T W 10",
        "user2 LISTENER Topic T R 10",
        "user2 LISTENER Topic NEW* R 10",
        "user1 WEB Topic NEW* W 10",
    )
    listener = world.node("user2", "LISTENER")
    listener.ok("topic_listen", "T")
    return listener


def test_it_needs_no_session_and_leaves_none(world: World, listener: Program) -> None:
    web = world.program("user1")
    before = world.owner.connection.execute(EVERYTHING).fetchone()
    web.ok("topic_send_as", "WEB", "T", "body")
    after = world.owner.connection.execute(EVERYTHING).fetchone()
    [header] = listener.headers()
    assert (header["From"], header["To"], header["Body"]) == ("WEB", "T", "body")
    assert before == after
    assert web.query("SELECT count(*) FROM pg_listening_channels()") == 0
    assert (
        web.query("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", web.pid)
        == 0
    )
    assert listener.ok("topic_status", "T")["Notifiers"] == []


def test_its_message_looks_like_one_of_topic_send(world: World, listener: Program) -> None:
    web = world.node("user1", "WEB")
    web.ok("topic_notify", "T")
    listener.payloads()
    web.ok("topic_send", "T", "body", "TOKEN", "json")
    web.ok("topic_send_as", "WEB", "T", "body", "TOKEN", "json")
    first, second = [
        {name: value for name, value in header.items() if name != "Id"}
        for header in listener.headers()
    ]
    assert first == second


def test_any_number_of_connections_send_as_one_node_at_once(
    world: World, listener: Program
) -> None:
    webs = [world.program("user1") for _ in range(5)]
    for web in webs:
        web.connection.execute("BEGIN")
        web.ok("topic_send_as", "WEB", "T", str(web.pid))
    for web in webs:
        web.connection.execute("COMMIT")
    assert [header["Body"] for header in listener.headers()] == [str(web.pid) for web in webs]


def test_it_works_on_a_connection_that_a_pooler_gave_back(world: World, listener: Program) -> None:
    web = world.node("user1", "WEB")
    web.connection.execute("DISCARD ALL")
    web.ok("topic_send_as", "WEB", "T", "body")
    assert "body" in [header.get("Body") for header in listener.headers()]


@pytest.mark.parametrize(
    ("role", "ident", "topic", "number"),
    [
        ("user2", "WEB", "T", 2),
        ("hostile", "WEB", "T", 2),
        ("user1", "LISTENER", "T", 2),
        ("user1", "SHOP1", "T", 2),
        ("user1", "WEB", "READ", 3),
        ("user2", "LISTENER", "T", 3),
        ("user3", "SHOP*", "T", 16),
        ("user3", "SHO", "T", 16),
        ("user1", "WEB", "NEW1", 9),
        ("user1", "WEB", "T*", 9),
    ],
)
def test_the_rules_of_the_role_that_logged_in_decide(
    world: World, listener: Program, role: str, ident: str, topic: str, number: int
) -> None:
    program = world.program(role)
    assert program.error("topic_send_as", ident, topic, "body")[0] == number
    assert listener.payloads() == []


@pytest.mark.parametrize("ident", ["WEB", "SHOP1", "SHOP"])
def test_a_member_of_a_group_role_may_send_as_its_idents(
    world: World, listener: Program, ident: str
) -> None:
    world.program("user3").ok("topic_send_as", ident, "T", "body")
    assert listener.headers()[0]["From"] == ident


def test_a_topic_made_by_its_listener_can_be_sent_to(world: World, listener: Program) -> None:
    listener.ok("topic_listen", "NEW1")
    world.program("user1").ok("topic_send_as", "WEB", "NEW1", "body")
    assert listener.headers()[-1]["To"] == "NEW1"


def test_nobody_listening_is_refused_and_not_remembered(world: World, listener: Program) -> None:
    listener.ok("topic_unlisten", "T")
    web = world.program("user1")
    assert web.error("topic_send_as", "WEB", "T", "lost") == (10, "cannot listeners for Topic T")
    listener.ok("topic_listen", "T")
    assert all(header["Type"] == "Sys" for header in listener.headers())


def test_a_long_body_is_kept_for_the_timeout_of_the_roles_rules(
    world: World, listener: Program
) -> None:
    for role in ("user1", "user3"):
        world.program(role).ok("topic_send_as", "WEB", "T", "x" * 20_000)
    payloads = listener.payloads()
    assert [listener.data(payload)[1] for payload in payloads] == ["x" * 20_000] * 2
    assert ['"Dkey":"100.' in payloads[0], '"Dkey":"300.' in payloads[1]] == [True, True]


def test_a_token_needs_the_node_connected(world: World, listener: Program) -> None:
    web = world.program("user1")
    web.ok("topic_send_as", "WEB", "T", "without a token")
    number_and_text = web.error("topic_send_as", "WEB", "T", "with", "TOKEN")
    assert number_and_text == (17, "Client WEB is not connected")


def test_a_token_needs_the_node_connected_by_the_same_role(world: World, listener: Program) -> None:
    world.node("user3", "WEB")
    assert world.program("user1").error("topic_send_as", "WEB", "T", "body", "TOKEN")[0] == 17


def test_a_token_needs_the_node_alive(world: World, listener: Program) -> None:
    node, web = world.node("user1", "WEB"), world.program("user1")
    web.ok("evaluate")
    world.kill(node)
    assert web.error("topic_send_as", "WEB", "T", "body", "TOKEN")[0] == 17


def test_the_answer_arrives_at_the_node_of_that_name(world: World, listener: Program) -> None:
    node = world.node("user1", "WEB")
    world.program("user1").ok("topic_send_as", "WEB", "T", "question", "TOKEN")
    question = listener.headers()[-1]
    listener.ok("return", "WEB", question["Token"], "answer")
    answer = node.headers()[-1]
    assert (answer["Type"], answer["Token"], answer["Body"]) == ("Return", "TOKEN", "answer")


def test_nothing_arrives_from_a_rolled_back_transaction(world: World, listener: Program) -> None:
    web = world.program("user1")
    web.connection.execute("BEGIN")
    web.ok("topic_send_as", "WEB", "T", "taken back")
    web.connection.execute("ROLLBACK")
    web.ok("topic_send_as", "WEB", "T", "sent")
    assert [header["Body"] for header in listener.headers()] == ["sent"]


def test_it_leaves_the_acting_node_of_a_session_as_it_is(world: World, listener: Program) -> None:
    world.rules("user1 OTHER Topic T W 10")
    node = world.node("user1", "OTHER")
    node.ok("topic_notify", "T")
    node.ok("topic_send_as", "WEB", "T", "first")
    node.ok("topic_send", "T", "second")
    senders = [header["From"] for header in listener.headers() if header["Type"] == "Topic"]
    assert senders == ["WEB", "OTHER"]
