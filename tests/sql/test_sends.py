"""Sends: what a payload holds, to the byte; in which order they arrive, and what never arrives."""

import base64
from collections.abc import Callable

import pytest

from tests.sql.conftest import Pair, Program, World, parse

LIMIT = 7999
LONG_TOKEN = "ü" * 500

FUNCTIONS = {
    "topic_send": lambda body, *more: ("T", body, *more),
    "topic_send_many": lambda body, *more: ("T", [body], *more),
    "topic_send_as": lambda body, *more: ("SENDER", "T", body, *more),
}
every_send = pytest.mark.parametrize("function", FUNCTIONS)
BODIES = [
    "", " ", "x", "\n", "\r\n\t", "ü", "🦄" * 10, "e\u0301", "مرحبا", "\u202e", "\ufeff", "'", "''",
    '"', "\\", "\\n", "$$", "%", "%s", "{}", "\x01\x1f\x7f", "\u2028", "'; DROP x; --", "NULL",
]  # fmt: skip


@every_send
def test_a_payload_is_a_line_of_json_and_the_body(pair: Pair, function: str):
    sender, listener = pair
    sender.ok(function, *FUNCTIONS[function]('{"a":\n1}\n'))
    [payload] = listener.payloads()
    line, _, body = payload.partition("\n")
    header = parse(line)
    assert body == '{"a":\n1}\n'
    assert isinstance(header.pop("Id"), int)
    assert header == {"Type": "Topic", "Size": 9, "To": "T", "From": "SENDER"}
    assert not {": ", ", "} & {line[n : n + 2] for n in range(len(line))}


@every_send
def test_bodies_encodings_and_tokens_arrive_as_they_are(pair: Pair, function: str):
    sender, listener = pair
    for body in (*BODIES, None):
        sender.ok(function, *FUNCTIONS[function](body))
    headers = listener.headers()
    assert [header["Body"] for header in headers] == [*BODIES, ""]
    assert [header["Size"] for header in headers] == [len(body.encode()) for body in (*BODIES, "")]
    body = base64.b64encode(bytes(range(256))).decode()
    for enc in "b64", "json", None:
        sender.ok(function, *FUNCTIONS[function](body, None, enc))
        [header] = listener.headers()
        assert (header.get("Enc"), header["Body"], "Token" in header) == (enc, body, False)
    for token in "TOKEN", "a b  c", 'quote " and \\', "ü" * 500, "\n", " ":
        sender.ok(function, *FUNCTIONS[function]("body", token))
        crypt, timeout, received = listener.headers()[0]["Token"].split(" ", 2)
        assert (timeout, received) == ("1000", token)
        assert len(crypt.rpartition(".")[2]) * 4 >= 128
    sender.ok(function, *FUNCTIONS[function]("body", ""))
    assert "Token" not in listener.headers()[0], "an empty token asks for no answer"


def test_a_message_has_one_id_that_no_other_message_has(world: World, pair: Pair):
    sender, listener = pair
    world.rules("user3 THIRD Topic T RW 10")
    third = world.node("user3", "THIRD", listen="T", notify="T")
    world.forget()
    with sender.connection.transaction():
        for function, arguments in FUNCTIONS.items():
            for _ in range(50):
                sender.ok(function, *arguments("same"))
    payloads = listener.payloads()
    assert payloads == third.payloads()
    for _ in range(150):
        sender.ok("topic_send", "T", "body")
        third.ok("topic_send", "T", "body")
    assert len({parse(each)["Id"] for each in [*payloads, *listener.payloads()]}) == 450


def test_messages_arrive_in_the_order_of_commits(world: World, pair: Pair):
    sender, listener = pair
    sender.execute("BEGIN")
    sender.ok("topic_send", "T", "sent first, committed second")
    world.program("user1").ok("topic_send_as", "SENDER", "T", "sent second, committed first")
    sender.ok("topic_send", "T", "sent third, committed second")
    before = listener.bodies()
    sender.execute("COMMIT")
    assert before == ["sent second, committed first"]
    assert listener.bodies() == ["sent first, committed second", "sent third, committed second"]


def test_nothing_of_a_rolled_back_transaction_arrives(world: World, pair: Pair):
    sender, listener = pair
    sender.execute("CREATE TEMP TABLE booking (id int)")
    with sender.connection.transaction(force_rollback=True):
        sender.execute("INSERT INTO booking VALUES (1)")
        for size in 1, 20_000:
            for function, arguments in FUNCTIONS.items():
                sender.ok(function, *arguments("x" * size))
            sender.ok("rpc", "LISTENER", "TOKEN", "x" * size)
    assert sender.query("SELECT count(*) FROM booking") == 0
    assert listener.payloads() == []
    assert world.owner.query("SELECT count(*) FROM psqlmessages_body") == 0
    # A node may register, begin and send in one transaction.
    world.rules("user3 NODE Topic T RW 10")
    node = world.program("user3")
    with node.connection.transaction():
        node.ok("init", "NODE")
        for function in "topic_listen", "topic_notify":
            node.ok(function, "T")
        node.ok("topic_send", "T", "to myself")
    assert node.bodies() == listener.bodies() == ["to myself"]
    # A savepoint takes back its own messages only.
    with sender.connection.transaction():
        sender.ok("topic_send", "T", "before")
        with sender.connection.transaction(force_rollback=True):
            sender.ok("topic_send", "T", "taken back")
        sender.ok("topic_send", "T", "after")
    assert listener.bodies() == ["before", "after"]


def test_topic_send_many_sends_each_element_in_order_and_counts(pair: Pair):
    sender, listener = pair
    for bodies in (
        [], None, ["one"], ["a", None, "", "a"], [str(number) for number in range(500)],
        ["short", "x" * 20_000, "", "ü" * 4_000, None, "short"],
    ):  # fmt: skip
        answer = sender.ok("topic_send_many", "T", bodies, "TOKEN", "json")
        assert answer == {"Err": "0", "Count": len(bodies or [])}
        received = []
        for payload in listener.payloads():
            header = parse(payload)
            received.append(listener.data(payload)[1] if "Dkey" in header else header["Body"])
            assert (header["Enc"], header["Token"].split()[1:]) == ("json", ["1000", "TOKEN"])
        assert received == [body or "" for body in bodies or []]
    answer = sender.query("SELECT messages.topic_send_many('T', ARRAY[['1', '2'], ['3', '4']])")
    assert answer == {"Err": "0", "Count": 4}
    assert listener.bodies() == ["1", "2", "3", "4"]
    listener.ok("topic_unlisten", "T")
    assert sender.error("topic_send_many", "T", [])[0] == 10


def send_by(pair: Pair, function: str, token: str | None, enc: str | None) -> Callable[[str], str]:
    """A function that sends a body from SENDER to LISTENER, and answers the payload received."""
    sender, listener = pair
    before = {"topic_send_as": ["SENDER", "T"], "rpc": ["LISTENER", token]}.get(function, ["T"])
    after = [token, enc] if function.startswith("topic") else [enc]
    if function == "return":
        listener.ok("rpc", "SENDER", token, "question")
        before = ["LISTENER", sender.headers(1)[0]["Token"]]

    def transmit(body: str) -> str:
        if function == "topic_send_many":
            sender.ok(function, *before, [body, "another"], *after)
            return listener.payloads(2)[0]
        sender.ok(function, *before, body, *after)
        return listener.payloads(1)[0]

    return transmit


def whole_length(listener: Program, payload: str) -> int:
    """The bytes of a payload, or those it would have had with its body in it."""
    if "Dkey" not in parse(payload):
        return len(payload.encode())
    return len(listener.query("SELECT messages.get_data(%s)", payload).encode()) - len('"Err":"0",')


@pytest.mark.parametrize("function", [*FUNCTIONS, "rpc", "return"])
def test_up_to_7999_bytes_are_sent_directly_and_one_more_is_stored(pair: Pair, function: str):
    for token, enc in (None, None), (None, "json"), ("TOKEN", "b64"), (LONG_TOKEN, None):
        if token is None and not function.startswith("topic"):
            continue
        transmit = send_by(pair, function, token, enc)
        room = LIMIT - len(transmit("x" * 1000).encode()) + 1000
        # Twice, because the header grows by a byte when its Id gets one more digit.
        sizes = [room + difference for difference in range(-4, 5)] * 2
        payloads = [transmit("ü" * (size // 2) + "x" * (size % 2)) for size in sizes]
        lengths = [whole_length(pair[1], payload) for payload in payloads]
        is_kept = ["Dkey" in parse(payload) for payload in payloads]
        assert is_kept == [length > LIMIT for length in lengths]
        assert {LIMIT, LIMIT + 1} <= set(lengths)


@pytest.fixture
def listener(world: World) -> Program:
    world.rules(
        "user1 WEB Topic T W 100", "user1 WEB Topic READ R 10", "team WEB Topic T W 300",
        "team SHOP* Topic T W 10", "user2 LISTENER Topic T R 10", "user2 LISTENER Topic NEW* R 10",
        "user1 WEB Topic NEW* W 10",
    )  # fmt: skip
    return world.node("user2", "LISTENER", listen="T")


def test_topic_send_as_needs_no_session_and_leaves_none(world: World, listener: Program):
    world.rules("user1 OTHER Topic T W 10")
    web, tables = world.program("user1"), ("session", "client", "membership")
    count = " + ".join(f"(SELECT count(*) FROM psqlmessages_{table})" for table in tables)
    before = world.owner.query(f"SELECT {count}")
    web.ok("topic_send_as", "WEB", "T", "body")
    [header] = listener.headers()
    assert (header["From"], header["To"], header["Body"]) == ("WEB", "T", "body")
    assert world.owner.query(f"SELECT {count}") == before
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


def test_topic_send_as_uses_the_rules_of_the_login(world: World, listener: Program):
    cases = [
        ("user2", "WEB", "T", 2), ("hostile", "WEB", "T", 2), ("user1", "LISTENER", "T", 2),
        ("user1", "SHOP1", "T", 2), ("user1", "WEB", "READ", 3), ("user2", "LISTENER", "T", 3),
        ("user3", "SHOP*", "T", 16), ("user3", "SHO", "T", 16), ("user1", "WEB", "NEW1", 9),
        ("user1", "WEB", "T*", 9),
    ]  # fmt: skip
    for role, ident, topic, number in cases:
        found = world.program(role).error("topic_send_as", ident, topic, "body")[0]
        assert found == number, (role, ident, topic)
    assert listener.payloads() == []
    member = world.program("user3")
    for ident in "WEB", "SHOP1", "SHOP":
        member.ok("topic_send_as", ident, "T", "body")
    assert [header["From"] for header in listener.headers()] == ["WEB", "SHOP1", "SHOP"]
    listener.ok("topic_listen", "NEW1")
    web = world.program("user1")
    web.ok("topic_send_as", "WEB", "NEW1", "body")
    assert listener.headers()[-1]["To"] == "NEW1"
    for program in web, member:
        program.ok("topic_send_as", "WEB", "T", "x" * 20_000)
    payloads = listener.payloads()
    assert [listener.data(payload)[1] for payload in payloads] == ["x" * 20_000] * 2
    assert [parse(payload)["Dkey"].split(".")[0] for payload in payloads] == ["100", "300"]


def test_a_token_of_topic_send_as_needs_the_node_connected(world: World, listener: Program):
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
