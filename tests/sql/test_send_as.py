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


def test_it_needs_no_session_leaves_none_and_takes_that_of_no_other_node(
    world: World, listener: Program
) -> None:
    world.rules("user1 OTHER Topic T W 10")
    web = world.program("user1")
    before = world.execute(EVERYTHING).fetchone()
    web.ok("topic_send_as", "WEB", "T", "body")
    [header] = listener.headers()
    assert (header["From"], header["To"], header["Body"]) == ("WEB", "T", "body")
    assert world.execute(EVERYTHING).fetchone() == before
    assert web.query("SELECT count(*) FROM pg_listening_channels()") == 0
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
    assert web.query(locks, web.pid) == 0
    assert listener.ok("topic_status", "T")["Notifiers"] == []
    web.ok("init", "OTHER")
    web.ok("topic_notify", "T")
    web.ok("topic_send_as", "WEB", "T", "first")
    web.ok("topic_send", "T", "second")
    web.execute("DISCARD ALL")
    web.ok("topic_send_as", "WEB", "T", "of a connection that a pooler gave back")
    senders = [header["From"] for header in listener.headers() if header["Type"] == "Topic"]
    assert senders == ["WEB", "OTHER", "WEB"]


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
    listener.ok("return", "WEB", second["Token"], "answer")
    answer = web.headers()[-1]
    assert (answer["Type"], answer["Token"], answer["Body"]) == ("Return", "TOKEN", "answer")


def test_any_number_of_connections_send_as_one_node_at_once(
    world: World, listener: Program
) -> None:
    webs = [world.program("user1") for _ in range(5)]
    for web in webs:
        web.execute("BEGIN")
        web.ok("topic_send_as", "WEB", "T", str(web.pid))
    for web in webs[1:]:
        web.execute("COMMIT")
    webs[0].execute("ROLLBACK")
    assert listener.bodies() == [str(web.pid) for web in webs[1:]]


def test_the_rules_of_the_role_that_logged_in_decide(world: World, listener: Program) -> None:
    cases = {
        ("user2", "WEB", "T"): 2,
        ("hostile", "WEB", "T"): 2,
        ("user1", "LISTENER", "T"): 2,
        ("user1", "SHOP1", "T"): 2,
        ("user1", "WEB", "READ"): 3,
        ("user2", "LISTENER", "T"): 3,
        ("user3", "SHOP*", "T"): 16,
        ("user3", "SHO", "T"): 16,
        ("user1", "WEB", "NEW1"): 9,
        ("user1", "WEB", "T*"): 9,
    }
    found = {
        case: world.program(case[0]).error("topic_send_as", *case[1:], "body")[0] for case in cases
    }
    assert found == cases
    assert listener.payloads() == []
    idents = ["WEB", "SHOP1", "SHOP"]
    for ident in idents:
        world.program("user3").ok("topic_send_as", ident, "T", "body")  # a member of team
    assert [header["From"] for header in listener.headers()] == idents


def test_it_is_for_topics_that_a_listener_made_while_somebody_listens(
    world: World, listener: Program
) -> None:
    web = world.program("user1")
    listener.ok("topic_listen", "NEW1")
    web.ok("topic_send_as", "WEB", "NEW1", "body")
    assert listener.headers()[-1]["To"] == "NEW1"
    listener.ok("topic_unlisten", "T")
    assert web.error("topic_send_as", "WEB", "T", "lost") == (10, "cannot listeners for Topic T")
    listener.ok("topic_listen", "T")
    assert listener.bodies() == []


def test_a_long_body_is_kept_for_the_timeout_of_the_roles_rules(
    world: World, listener: Program
) -> None:
    for role in ("user1", "user3"):
        world.program(role).ok("topic_send_as", "WEB", "T", "x" * 20_000)
    payloads = listener.payloads()
    assert [listener.data(payload)[1] for payload in payloads] == ["x" * 20_000] * 2
    assert ['"Dkey":"100.' in payloads[0], '"Dkey":"300.' in payloads[1]] == [True, True]


def test_a_token_needs_the_node_connected_by_the_same_role_and_alive(
    world: World, listener: Program
) -> None:
    web = world.program("user1")
    asked = "topic_send_as", "WEB", "T", "body", "TOKEN"
    assert web.error(*asked) == (17, "Client WEB is not connected")
    other = world.node("user3", "WEB")
    assert web.error(*asked)[0] == 17
    other.ok("deinit", "WEB")
    node = world.node("user1", "WEB")
    web.ok("evaluate")
    world.kill(node)
    assert web.error(*asked)[0] == 17
