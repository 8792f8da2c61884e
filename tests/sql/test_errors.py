"""Every error of the protocol: its number, its text and its WARNING, and which comes first."""

from collections.abc import Callable, Iterator
from itertools import combinations, groupby
from typing import Any, NamedTuple

import pytest

from tests.conftest import TestedServer
from tests.sql.conftest import Program, World
from tests.sql.error_cases import (
    ANSWERS,
    AS_NODE,
    BIG,
    CASES,
    PUSHES,
    RIGHT,
    RULES,
    TAKES,
    TEXTS,
    TOO_BIG,
    WITH_QUEUE,
    WITH_TOPIC,
    Case,
)

pytestmark = pytest.mark.versions


class Scene(NamedTuple):
    """A world where each error is one call away."""

    world: World
    me: Program
    other: Program
    nobody: Program


@pytest.fixture(scope="module")
def scene(server: TestedServer) -> Iterator[Scene]:
    world = World(server)
    world.rules(*RULES)
    me = world.node("user1", "ME")
    other = world.node("user2", "OTHER")
    for topic in ("BOTH", "WRITE"):
        other.ok("topic_listen", topic)
    for topic in ("BOTH", "QUIET"):
        me.ok("topic_notify", topic)
    world.execute("UPDATE messages._settings SET max_body_bytes = 8192")
    yield Scene(world, me, other, world.program("user1"))
    world.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")
    world.close()


def state(world: World) -> str:
    """All rows of the tables, but the kept bodies."""
    return world.owner.query(
        "SELECT concat((SELECT json_agg(a ORDER BY id) FROM psqlmessages_auth AS a),"
        " (SELECT json_agg(s ORDER BY id) FROM psqlmessages_session AS s),"
        " (SELECT json_agg(c ORDER BY id) FROM psqlmessages_client AS c),"
        " (SELECT json_agg(t ORDER BY id) FROM psqlmessages_topic AS t),"
        " (SELECT json_agg(m ORDER BY id) FROM psqlmessages_membership AS m),"
        " (SELECT json_agg(o ORDER BY id) FROM psqlmessages_observation AS o),"
        " (SELECT json_agg(s ORDER BY id) FROM psqlmessages_subscription AS s),"
        " (SELECT json_agg(q ORDER BY id) FROM psqlmessages_queue AS q),"
        " (SELECT json_agg(e ORDER BY id) FROM psqlmessages_element AS e),"
        " (SELECT count(*) FROM psqlmessages_elementkey),"
        " (SELECT count(*) FROM psqlmessages_streammessage))"
    )


def fault(scene: Scene, case: Case) -> str | None:
    """Make the call of a case; what is wrong with its answer and its warning."""
    program = getattr(scene, case.caller)
    program.warnings.clear()
    found = program.call(case.function, *case.arguments), program.warnings
    text = f"Messages err:{case.number} {case.text}"
    expected = {"Err": str(case.number), "Errstr": case.text}, [f"WARNING: {text}"]
    return None if found == expected else f"{case!r}: {found}, not {expected}"


def test_the_view_of_errors_holds_the_texts_of_the_protocol(scene: Scene) -> None:
    rows = scene.nobody.execute("SELECT number, errstr FROM messages.errors").fetchall()
    assert dict(rows) == TEXTS


def test_a_refused_call_answers_with_number_text_and_warning(
    scene: Scene,
) -> None:
    # Another test may have killed an asker, which any call would find.
    scene.me.ok("evaluate")
    before = state(scene.world)
    told = scene.me, scene.other
    for program in told:
        program.payloads()
    wrong = []
    for function, cases in groupby(sorted(CASES, key=by_function), by_function):
        wrong += [wrong for case in cases if (wrong := fault(scene, case))]
        if state(scene.world) != before or [p for p in told if p.payloads()]:
            wrong.append(f"refused calls of {function} changed something")
            before = state(scene.world)
    assert not wrong
    assert len(CASES) > 600


def by_function(case: Case) -> str:
    return case.function


def connected_by_another_role(scene: Scene) -> Case:
    values = {"ident": "ME", "pid": scene.me.pid, "role": "user1"}
    return Case(7, "init", ("ME",), values, caller="other")


def connected_elsewhere_by_the_same_role(scene: Scene) -> Case:
    return Case(8, "init", ("ME",), {"ident": "ME", "pid": scene.me.pid}, caller="nobody")


def not_listening(scene: Scene) -> Case:
    scene.other.payloads()
    scene.me.ok("topic_send", "BOTH", "x" * 8100)
    return Case(11, "get_data", tuple(scene.other.payloads(1)), {"topic": "BOTH"})


def asked(scene: Scene) -> tuple[Program, dict[str, Any]]:
    """A new node that has just asked OTHER, and what OTHER received."""
    asker = scene.world.node("user3", f"ASKER{len(scene.world.programs)}")
    scene.other.payloads()
    asker.ok("rpc", "OTHER", "TOKEN", "question")
    return asker, scene.other.headers(1)[0]


def asker_just_killed(scene: Scene, body: str = "answer") -> Case:
    asker, question = asked(scene)
    scene.world.kill(asker)
    ident = question["From"]
    return Case(17, "return", (ident, question["Token"], body), {"ident": ident}, caller="other")


def answer_too_big(scene: Scene, function: str = "return") -> Case:
    _, question = asked(scene)
    arguments = (question["From"], question["Token"], BIG)
    return Case(51, function, arguments, TOO_BIG, caller="other")


def answer_in_unknown_encoding(scene: Scene) -> Case:
    _, question = asked(scene)
    arguments = (question["From"], question["Token"], "answer", "gzip")
    return Case(55, "return", arguments, {"enc": "gzip"}, caller="other")


def a_later_batch_committed(scene: Scene) -> Case:
    arguments = ("ME", "BOTH", "imports", 5, [], 0)
    scene.me.ok("publish_staged", *arguments)
    told = {"batch": 4, "query": "imports", "last": 5}
    return Case(65, "publish_staged", ("ME", "BOTH", "imports", 4, [], 0), told)


PREPARED: dict[Callable[[Scene], Case], int] = {
    connected_by_another_role: 7,
    connected_elsewhere_by_the_same_role: 8,
    not_listening: 11,
    asker_just_killed: 17,
    lambda scene: asker_just_killed(scene, BIG): 17,
    answer_too_big: 51,
    lambda scene: answer_too_big(scene, "return_error"): 51,
    answer_in_unknown_encoding: 55,
    a_later_batch_committed: 65,
}


def test_a_call_refused_for_the_state_of_things_answers_so_too(scene: Scene) -> None:
    assert [wrong for prepare in PREPARED if (wrong := fault(scene, prepare(scene)))] == []


def test_init_a_second_time_is_a_success_with_a_warning(scene: Scene) -> None:
    scene.me.warnings.clear()
    answer = scene.me.ok("init", "ME")
    assert answer["Already"] == 1
    assert answer["Channel"].startswith(f"user1_{scene.me.pid}")
    assert scene.me.warnings == ["WARNING: Messages err:6 Client ME exists with same pid"]


def test_a_failure_answered_to_the_asker_has_number_and_text_in_its_header(scene: Scene) -> None:
    asker, question = asked(scene)
    asker.payloads()
    scene.other.ok("return_error", question["From"], question["Token"], "no such order")
    [header] = asker.headers()
    assert (header["Err"], header["Errstr"], header["Body"]) == ("56", TEXTS[56], "no such order")


def test_every_number_of_the_protocol_is_provoked_by_a_case(scene: Scene) -> None:
    numbers = scene.nobody.query("SELECT array_agg(number) FROM messages.errors")
    provoked = {case.number for case in CASES} | set(PREPARED.values())
    # 6 is a warning, 56 travels in a header, and the rest are the relay's.
    assert provoked | {6, 56, 57, 59} == set(numbers)


TOPIC_ORDER = [50, 54, 1, 15, 9, 16, 2, 3, 21, 17, 55, 51, 10, 60, 61]
QUEUE_ORDER = [54, 1, 15, 16, 62, 2, 3, 63, 58, 60, 55, 51]
RPC_ORDER = [50, 54, 15, 14, 16, 2, 17, 55, 51]
RETURN_ORDER = [50, 54, 15, 14, 18, 19, 20]
# In which order a function looks for its errors.
ORDERS = {
    **{name: TOPIC_ORDER for name in WITH_TOPIC
       if "staged" not in name and "stream" not in name and name != "subscribe_from"},
    **dict.fromkeys((*PUSHES, *TAKES, "pause", "resume", "drain", "queue_listen"), QUEUE_ORDER),
    "rpc": RPC_ORDER,
    **dict.fromkeys(ANSWERS, RETURN_ORDER),
    "get_data": [50, 52],
    "use": [50, 54],
}  # fmt: skip


def doubly_wrong() -> Iterator[tuple[int, int, Case]]:
    """Each function with each two of its errors that one call can have; the first, the other."""
    for function, order in ORDERS.items():
        right = RIGHT[function]
        # One case of each number and place; a key is looked at last.
        cases: dict[tuple[int, tuple[int, ...]], Case] = {}
        for case in CASES:
            if (case.function, case.number in order) == (function, True) and len(
                case.arguments
            ) < 9:
                cases.setdefault((case.number, different(case, right)), case)
        for ((one, here), first), ((other, there), second) in combinations(cases.items(), 2):
            if one == other or {one, other} == {9, 16} or set(here) & set(there):
                continue
            longest = max(first.arguments, second.arguments, key=len)
            arguments = [*right, *[None] * (len(longest) - len(right))]
            for case, places in (first, here), (second, there):
                for place in places:
                    arguments[place] = case.arguments[place]
            number = min(one, other, key=order.index)
            caller = "nobody" if "nobody" in (first.caller, second.caller) else "me"
            yield one, other, Case(number, function, tuple(arguments), caller=caller)


def different(case: Case, right: tuple[Any, ...]) -> tuple[int, ...]:
    """At which places the arguments of a case are not the right ones."""
    return tuple(
        place for place, value in enumerate(case.arguments)
        if value != (right[place] if place < len(right) else None)
    )  # fmt: skip


def test_of_two_errors_the_first_in_order_is_answered(scene: Scene) -> None:
    wrong, cases = [], [*doubly_wrong()]
    for one, other, case in cases:
        found = getattr(scene, case.caller).error(case.function, *case.arguments)[0]
        if found != case.number:
            wrong.append(f"{one} and {other} of {case!r}: {found}")
    assert not wrong
    assert len(cases) > 400


def test_a_role_without_a_rule_can_act_as_no_node(scene: Scene) -> None:
    hostile = scene.world.program("hostile")
    names = [*WITH_TOPIC, *WITH_QUEUE, "init", "connect_stream", "use", "rpc"]
    numbers = {name: hostile.error(name, *RIGHT[name])[0] for name in names}
    as_node = {*AS_NODE, *WITH_QUEUE}
    assert numbers == {
        name: 2 if name in as_node else 5 if name in ("init", "connect_stream") else 50
        for name in names
    }
    # Nor ends the node of another.
    assert [p.ok("deinit", "ME")["Already"] for p in (hostile, scene.other)] == [1, 1]
    assert scene.other.error("topic_send_as", "ME", "WRITE", "x")[0] == 2
    scene.me.ok("topic_send", "BOTH", "x")


def test_a_name_of_100_characters_and_a_token_of_1000_bytes_are_not_too_long(scene: Scene) -> None:
    assert scene.me.error("topic_listen", "ü" * 100)[0] == 9
    assert scene.me.error("init", "ü" * 100)[0] == 5
    scene.me.ok("rpc", "OTHER", "ü" * 500, "body")
    scene.me.ok("topic_send", "BOTH", "body", "ü" * 500)


def test_a_body_of_exactly_the_maximum_is_sent(scene: Scene) -> None:
    for case in CASES:
        if case.number == 51 and case.caller == "me" and "push" not in case.function:
            arguments = [shorter(argument) for argument in case.arguments]
            scene.me.ok(case.function, *arguments)


def shorter(argument: Any) -> Any:
    """Cut what is too long to what is just not."""
    if isinstance(argument, list):
        return [shorter(each) for each in argument]
    return argument.encode()[:8192].decode() if isinstance(argument, str) else argument


def test_functions_that_need_no_session_do_not_ask_for_one(scene: Scene) -> None:
    scene.nobody.ok("topic_send_as", "ME", "BOTH", "body")
    scene.nobody.ok("evaluate")
    assert scene.nobody.ok("deinit", "ME") == {"Err": "0", "Already": 1}
