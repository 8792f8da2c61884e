"""RPC and answers: what the reply token allows, to whom, and until when; and its secret."""

import hmac
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.sql.conftest import Program, World, parse

DOCS = Path(__file__).parents[2] / "docs"
NEW_SECRET = re.compile(r"## A new secret.*?-- as owner\n(.*?)```", re.DOTALL)
LONG = "x" * 20_000
TOKEN = "TOKEN"
RULES = [
    "user1 ASKER Rpc CALLEE W 500", "user1 ASKER Topic T W 700", "user1 BESIDE Topic T RW 700",
    "user2 CALLEE Topic T R 10", "user2 SECOND Topic T R 10", "user3 OTHER Topic T RW 10",
    "user3 EYE Topic T O 10",
]  # fmt: skip


class RpcNodes:
    """ASKER asks; CALLEE, SECOND and OTHER may answer; BESIDE is another node of ASKER's role."""

    def __init__(self, world: World) -> None:
        world.rules(*RULES)
        self.world = world
        self.asker = world.node("user1", "ASKER", notify="T")
        self.callee = world.node("user2", "CALLEE", listen="T")
        self.second = world.node("user2", "SECOND", listen="T")
        self.other = world.node("user3", "OTHER")

    def question(self, token: str = TOKEN) -> str:
        """ASKER asks CALLEE; the token that CALLEE received."""
        self.asker.ok("rpc", "CALLEE", token, "question")
        return self.callee.headers()[-1]["Token"]

    def call(self, token: str = TOKEN) -> str:
        """ASKER asks whoever listens to T; the token that listeners received."""
        self.asker.ok("topic_send", "T", "question", token)
        return self.callee.headers()[-1]["Token"]

    def tokens(self) -> list[str]:
        return [self.question(), self.call()]

    def answers(self) -> list[tuple[str, str, str]]:
        """From, token and body of the answers that arrived at ASKER."""
        answers = [header for header in self.asker.headers() if header["Type"] == "Return"]
        return [(header["From"], header["Token"], header["Body"]) for header in answers]


@pytest.fixture(params=[False, True], ids=["single", "many"])
def nodes(world: World, request) -> RpcNodes:
    """The nodes; with "many" they call rpc_many and return_many for one element."""
    nodes = RpcNodes(world)
    if request.param:
        for program in world.programs:
            vars(program)["call"] = partial(call_many, program)
    return nodes


def call_many(program: Program, function: str, *arguments: Any) -> dict[str, Any]:
    """Call a function, or the one for many with arrays of one element."""
    if function not in {"rpc", "return"}:
        return Program.call(program, function, *arguments)
    answer = Program.call(program, f"{function}_many", *([argument] for argument in arguments))
    return answer["Answers"][0] or {"Err": "0"} if "Answers" in answer else answer


def refusal(ident: str, dest: str, token: str) -> tuple[int, str]:
    return 20, f"{ident} cannot return to {dest} with token {token}"


def test_a_question_and_its_answer_have_their_fields(nodes: RpcNodes):
    nodes.callee.ok("topic_unlisten", "T")
    with nodes.asker.connection.transaction():
        for body in "Parametro", "Parametro", None:
            nodes.asker.ok("rpc", "CALLEE", "TOKEN\nRISPOSTA", body)
    # It keeps the tokens, as it is registered already.
    nodes.asker.ok("init", "ASKER")
    question, second, empty = nodes.callee.headers()[-3:]
    token = question.pop("Token")
    assert len({header.pop("Id") for header in (question, second, empty)}) == 3
    fields = {"Type": "Rpc", "Size": 9, "To": "CALLEE", "From": "ASKER", "Body": "Parametro"}
    assert (question, empty["Size"], empty["Body"]) == (fields, 0, "")
    shown = parse((DOCS / "reference/protocol.md").read_text().split("```")[1].strip())
    assert shown == fields | {"To": "RECEIVER", "From": "SENDER", "Token": "4f… 5 TICKET", "Id": 7}
    assert re.fullmatch(r"[0-9a-f]{32} 500 TOKEN\nRISPOSTA", token)
    nodes.callee.ok("return", "ASKER", token, "Risposta ü", "json")
    answer = nodes.asker.headers()[-1]
    assert isinstance(answer.pop("Id"), int)
    assert answer == {
        "Type": "Return", "Size": 11, "To": "ASKER", "From": "CALLEE", "Enc": "json",
        "Token": "TOKEN\nRISPOSTA", "Body": "Risposta ü",
    }  # fmt: skip


def test_any_body_and_any_token_come_back_as_they_are_in_order(nodes: RpcNodes):
    token = nodes.question()
    bodies = [None, "", "\n", "ü", '{"Type":"Sys"}', "second", "second"]
    for body in bodies:
        nodes.callee.ok("return", "ASKER", token, body)
    assert nodes.answers() == [("CALLEE", "TOKEN", body or "") for body in bodies]
    for own in (
        "T", "5 T", "T O K E N", "\n", "ü" * 500, "'", '"\\', "0" * 32 + " 5 T", "1." + "0" * 32
    ):  # fmt: skip
        for received in nodes.question(own), nodes.call(own):
            nodes.callee.ok("return", "ASKER", received, "answer")
        assert nodes.answers() == [("CALLEE", own, "answer")] * 2


def test_listeners_may_answer_calls_to_their_topic(nodes: RpcNodes):
    eye = nodes.world.node("user3", "EYE", observe="T")
    token = nodes.call()
    assert eye.headers()[-1]["Token"] == token
    nodes.other.ok("topic_notify", "T")
    for ident, program in ("EYE", eye), ("OTHER", nodes.other):
        assert program.error("return", "ASKER", token, "x") == refusal(ident, "ASKER", token)
    nodes.other.ok("topic_listen", "T")  # since the question
    for program in nodes.second, nodes.callee, nodes.other:
        program.ok("return", "ASKER", token, "answer")
    assert [sender for sender, _, _ in nodes.answers()] == ["SECOND", "CALLEE", "OTHER"]
    nodes.callee.ok("topic_unlisten", "T")
    assert nodes.callee.error("return", "ASKER", token, "late") == refusal("CALLEE", "ASKER", token)
    assert nodes.answers() == []


def test_a_node_that_was_not_asked_may_not_answer(nodes: RpcNodes):
    token = nodes.question()
    nodes.callee.ok("return", "ASKER", token, "answer")
    nodes.world.rules("user2 GATE Topic U R 10")
    nodes.callee.ok("init", "GATE")  # another node of the session asked
    for ident, program in (
        ("SECOND", nodes.second), ("OTHER", nodes.other), ("ASKER", nodes.asker),
        ("GATE", nodes.callee),
    ):  # fmt: skip
        assert program.error("return", "ASKER", token, "answer") == refusal(ident, "ASKER", token)
    assert len(nodes.answers()) == 1


def test_a_token_is_good_for_its_asker_and_its_topic_only(nodes: RpcNodes):
    nodes.world.node("user1", "BESIDE")
    for token in nodes.tokens():
        for dest in "BESIDE", "OTHER", "SECOND", "CALLEE":
            assert nodes.callee.error("return", dest, token, "x") == refusal("CALLEE", dest, token)
    nodes.world.rules("user2 CALLEE Topic U R 10", "user1 ASKER Topic U W 10")
    nodes.callee.ok("topic_listen", "U")
    bare, token = nodes.tokens()
    topic = nodes.world.owner.query("SELECT id FROM psqlmessages_topic WHERE name = 'U'")
    own, _, crypt = token.partition(".")
    for forged in f"{topic}.{crypt}", f"{own}.{bare}", crypt:
        refused = nodes.callee.error("return", "ASKER", forged, "x")
        assert refused == refusal("CALLEE", "ASKER", forged)


FORGERIES = {
    "the crypt of another token": lambda one, other: other[:32] + one[32:],
    "another digit": lambda one, _: ("1" if one[0] == "0" else "0") + one[1:],
    "a longer timeout": lambda one, _: one.replace(" 500 ", " 5000 ", 1),
    "a timeout written otherwise": lambda one, _: one.replace(" 500 ", " 0500 ", 1),
    "another token": lambda one, _: one + "X",
    "a token cut": lambda one, _: one[:-1],
    "a space moved": lambda one, _: one.replace(" 500 ", " 500  ", 1),
    "zeros": lambda one, _: "0" * 32 + one[32:],
}


def test_a_forged_token_is_refused(nodes: RpcNodes):
    nodes.world.execute("UPDATE messages.auth SET timeout = 500")
    accepted = []
    for ask in nodes.question, nodes.call:
        one, other = (ask(own) for own in ("ONE", "OTHER"))
        for name, forge in FORGERIES.items():
            topic, dot, rest = one.rpartition(".") if ask == nodes.call else ("", "", one)
            forged = topic + dot + forge(rest, other.rpartition(".")[2])
            if nodes.callee.error("return", "ASKER", forged, "x")[0] not in (18, 20):
                accepted.append((name, forged))
    # Timeouts and topics beyond all numbers.
    for digits in 10, 11, 30:
        forged = nodes.question().replace(" 500 ", f" {'9' * digits} ")
        assert nodes.callee.error("return", "ASKER", forged, "x")[0] in (18, 20)
    for digits in 18, 19, 30:
        forged = f"{'9' * digits}.{nodes.question()}"
        assert nodes.callee.error("return", "ASKER", forged, "x")[0] in (18, 20)
    assert (accepted, nodes.answers()) == ([], [])


def test_after_the_end_of_the_asker_its_tokens_are_over_even_when_it_is_back(nodes: RpcNodes):
    ends = {
        "deinit": lambda: nodes.asker.ok("deinit", "ASKER"),
        "crash": lambda: (nodes.world.kill(nodes.asker), nodes.other.ok("evaluate")),
    }
    for end, act in ends.items():
        tokens = nodes.tokens()
        act()
        for back in False, True:
            if back:
                nodes.asker = nodes.world.node("user1", "ASKER", notify="T")
            refused = [nodes.callee.error("return", "ASKER", token, "x") for token in tokens]
            assert refused == [refusal("CALLEE", "ASKER", token) for token in tokens], (end, back)
        assert nodes.answers() == []


def test_a_node_that_was_just_killed_is_not_connected(nodes: RpcNodes):
    nodes.asker.ok("evaluate")
    nodes.world.kill(nodes.callee)
    refused = nodes.asker.error("rpc", "CALLEE", "TOKEN", "x")
    assert refused == (17, "Client CALLEE is not connected")


def test_an_answer_needs_no_rule_but_the_token_and_asking_back_needs_one(nodes: RpcNodes):
    token = nodes.question()
    nodes.world.execute("DELETE FROM messages.auth WHERE type = 'Rpc'")
    nodes.callee.ok("return", "ASKER", token, "answer")
    assert nodes.answers() == [("CALLEE", "TOKEN", "answer")]
    assert nodes.callee.error("rpc", "ASKER", "TOKEN", "x") == (2, "cannot use Rpc to ASKER")


def test_the_right_to_ask_is_that_of_the_acting_node_and_of_its_role(world: World):
    world.rules("user1 MAY* Rpc MAY1 W 5", "user1 NOT Topic MAY1 W 5")
    node = world.node("user1", "MAY1", "MAY2", "NOT", "MAY3", "MAY4")
    node.ok("use", "NOT")
    refused = 2, "cannot use Rpc to MAY1"
    assert node.error("rpc", "MAY1", "TOKEN", "x") == refused
    node.ok("use", "MAY2")
    node.ok("rpc", "MAY1", "TOKEN", "x")
    world.rules("user1 MAY* Topic T R 5")
    world.execute("UPDATE messages.auth SET role = 'user2' WHERE type = 'Rpc'")
    assert node.error("rpc", "MAY1", "TOKEN", "x") == refused


def test_a_rule_lets_a_node_ask_itself_or_all_of_a_pattern_which_is_no_name(nodes: RpcNodes):
    nodes.world.rules(
        "user3 OTHER Rpc OTHER W 5", "user3 OTHER Rpc S* W 5", "user3 OTHER Rpc GATE* W 5",
        "user2 GATE* Topic T R 5",
    )  # fmt: skip
    nodes.other.payloads(), nodes.second.payloads()
    nodes.other.ok("rpc", "OTHER", "TOKEN", "question")
    [question] = nodes.other.headers()
    nodes.other.ok("return", "OTHER", question["Token"], "answer")
    assert [header["Body"] for header in nodes.other.headers()] == ["answer"]
    nodes.other.ok("rpc", "SECOND", "TOKEN", "question")
    assert nodes.second.headers()[0]["From"] == "OTHER"
    assert nodes.other.error("rpc", "GATE*", "TOKEN", "x") == (16, "Client GATE* don't exist")


def test_a_long_answer_is_kept_for_the_tokens_timeout_and_for_the_asker_only(nodes: RpcNodes):
    token = nodes.question()
    with nodes.callee.connection.transaction(force_rollback=True):
        nodes.callee.ok("return", "ASKER", token, LONG)
    assert nodes.answers() == [], "it was rolled back"
    for token, timeout in zip(nodes.tokens(), (500, 700), strict=True):
        nodes.callee.ok("return", "ASKER", token, LONG)
        payload = nodes.asker.payloads()[-1]
        line, body = nodes.asker.data(payload)
        assert parse(payload)["Dkey"].startswith(f"{timeout}.")
        assert (line["Type"], line["Token"], line["From"]) == ("Return", "TOKEN", "CALLEE")
        assert body == LONG
        refused = [node.data(payload)[0]["Err"] for node in (nodes.callee, nodes.other)]
        assert refused == ["13", "13"]


def secret(world: World) -> tuple[bytes, bytes]:
    """The key of the tokens, as each of its two pads holds it."""
    row = world.execute("SELECT inner_pad, outer_pad FROM messages._secret").fetchone()
    assert row is not None
    inner, outer = (bytes(pad) for pad in row)
    return bytes(b ^ 0x36 for b in inner), bytes(b ^ 0x5C for b in outer)


def test_a_token_is_the_hmac_of_the_secret(nodes: RpcNodes):
    key, same = secret(nodes.world)
    assert (same, len(key)) == (key, 64)
    asker = nodes.world.owner.query("SELECT id FROM psqlmessages_client WHERE ident = 'ASKER'")
    topic = nodes.world.owner.query("SELECT id FROM psqlmessages_topic WHERE name = 'T'")
    for token, head, answerer, timeout in (
        (nodes.question(), "", 'node "CALLEE"', 500),
        (nodes.call(), f"{topic}.", f"topic {topic}", 700),
    ):
        mac = hmac.new(key, f"{asker} {answerer} {timeout} TOKEN".encode(), "sha256").hexdigest()
        assert token == f"{head}{mac[:32]} {timeout} TOKEN"


def test_a_secret_is_256_random_bits(world: World):
    keys = []
    for _ in range(16):
        with world.owner.connection.transaction(force_rollback=True):
            world.execute("DELETE FROM messages._secret")
            world.owner.query("SELECT messages._make_secret()::text")
            keys.append(secret(world)[0])
    # A byte that two of sixteen keys share is no wonder, one that most share is.
    assert all(len(set(values)) > 8 for values in list(zip(*keys, strict=True))[:32])


def test_a_new_secret_as_documented_refuses_pending_answers(nodes: RpcNodes):
    former = nodes.question()
    found = NEW_SECRET.search((DOCS / "how-to/secure.md").read_text())
    assert found is not None
    for statement in found[1].splitlines():
        nodes.world.execute(statement)
        token = nodes.question()
    assert nodes.callee.error("return", "ASKER", former, "y")[0] == 20
    nodes.callee.ok("return", "ASKER", token, "y")
