"""Selectors: loops are refused; memory, time and backtracking are bounded."""

import json
from random import Random
from typing import Any

import pytest

from psqlmessages.exchanges import Selector, SelectorError
from psqlmessages.exchanges.cost import MAX_PROGRAM_SIZE, find_max_units, program_size
from psqlmessages.exchanges.expression import ExpressionTree
from tests.django.processes import run_python
from tests.exchanges.asking import asked, routed

SECONDS = 0.1
BYTES = 50_000_000

LOOPS = [
    "[1, 2].map(x, x + 1)", "[1, 2].map(x, x > 1, x)", "[1, 2].filter(x, x > 1) == [2]",
    "msg.headers.all(k, k != '')", "msg.headers.exists(k, k == 'a')", "[1].exists_one(x, x == 1)",
    "[1]. // a comment\n map \t (x\n,x) == []", "[1] // .map(x, x)\n.\r\n map//\n(x, x)",
    "has(msg.headers.a) && [1].map(x, [1].map(y, [1].map(z, z))) == []",
    "{'headers': {'map': [1].map(map, map)}}", "[has(msg.headers.a)].all(all, all)",
]  # fmt: skip
UNKNOWN_HERE = [
    "[1].map(i, x, x)", "[1].all(i, x, x == 1)", "[1].transformList(i, x, x)",
    "{'a': 1}.transformMap(k, v, v)", "cel.bind(x, 1, x)", "cel.block([1], cel.index(0))",
    "msg.?headers", "msg[?'headers']", "[?msg.headers]", "optional.of(1)",
    "'abc'.replace('a', 'bb')", "'%s'.format(['x'])", "math.greatest(1, 2)",
    "base64.encode(b'x')", "lists.range(1000000)", "sets.contains([1], [1])",
    "google.protobuf.Value{string_value: 'a'}", "google.protobuf.NullValue.NULL_VALUE",
    "[1].\u2028map(x, x)", "[1].m\u0430p(x, x)", "__import__('os')", "\0true", "true\0",
]  # fmt: skip
TOO_DEEP = [
    "(" * 490 + "1" + ")" * 490, "[" * 490 + "]" * 490, "{1:" * 240 + "1" + "}" * 240,
    "f(" * 330 + ")" * 330, "msg" + ".a" * 400, "msg" + "[0]" * 300, "1" + "+1" * 400,
    "'a'" + "+'a'" * 200, "true?" * 100 + "1" + ":1" * 100, "-(" * 330 + "1" + ")" * 330,
    "[" * 1000, "(" * 1000, "!(" * 500, "'" * 999,
]  # fmt: skip
TOO_COSTLY = [
    "msg.body.matches('(x+x+)+y') || " * 20 + r"msg.body.matches('\\pL{5}')",
    r"msg.body.matches('(\\pL{100}){5}')", "msg.body.matches('((a{0,100}){0,100}b)*')",
    "msg.body.matches('(?i)(((((k{9}){9}){9}){9}){9})')", r"msg.body.matches('\\Q{\\E{1000}')",
    "msg.body.matches(msg.headers.pattern)", "msg.body.matches('a' + 'b')",
    "matches(msg.body, msg.body)", "msg.body.matches('(')", r"msg.body.matches('(a)\\1')",
    "msg.body.matches('(?=a)')", "now.getHours(msg.headers.zone) == 1",
    "now.getHours('/dev/stdin') == 1", "now.getHours('../../etc/hostname') == 1",
    "now.getHours('file:/etc/hostname') == 1", "now.getDate('libc:localtime') == 1",
    "msg == " + "1" * 1000, "'" + "a" * 999 + "'",
]  # fmt: skip
# Python with n, the units that the expression may look at.
LONG = "'a' * (n - 2000)"
MIXED = "''.join(__import__('random').Random(1).choices('ab', k=n - 2000))"
VALUES = "[0] * ((n - 3000) // 128)"
AT_THE_LIMIT = [
    ("msg.body == 'x'", LONG), ("size(msg.body) > 1", "chr(0x1d11e) * (n // 4 - 500)"),
    ("{'body': msg.body}", LONG), ("{'body': msg.body}", "b'a' * (n - 2000)"),
    ("{'body': msg.body}", "[{'a': [1]}] * ((n - 3000) // 514)"),
    ("{'body': [" + ",".join(["msg.body"] * 100) + "]}", LONG),
    ("{'body': [" + ",".join(["msg.body"] * 100) + "]}", VALUES),
    ("{'state': {" + ",".join(f"'{n}': state" for n in range(30)) + "}}", VALUES),
    ("size(" + "+".join(["(" + "+".join(["msg.body"] * 9) + ")"] * 9) + ")", LONG),
    ("msg.body.a == msg.body.b", "{k: [{'a': i} for i in range((n - 3000) // 780)] for k in 'ab'}"),
    ("msg.body.a in msg.body.b", "{'a': 'a' * (n // 2 - 2000), 'b': ['a' * (n // 2 - 2000)]}"),
    ("msg.body == 1", "{str(i): 0 for i in range((n - 3000) // 262)}"),
    (" || ".join(f"msg.body == '{number}'" for number in range(40)), LONG),
    ("msg.body.contains('" + "a" * 900 + "b')", LONG),
    ("msg.body.a.contains(msg.body.b)", "{'a': 'a' * (n // 2), 'b': 'a' * (n // 4) + 'b'}"),
    ("(msg.body + msg.body).contains(msg.body + 'b')", LONG),
    (" || ".join(["msg.body.contains('aaaaaaaaab')"] * 25), LONG),
    ("duration(msg.body) > duration('1s')", "'1h' * (n // 2 - 1000)"),
    ("double(msg.body) > 1.0", "'9' * (n - 2000)"),
    ("string(bytes(string(bytes(msg.body)))) == 'x'", LONG), ("msg.body.matches('(a*)*c')", MIXED),
    ("msg.body.matches('(x+x+)+y')", "'x' * (n - 2000)"),
    ("msg.body.matches('(a|aa)+$')", "'a' * (n - 2000) + 'b'"),
    ("msg.body.matches('(a|b)*a(a|b){20}c')", MIXED),
    ("msg.body.matches('[ab]*[ab]*[ab]*[ab]*[ab]*c')", MIXED),
    (r"msg.body.matches('(?i)\\pLa')", MIXED),
    (" || ".join(["msg.body.matches('a[ab]{9}c')"] * 20), MIXED),
]  # fmt: skip


def wrong(cases: list[tuple[str, str]], outcome: str, text: str = "") -> list[dict[str, Any]]:
    """Return the results with another outcome, or over the limits of time or memory.

    Each case runs in its own process, and again up to twice if its result is wrong: other programs
    may have slowed it down.
    """

    def is_right(result: dict[str, Any]) -> bool:
        said = result["text"].startswith(text) and result["outcome"] == outcome
        return said and result["seconds"] < SECONDS and result["bytes"] < BYTES

    results: list[dict[str, Any]] = []
    for _ in range(3):
        results = [result for result in measured(cases) if not is_right(result)]
        cases = [case for case in cases if any(list(case) == each["case"] for each in results)]
        if not cases:
            break
    return results


def measured(cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    hostile = ("-W", "error", "-m", "tests.exchanges.hostile")
    ran = run_python(*hostile, input=json.dumps(cases), timeout=500)
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == len(cases)
    return [{"case": list(case), **each} for case, each in zip(cases, results, strict=True)]


@pytest.mark.timeout(600)
def test_refusals_are_fast_and_nothing_crashes():
    expressions = LOOPS + UNKNOWN_HERE + TOO_DEEP + TOO_COSTLY
    assert wrong([(expression, "None") for expression in expressions], "refused") == []


@pytest.mark.timeout(600)
def test_every_admitted_expression_ends_within_time_and_memory():
    assert wrong(AT_THE_LIMIT, "answered") == []
    no_time = ("timestamp(msg.body) == timestamp(0)", "'9' * (n - 2000)")
    assert wrong([no_time], "failed", "String to Timestamp conversion failed") == []


@pytest.mark.timeout(600)
def test_more_than_an_expression_may_look_at_fails_soon():
    sizes = ("'a' * n", "b'a' * n", "[0] * (n // 128)", "'a' * 64_000_000", "[0] * 1_000_000")
    too_much = [("msg.body == 1", body) for body in sizes]
    assert wrong(too_much, "failed", "limit: the expression may read 4,194,304 units") == []


def test_objects_functions_and_loops_are_refused_as_such():
    with pytest.raises(SelectorError, match="no protobuf objects"):
        Selector("google.protobuf.Duration{seconds: 1}")
    message, often = ExpressionTree("name", "msg"), ExpressionTree("constant", 10**9)
    with pytest.raises(SelectorError, match="the function repeat is not supported"):
        find_max_units(ExpressionTree("call", "repeat", (message, often)))
    for expression in LOOPS:
        with pytest.raises(SelectorError, match="must not loop"):
            Selector(expression)

    assert asked("has(msg.headers.map) && !has(msg.headers.filter)", map="all").is_accepted
    assert asked("'.map(x, x)' == '.' + 'map(x, x)' // .filter(x, x)").is_accepted
    longest = "true" + " " * 996
    assert asked(longest).is_accepted
    with pytest.raises(SelectorError, match="at most 1,000 characters, this one has 1,001"):
        Selector(longest + " ")


def test_the_limit_is_that_of_the_parts_looked_at():
    body = {"kind": "ab" * 5, "load": "x" * 10_000_000}
    assert not asked("msg.body.kind.matches('^(a|b){9}$')", body).error
    error = asked("msg.body.load.matches('^(a|b){9}$')", body).error
    assert (error or "").startswith("limit: the expression may read")
    # A value that is only tested for presence may have any size.
    expression = "has(msg.body) && has(msg.headers.a) && !has(msg.headers.b)"
    for body in ("x" * 10_000_000, b"x" * 10_000_000, [0] * 100_000, 10**30):
        assert asked(expression, body, a=body).is_accepted
        assert asked("has(msg.body.a)", body).error == "Applying SELECT to non-message type"


def test_state_cannot_grow_from_destination_to_destination():
    double = "{'state': {'s': has(state.s) ? state.s + state.s : 'x'}}"
    error = routed(*[double] * 40).verdicts[-1].error
    assert (error or "").startswith("limit: the expression may read")


def test_a_pattern_is_never_taken_for_smaller_than_the_program_re2_makes():
    sizes = {
        r"^(it|de|fr)$": 10, r"\pL": 1200, r"(?i)[Ā-Ỿ]": 46, r"a{1000}": 1004,
        r"(a?){1000}": 4004, r"(?:a{2,5}){3,}": 29, r"[^\x{20}\x{100}\x{1000}\x{20000}]": 29,
        r"\pL(?s){3}": 3600, r"[]a]": 6, r"[^]a]{20}": 164, r"(?i)straße": 16,
    }  # fmt: skip
    for pattern, size in sizes.items():
        assert size <= program_size(pattern) <= MAX_PROGRAM_SIZE, pattern
    for pattern in (r"\pL{10}", "((a{30}){30}){30}", "(?i)" + "ž{20}" * 80):
        with pytest.raises(SelectorError, match="too large: use fewer repetitions"):
            program_size(pattern)
    # The classes of a pattern with \Q are unknown.
    with pytest.raises(SelectorError, match="must not quote"):
        program_size(r"\Q[\E\pL{5}\Q]\E")


def test_a_pattern_made_of_anything_is_measured_or_refused():
    random = Random(1)  # noqa: S311
    for _ in range(2000):
        pattern = "".join(random.choices("ab[]^()|{}?*+\\:-.9,é\nQpPdi<>", k=12))
        try:
            assert program_size(pattern) > 0
        except SelectorError as refused:
            assert "pattern" in refused.text  # noqa: PT017
