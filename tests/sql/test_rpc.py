"""RPC and answers: what the reply token allows, to whom, and until when."""

import re

import pytest

from tests.sql.conftest import World, parse

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


@pytest.mark.parametrize("body", [None, "", "\n", "ü", '{"Type":"Sys"}'])
def test_any_body_is_answered_as_it_is(cast: Cast, body: str | None) -> None:
    cast.callee.ok("return", "ASKER", cast.question(), body)
    assert cast.answers() == [("CALLEE", "TOKEN", body or "")]


@pytest.mark.parametrize(
    "token",
    ["T", "5 T", "T O K E N", "\n", "ü" * 500, "'", '"\\', "0" * 32 + " 5 T", "1." + "0" * 32],
)
def test_any_token_comes_back_as_it_is(cast: Cast, token: str) -> None:
    for received in (cast.question(token), cast.call(token)):
        cast.callee.ok("return", "ASKER", received, "answer")
    assert cast.answers() == [("CALLEE", token, "answer")] * 2


@pytest.mark.parametrize("timeout", [1, 999_999_999, 1_000_000_000, 2**31 - 1])
def test_a_token_of_any_timeout_a_rule_may_have_can_be_answered(cast: Cast, timeout: int) -> None:
    cast.world.owner.connection.execute("UPDATE messages.auth SET timeout = %s", [timeout])
    for received in (cast.question(), cast.call()):
        assert received.split()[1] == str(timeout)
        cast.callee.ok("return", "ASKER", received, "answer")
    assert len(cast.answers()) == 2


def test_a_question_without_a_body_to_a_node_that_listens_to_nothing(cast: Cast) -> None:
    cast.callee.ok("topic_unlisten", "T")
    cast.asker.ok("rpc", "CALLEE", "TOKEN", None)
    assert cast.callee.headers()[-1]["Size"] == 0


def test_several_answers_to_one_question_all_arrive_in_order(cast: Cast) -> None:
    token = cast.question()
    for answer in ("first", "second", "second"):
        cast.callee.ok("return", "ASKER", token, answer)
    assert [body for _, _, body in cast.answers()] == ["first", "second", "second"]


def test_every_listener_may_answer_what_was_asked_of_a_topic(cast: Cast) -> None:
    token = cast.call()
    for program in (cast.second, cast.callee):
        program.ok("return", "ASKER", token, "answer")
    assert [sender for sender, _, _ in cast.answers()] == ["SECOND", "CALLEE"]


def test_who_listens_since_the_question_may_answer_it_too(cast: Cast) -> None:
    token = cast.call()
    cast.other.ok("topic_listen", "T")
    cast.other.ok("return", "ASKER", token, "answer")
    assert cast.answers() == [("OTHER", "TOKEN", "answer")]


def test_who_listens_no_more_may_not_answer(cast: Cast) -> None:
    token = cast.call()
    cast.callee.ok("topic_unlisten", "T")
    assert cast.callee.error("return", "ASKER", token, "late") == refusal("CALLEE", "ASKER", token)
    assert cast.answers() == []


def test_an_observer_may_not_answer(cast: Cast) -> None:
    eye = cast.world.node("user3", "EYE")
    eye.ok("topic_observe", "T")
    token = cast.call()
    assert eye.headers()[-1]["Token"] == token
    assert eye.error("return", "ASKER", token, "seen") == refusal("EYE", "ASKER", token)


def test_a_notifier_may_not_answer(cast: Cast) -> None:
    token = cast.call()
    cast.other.ok("topic_notify", "T")
    assert cast.other.error("return", "ASKER", token, "x") == refusal("OTHER", "ASKER", token)


def test_a_node_that_was_not_asked_may_not_answer(cast: Cast) -> None:
    token = cast.question()
    for ident, program in (("SECOND", cast.second), ("OTHER", cast.other), ("ASKER", cast.asker)):
        assert program.error("return", "ASKER", token, "x") == refusal(ident, "ASKER", token)
    assert cast.answers() == []


def test_another_node_of_the_session_asked_may_not_answer(cast: Cast) -> None:
    token = cast.question()
    cast.world.rules("user2 GATE Topic U R 10")
    cast.callee.ok("init", "GATE")
    assert cast.callee.error("return", "ASKER", token, "x") == refusal("GATE", "ASKER", token)


@pytest.mark.parametrize("dest", ["BESIDE", "OTHER", "SECOND", "CALLEE"])
def test_a_token_answers_its_asker_only(cast: Cast, dest: str) -> None:
    cast.world.node("user1", "BESIDE")
    for token in (cast.question(), cast.call()):
        assert cast.callee.error("return", dest, token, "x") == refusal("CALLEE", dest, token)


def test_a_token_for_a_topic_answers_for_no_other_topic(cast: Cast) -> None:
    cast.world.rules("user2 CALLEE Topic U R 10", "user1 ASKER Topic U W 10")
    cast.callee.ok("topic_listen", "U")
    token = cast.call()
    topic = cast.world.owner.query("SELECT id FROM psqlmessages_topic WHERE name = 'U'")
    forged = f"{topic}.{token.partition('.')[2]}"
    assert cast.callee.error("return", "ASKER", forged, "x") == refusal("CALLEE", "ASKER", forged)


def test_a_token_for_a_topic_does_not_answer_as_one_for_a_node_and_the_reverse(cast: Cast) -> None:
    bare, topic = cast.question(), cast.call()
    number = topic.partition(".")[0]
    for forged in (f"{number}.{bare}", topic.partition(".")[2]):
        assert cast.callee.error("return", "ASKER", forged, "x")[0] == 20


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


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_token_is_refused(cast: Cast, forgery: str) -> None:
    forged = FORGERIES[forgery](cast.question("ONE"), cast.question("OTHER"))
    number, _ = cast.callee.error("return", "ASKER", forged, "x")
    assert number in (18, 20)
    assert cast.answers() == []


def test_a_timeout_beyond_all_numbers_is_refused(cast: Cast) -> None:
    for digits in (10, 11, 30):
        forged = cast.question().replace(" 500 ", f" {'9' * digits} ")
        assert cast.callee.error("return", "ASKER", forged, "x")[0] in (18, 20)
    for topic in ("9" * 18, "9" * 19, "9" * 30):
        forged = f"{topic}.{cast.question()}"
        assert cast.callee.error("return", "ASKER", forged, "x")[0] in (18, 20)


def test_a_replayed_answer_from_another_node_is_refused(cast: Cast) -> None:
    token = cast.question()
    cast.callee.ok("return", "ASKER", token, "answer")
    assert cast.second.error("return", "ASKER", token, "answer") == refusal(
        "SECOND", "ASKER", token
    )
    assert len(cast.answers()) == 1


def both_tokens(cast: Cast) -> list[str]:
    return [cast.question(), cast.call()]


def test_after_deinit_of_the_asker_its_tokens_are_over(cast: Cast) -> None:
    tokens = both_tokens(cast)
    cast.asker.ok("deinit", "ASKER")
    refused = [cast.callee.error("return", "ASKER", token, "x") for token in tokens]
    assert refused == [refusal("CALLEE", "ASKER", token) for token in tokens]


def test_after_the_asker_came_back_its_old_tokens_are_over(cast: Cast) -> None:
    tokens = both_tokens(cast)
    cast.asker.ok("deinit", "ASKER")
    cast.asker.ok("init", "ASKER")
    refused = [cast.callee.error("return", "ASKER", token, "x")[0] for token in tokens]
    assert refused == [20, 20]
    assert cast.answers() == []


def test_after_a_crash_of_the_asker_its_tokens_are_over(cast: Cast) -> None:
    tokens = both_tokens(cast)
    cast.world.kill(cast.asker)
    cast.other.ok("evaluate")
    assert [cast.callee.error("return", "ASKER", token, "x")[0] for token in tokens] == [20, 20]


def test_after_a_crash_and_return_of_the_asker_its_old_tokens_are_over(cast: Cast) -> None:
    tokens = both_tokens(cast)
    cast.world.kill(cast.asker)
    cast.asker = cast.world.node("user1", "ASKER")
    assert [cast.callee.error("return", "ASKER", token, "x")[0] for token in tokens] == [20, 20]
    assert cast.answers() == []


def test_an_asker_killed_a_moment_ago_is_not_connected(cast: Cast) -> None:
    token = cast.question()
    cast.callee.ok("evaluate")
    cast.world.kill(cast.asker)
    refused = cast.callee.error("return", "ASKER", token, "x")
    assert refused == (17, "Client ASKER is not connected")


def test_a_callee_killed_a_moment_ago_is_not_connected(cast: Cast) -> None:
    cast.asker.ok("evaluate")
    cast.world.kill(cast.callee)
    refused = cast.asker.error("rpc", "CALLEE", "TOKEN", "question")
    assert refused == (17, "Client CALLEE is not connected")


def test_an_init_already_keeps_the_tokens(cast: Cast) -> None:
    tokens = both_tokens(cast)
    assert cast.asker.ok("init", "ASKER")["Already"] == 1
    for token in tokens:
        cast.callee.ok("return", "ASKER", token, "answer")
    assert len(cast.answers()) == 2


def test_an_answer_needs_no_rule_but_the_token(cast: Cast) -> None:
    token = cast.question()
    cast.world.owner.connection.execute("DELETE FROM messages.auth WHERE type = 'Rpc'")
    cast.callee.ok("return", "ASKER", token, "answer")
    assert cast.answers() == [("CALLEE", "TOKEN", "answer")]


def test_asking_back_needs_a_rule(cast: Cast) -> None:
    cast.question()
    assert cast.callee.error("rpc", "ASKER", "TOKEN", "x") == (2, "cannot use Rpc to ASKER")


def test_a_node_may_ask_itself_where_a_rule_says_so(cast: Cast) -> None:
    cast.world.rules("user3 OTHER Rpc OTHER W 5")
    cast.other.payloads()
    cast.other.ok("rpc", "OTHER", "TOKEN", "question")
    [question] = cast.other.headers()
    cast.other.ok("return", "OTHER", question["Token"], "answer")
    assert [header["Body"] for header in cast.other.headers()] == ["answer"]


def test_a_pattern_rule_lets_ask_each_node_of_it(cast: Cast) -> None:
    cast.world.rules("user3 OTHER Rpc S* W 5")
    cast.second.payloads()
    cast.other.ok("rpc", "SECOND", "TOKEN", "question")
    assert cast.second.headers()[0]["From"] == "OTHER"


def test_a_pattern_is_no_name_of_a_node(cast: Cast) -> None:
    cast.world.rules("user3 OTHER Rpc GATE* W 5", "user2 GATE* Topic T R 5")
    refused = cast.other.error("rpc", "GATE*", "TOKEN", "question")
    assert refused == (16, "Client GATE* don't exist")


def test_a_question_in_a_rolled_back_transaction_is_never_asked(cast: Cast) -> None:
    cast.callee.payloads()
    with cast.asker.connection.transaction(force_rollback=True):
        cast.asker.ok("rpc", "CALLEE", "TOKEN", "question")
    assert cast.callee.payloads() == []


def test_an_answer_in_a_rolled_back_transaction_never_arrives(cast: Cast) -> None:
    token = cast.question()
    with cast.callee.connection.transaction(force_rollback=True):
        cast.callee.ok("return", "ASKER", token, "taken back")
    assert cast.answers() == []


@pytest.mark.parametrize(("ask", "timeout"), [("question", 500), ("call", 700)])
def test_a_long_answer_is_kept_for_the_tokens_timeout_and_for_the_asker_only(
    cast: Cast, ask: str, timeout: int
) -> None:
    cast.callee.ok("return", "ASKER", getattr(cast, ask)(), LONG)
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
    cast.asker.ok("rpc", "CALLEE", "ONE", "question")
    tokens.append(cast.callee.headers()[-1]["Token"])
    crypts = [token.split(" ")[0].rpartition(".")[2] for token in tokens]
    assert len(set(crypts)) == 4
    assert all(len(crypt) * 4 >= 128 for crypt in crypts)


def test_no_role_reads_the_secret(cast: Cast) -> None:
    for role in ("user1", "hostile"):
        assert cast.world.program(role).query(
            "SELECT has_table_privilege('messages._secret', 'SELECT')"
        ) is False  # fmt: skip
