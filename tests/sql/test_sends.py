"""Sends: what a payload holds, in which order messages arrive, and what never arrives."""

import base64

import pytest

from tests.sql.conftest import Pair, World, parse

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
def test_a_payload_is_a_line_of_json_and_the_body(pair: Pair, function: str) -> None:
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
def test_bodies_encodings_and_tokens_arrive_as_they_are(pair: Pair, function: str) -> None:
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


@every_send
def test_equal_messages_of_one_transaction_all_arrive_with_ids_of_their_own(
    pair: Pair, function: str
) -> None:
    sender, listener = pair
    with sender.connection.transaction():
        for _ in range(50):
            sender.ok(function, *FUNCTIONS[function]("same"))
    headers = listener.headers()
    assert len(headers) == len({header["Id"] for header in headers}) == 50


def test_a_message_has_one_id_for_all_and_ids_of_two_sessions_never_meet(
    world: World, pair: Pair
) -> None:
    sender, listener = pair
    world.rules("user3 THIRD Topic T RW 10")
    third = world.node("user3", "THIRD")
    third.ok("topic_listen", "T")
    third.ok("topic_notify", "T")
    sender.payloads(), listener.payloads()
    for function, arguments in FUNCTIONS.items():
        sender.ok(function, *arguments("body"))
    assert listener.payloads() == third.payloads()
    for _ in range(150):
        sender.ok("topic_send", "T", "body")
        third.ok("topic_send", "T", "body")
    assert len({header["Id"] for header in listener.headers()}) == 300


def test_messages_arrive_in_the_order_of_commits(world: World, pair: Pair) -> None:
    sender, listener = pair
    sender.execute("BEGIN")
    sender.ok("topic_send", "T", "sent first, committed second")
    world.program("user1").ok("topic_send_as", "SENDER", "T", "sent second, committed first")
    sender.ok("topic_send", "T", "sent third, committed second")
    before = listener.bodies()
    sender.execute("COMMIT")
    assert before == ["sent second, committed first"]
    assert listener.bodies() == ["sent first, committed second", "sent third, committed second"]


def test_nothing_of_a_rolled_back_transaction_arrives_neither_messages_nor_rows(
    world: World, pair: Pair
) -> None:
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


def test_a_savepoint_takes_back_its_own_messages_only(pair: Pair) -> None:
    sender, listener = pair
    with sender.connection.transaction():
        sender.ok("topic_send", "T", "before")
        with sender.connection.transaction(force_rollback=True):
            sender.ok("topic_send", "T", "taken back")
        sender.ok("topic_send", "T", "after")
    assert listener.bodies() == ["before", "after"]


def test_a_node_may_register_begin_and_send_in_one_transaction(world: World) -> None:
    world.rules("user1 NODE Topic T RW 10")
    node = world.program("user1")
    with node.connection.transaction():
        node.ok("init", "NODE")
        node.ok("topic_listen", "T")
        node.ok("topic_notify", "T")
        node.ok("topic_send", "T", "to myself")
    assert node.bodies() == ["to myself"]


def test_topic_send_many_sends_each_element_in_order_and_counts(pair: Pair) -> None:
    sender, listener = pair
    for bodies in [], None, ["one"], ["a", None, "", "a"], [str(number) for number in range(500)]:
        answer = sender.ok("topic_send_many", "T", bodies)
        assert answer == {"Err": "0", "Count": len(bodies or [])}
        assert listener.bodies() == [body or "" for body in bodies or []]
    answer = sender.query("SELECT messages.topic_send_many('T', ARRAY[['1', '2'], ['3', '4']])")
    assert answer == {"Err": "0", "Count": 4}
    assert listener.bodies() == ["1", "2", "3", "4"]


def test_topic_send_many_mixes_short_and_long_bodies_in_order(pair: Pair) -> None:
    sender, listener = pair
    bodies = ["short", "x" * 20_000, "", "ü" * 4_000, None, "short"]
    sender.ok("topic_send_many", "T", bodies, "TOKEN", "json")
    received = []
    for payload in listener.payloads():
        header = parse(payload)
        received.append(listener.data(payload)[1] if "Dkey" in header else header["Body"])
        assert (header["Enc"], header["Token"].split()[1:]) == ("json", ["1000", "TOKEN"])
    assert received == [body or "" for body in bodies]


def test_topic_send_many_of_nothing_is_refused_where_nobody_listens(pair: Pair) -> None:
    pair[1].ok("topic_unlisten", "T")
    assert pair[0].error("topic_send_many", "T", [])[0] == 10
