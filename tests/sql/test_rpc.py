"""RPC and answers: what the reply token allows, to whom, and until when."""

import re

import pytest

from tests.sql.conftest import Program, World, parse

LONG = "x" * 20_000
TOKEN = "TOKEN"

RULES = [
    "user1 ASKER Rpc CALLEE W 500",
    "user1 ASKER Topic T W 700",
    "user1 BESIDE Topic T RW 700",
    "user2 CALLEE Topic T R 10",
    "user2 SECOND Topic T R 10",
    "user3 OTHER Topic T RW 10",
    "user3 EYE Topic T O 10",
]


class Cast:
    """ASKER asks; CALLEE, SECOND and OTHER may answer; BESIDE is another node of ASKER's role."""

    def __init__(self, world: World) -> None:
        world.rules(*RULES)
        self.world = world
        self.asker = world.node("user1", "ASKER")
        self.asker.ok("topic_notify", "T")
        self.callee = world.node("user2", "CALLEE")
        self.second = world.node("user2", "SECOND")
        self.other = world.node("user3", "OTHER")
        for program in (self.callee, self.second):
            program.ok("topic_listen", "T")

    def question(self, token: str = TOKEN) -> str:
        """ASKER asks CALLEE; the token that CALLEE received."""
        self.asker.ok("rpc", "CALLEE", token, "question")
        return self.callee.headers()[-1]["Token"]

    def call(self, token: str = TOKEN) -> str:
        """ASKER asks whoever listens to T; the token that listeners received."""
        self.asker.ok("topic_send", "T", "question", token)
        return self.callee.headers()[-1]["Token"]

    def tokens(self) -> list[str]:
        """A token of each kind."""
        return [self.question(), self.call()]

    def answers(self) -> list[tuple[str, str, str]]:
        """From, token and body of the answers that arrived at ASKER."""
        return [
            (header["From"], header["Token"], header["Body"])
            for header in self.asker.headers()
            if header["Type"] == "Return"
        ]


@pytest.fixture
def cast(world: World) -> Cast:
    return Cast(world)


def refusal(ident: str, dest: str, token: str) -> tuple[int, str]:
    return 20, f"{ident} cannot return to {dest} with token {token}"


def test_a_question_and_its_answer_have_their_fields(cast: Cast) -> None:
    token = cast.question("TOKEN_RISPOSTA")
    cast.asker.payloads()
    cast.callee.ok("return", "ASKER", token, "Risposta ü", "json")
    [answer] = cast.asker.headers()
    assert re.fullmatch(r"[0-9a-f]{32,} 500 TOKEN_RISPOSTA", token)
    assert isinstance(answer.pop("Id"), int)
    assert answer == {
        "Type": "Return", "Size": 11, "To": "ASKER", "From": "CALLEE", "Enc": "json",
        "Token": "TOKEN_RISPOSTA", "Body": "Risposta ü",
    }  # fmt: skip


def test_any_body_and_any_token_come_back_as_they_are_in_order(cast: Cast) -> None:
    token = cast.question()
    bodies = [None, "", "\n", "ü", '{"Type":"Sys"}', "second", "second"]
    for body in bodies:
        cast.callee.ok("return", "ASKER", token, body)
    assert cast.answers() == [("CALLEE", "TOKEN", body or "") for body in bodies]
    for own in (
        "T", "5 T", "T O K E N", "\n", "ü" * 500, "'", '"\\', "0" * 32 + " 5 T", "1." + "0" * 32
    ):  # fmt: skip
        for received in cast.question(own), cast.call(own):
            cast.callee.ok("return", "ASKER", received, "answer")
        assert cast.answers() == [("CALLEE", own, "answer")] * 2


def test_a_token_of_any_timeout_a_rule_may_have_can_be_answered(cast: Cast) -> None:
    for timeout in 1, 999_999_999, 1_000_000_000, 2**31 - 1:
        cast.world.execute("UPDATE messages.auth SET timeout = %s", [timeout])
        for received in cast.tokens():
            assert received.split()[1] == str(timeout)
            cast.callee.ok("return", "ASKER", received, "answer")
        assert len(cast.answers()) == 2


def test_a_question_without_a_body_to_a_node_that_listens_to_nothing(cast: Cast) -> None:
    cast.callee.ok("topic_unlisten", "T")
    cast.asker.ok("rpc", "CALLEE", "TOKEN", None)
    assert cast.callee.headers()[-1]["Size"] == 0


def test_who_listens_to_a_topic_may_answer_what_was_asked_of_it_and_nobody_else(
    cast: Cast,
) -> None:
    eye = cast.world.node("user3", "EYE")
    eye.ok("topic_observe", "T")
    token = cast.call()
    assert eye.headers()[-1]["Token"] == token
    cast.other.ok("topic_notify", "T")
    for ident, program in ("EYE", eye), ("OTHER", cast.other):
        assert program.error("return", "ASKER", token, "x") == refusal(ident, "ASKER", token)
    cast.other.ok("topic_listen", "T")  # since the question
    for program in cast.second, cast.callee, cast.other:
        program.ok("return", "ASKER", token, "answer")
    assert [sender for sender, _, _ in cast.answers()] == ["SECOND", "CALLEE", "OTHER"]
    cast.callee.ok("topic_unlisten", "T")
    assert cast.callee.error("return", "ASKER", token, "late") == refusal("CALLEE", "ASKER", token)
    assert cast.answers() == []


def test_a_node_that_was_not_asked_may_not_answer(cast: Cast) -> None:
    token = cast.question()
    cast.callee.ok("return", "ASKER", token, "answer")
    cast.world.rules("user2 GATE Topic U R 10")
    cast.callee.ok("init", "GATE")  # another node of the session asked
    for ident, program in (
        ("SECOND", cast.second), ("OTHER", cast.other), ("ASKER", cast.asker),
        ("GATE", cast.callee),
    ):  # fmt: skip
        assert program.error("return", "ASKER", token, "answer") == refusal(ident, "ASKER", token)
    assert len(cast.answers()) == 1


def test_a_token_answers_its_asker_only(cast: Cast) -> None:
    cast.world.node("user1", "BESIDE")
    for token in cast.tokens():
        for dest in "BESIDE", "OTHER", "SECOND", "CALLEE":
            assert cast.callee.error("return", dest, token, "x") == refusal("CALLEE", dest, token)


def test_a_token_for_a_topic_answers_for_no_other_topic_and_no_node_nor_the_reverse(
    cast: Cast,
) -> None:
    cast.world.rules("user2 CALLEE Topic U R 10", "user1 ASKER Topic U W 10")
    cast.callee.ok("topic_listen", "U")
    bare, token = cast.tokens()
    topic = cast.world.owner.query("SELECT id FROM psqlmessages_topic WHERE name = 'U'")
    own, _, crypt = token.partition(".")
    for forged in f"{topic}.{crypt}", f"{own}.{bare}", crypt:
        refused = cast.callee.error("return", "ASKER", forged, "x")
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


def test_a_forged_token_is_refused(cast: Cast) -> None:
    cast.world.execute("UPDATE messages.auth SET timeout = 500")
    accepted = []
    for ask in cast.question, cast.call:
        one, other = (ask(own) for own in ("ONE", "OTHER"))
        for name, forge in FORGERIES.items():
            topic, dot, rest = one.rpartition(".") if ask == cast.call else ("", "", one)
            forged = topic + dot + forge(rest, other.rpartition(".")[2])
            if cast.callee.error("return", "ASKER", forged, "x")[0] not in (18, 20):
                accepted.append((name, forged))
    # Timeouts and topics beyond all numbers.
    for digits in 10, 11, 30:
        forged = cast.question().replace(" 500 ", f" {'9' * digits} ")
        assert cast.callee.error("return", "ASKER", forged, "x")[0] in (18, 20)
    for digits in 18, 19, 30:
        forged = f"{'9' * digits}.{cast.question()}"
        assert cast.callee.error("return", "ASKER", forged, "x")[0] in (18, 20)
    assert (accepted, cast.answers()) == ([], [])


def test_after_the_end_of_the_asker_its_tokens_are_over_even_when_it_is_back(cast: Cast) -> None:
    ends = {
        "deinit": lambda: cast.asker.ok("deinit", "ASKER"),
        "crash": lambda: (cast.world.kill(cast.asker), cast.other.ok("evaluate")),
    }
    for end, act in ends.items():
        tokens = cast.tokens()
        act()
        for back in False, True:
            if back:
                cast.asker = cast.world.node("user1", "ASKER")
                cast.asker.ok("topic_notify", "T")
            refused = [cast.callee.error("return", "ASKER", token, "x") for token in tokens]
            expected = [refusal("CALLEE", "ASKER", token) for token in tokens]
            assert refused == expected, (end, back)
        assert cast.answers() == []


@pytest.mark.parametrize("who", ["asker", "callee"])
def test_who_was_killed_a_moment_ago_is_not_connected(cast: Cast, who: str) -> None:
    token = cast.question()
    staying = cast.callee if who == "asker" else cast.asker
    staying.ok("evaluate")
    cast.world.kill(getattr(cast, who))
    call = ("return", "ASKER", token) if who == "asker" else ("rpc", "CALLEE", "TOKEN")
    assert staying.error(*call, "x") == (17, f"Client {who.upper()} is not connected")


def test_an_init_already_keeps_the_tokens(cast: Cast) -> None:
    tokens = cast.tokens()
    assert cast.asker.ok("init", "ASKER")["Already"] == 1
    for token in tokens:
        cast.callee.ok("return", "ASKER", token, "answer")
    assert len(cast.answers()) == 2


def test_an_answer_needs_no_rule_but_the_token_and_asking_back_needs_one(cast: Cast) -> None:
    token = cast.question()
    cast.world.execute("DELETE FROM messages.auth WHERE type = 'Rpc'")
    cast.callee.ok("return", "ASKER", token, "answer")
    assert cast.answers() == [("CALLEE", "TOKEN", "answer")]
    assert cast.callee.error("rpc", "ASKER", "TOKEN", "x") == (2, "cannot use Rpc to ASKER")


def test_the_right_to_ask_is_that_of_the_acting_node_and_of_its_role(world: World) -> None:
    world.rules("user1 MAY* Rpc MAY1 W 5", "user1 NOT Topic MAY1 W 5")
    node = world.gateway("user1", "MAY1", "MAY2", "NOT", "MAY3", "MAY4")
    node.ok("use", "NOT")
    refused = 2, "cannot use Rpc to MAY1"
    assert node.error("rpc", "MAY1", "TOKEN", "x") == refused
    node.ok("use", "MAY2")
    node.ok("rpc", "MAY1", "TOKEN", "x")
    world.rules("user1 MAY* Topic T R 5")
    world.execute("UPDATE messages.auth SET role = 'user2' WHERE type = 'Rpc'")
    assert node.error("rpc", "MAY1", "TOKEN", "x") == refused


def test_who_has_settings_or_pid_of_another_session_neither_asks_nor_answers(cast: Cast) -> None:
    """Only the connection itself has all three: its role, its pid and its channel."""
    world, token = cast.world, cast.question()
    world.rules("user2 CALLEE Rpc ASKER W 5", "hostile CALLEE Rpc ASKER W 5")
    had = {
        name: cast.callee.query("SELECT current_setting(%s)", name)
        for name in ("messages.channel", "messages.node")
    }

    def refusals(program: Program, *names: str) -> set[int]:
        for name in names:
            program.query("SELECT set_config(%s, %s, false)", name, had[name])
        found = set()
        for call in ("rpc", "ASKER", "TOKEN", "x"), ("return", "ASKER", token, "x"):
            # Not committed, a call does not find the dead session for the next one.
            with program.connection.transaction(force_rollback=True):
                found.add(program.error(*call)[0])
        return found

    def inherit(program: Program) -> Program:
        for table in "session", "membership":
            update = f"UPDATE psqlmessages_{table} SET pid = %s WHERE channel = %s"
            world.execute(update, [program.pid, had["messages.channel"]])
        return program

    assert refusals(world.program("user2"), *had) == {50}, "it has another pid"
    world.kill(cast.callee)
    heir, stranger = world.program("user2"), world.program("hostile")
    assert refusals(inherit(heir), "messages.node") == {50}, "it does not know the channel"
    assert refusals(inherit(stranger), *had) == {50}, "it is another role"


def test_a_rule_lets_a_node_ask_itself_or_all_of_a_pattern_which_is_no_name(cast: Cast) -> None:
    cast.world.rules(
        "user3 OTHER Rpc OTHER W 5", "user3 OTHER Rpc S* W 5", "user3 OTHER Rpc GATE* W 5",
        "user2 GATE* Topic T R 5",
    )  # fmt: skip
    cast.other.payloads(), cast.second.payloads()
    cast.other.ok("rpc", "OTHER", "TOKEN", "question")
    [question] = cast.other.headers()
    cast.other.ok("return", "OTHER", question["Token"], "answer")
    assert [header["Body"] for header in cast.other.headers()] == ["answer"]
    cast.other.ok("rpc", "SECOND", "TOKEN", "question")
    assert cast.second.headers()[0]["From"] == "OTHER"
    assert cast.other.error("rpc", "GATE*", "TOKEN", "x") == (16, "Client GATE* don't exist")


def test_an_answer_in_a_rolled_back_transaction_never_arrives(cast: Cast) -> None:
    token = cast.question()
    with cast.callee.connection.transaction(force_rollback=True):
        cast.callee.ok("return", "ASKER", token, "taken back")
    assert cast.answers() == []


def test_a_long_answer_is_kept_for_the_tokens_timeout_and_for_the_asker_only(cast: Cast) -> None:
    for token, timeout in zip(cast.tokens(), (500, 700), strict=True):
        cast.callee.ok("return", "ASKER", token, LONG)
        payload = cast.asker.payloads()[-1]
        line, body = cast.asker.data(payload)
        assert parse(payload)["Dkey"].startswith(f"{timeout}.")
        assert (line["Type"], line["Token"], line["From"]) == ("Return", "TOKEN", "CALLEE")
        assert body == LONG
        assert [node.data(payload)[0]["Err"] for node in (cast.callee, cast.other)] == ["13", "13"]


def test_the_crypt_differs_for_each_token_asker_and_topic(cast: Cast) -> None:
    cast.world.rules("user1 BESIDE Rpc CALLEE W 5")
    tokens = [cast.question("ONE"), cast.question("TWO"), cast.call("ONE")]
    cast.asker.ok("init", "BESIDE")
    tokens.append(cast.question("ONE"))
    crypts = [token.split(" ")[0].rpartition(".")[2] for token in tokens]
    assert len(set(crypts)) == 4
    assert all(len(crypt) * 4 >= 128 for crypt in crypts)
