"""Random, hostile and giant arguments: a documented answer and nothing else, and little memory."""

import json
import random
import re
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.sql.conftest import World
from tests.sql.public import Function, public_functions

HOSTILE = [
    "", " ", "   ", "*", "**", "N*", "'", '"', "\\", "$$", "%", "%s %I %L %", "$1", "$topic",
    "x'; DROP SCHEMA messages; --", "\n", "\r\n", "\t", "\x01\x1f\x7f", "a\nb", "\u202e", "\u200f",
    "e\u0301", "\u05de\u05e9\u05ea", "\u0645\u0631\u062d\u0628\u0627", "漢字", "🐘", "\ufffe",
    "x" * 100, "x" * 101, "🐘" * 100, "\x01" * 100, "x" * 10_000, "{}", "[]", "null", "0", "-1",
    "9" * 30, "NaN", "b64", "json", "JSON", "true",
]  # fmt: skip
IDENTS = ["N1", "N2", "N3", "nobody"]
TOPICS = ["T1", "T2", "T3", "TEAM"]
QUEUES = ["Q1", "Q2", "Q3", "__no_route__"]
LEASES = [
    "1.00000000-0000-0000-0000-000000000000", "1", "2", "3", "9" * 19,
    "x.00000000-0000-0000-0000-000000000000", "1.00000000-0000-0000-0000-00000000000g",
]  # fmt: skip
HEADERS = [None, "{}", '{"a":1}', '{"x-hop-count":"3"}', "[]", '{"a":1e99999}', '{"x":"\\u0000"}']
TIMES = [None, None, "2020-01-01", "2200-01-01", "infinity", "-infinity", "0001-01-01 BC"]
NUMBERS = [None, 0.0, 0.5, 60.0, -1.0, 1e300, float("nan"), float("inf")]
PAYLOADS = [
    '{"Dkey":null}', '{"Dkey":1}', '{"Dkey":{}}', '{"Dkey":""}', '{"Dkey":"\\u0000"}',
    '{"Dkey":"\\ud800"}', '{"Dkey":"1.0.1.' + "0" * 32 + '"}', '{"dkey":"x"}', '{"Dkey":"x"',
    '{"Dkey":"10.20.999999999999999.' + "0" * 32 + '"}', '"x"', "[" * 100_000, "{}\n", "\n{}",
    '{"Dkey":"' + "x" * 10_000 + '"}', '{"Evt":"crash","Ident":"N1"}', '{"Evt":1,"Topic":[]}',
    '{"Evt":"crash"}', '{"Evt":"x","Ident":"N1","Topic":"T1"}', '{"Evt":"\\u0000","Ident":"x"}',
    '{"a":' * 50_000,
]  # fmt: skip
TOKENS = [
    "T", "0" * 32 + " 5 T", "1." + "0" * 32 + " 5 T", "f" * 32 + " 999999999 x", "x y z",
    "0" * 32 + " 5 ", " ", "1" * 1000, "1" * 1001, "\x01" * 1000, "🐘" * 250, "🐘" * 251,
    "9" * 18 + "." + "0" * 32 + " 1 " + "x" * 1000, "0" * 32 + " 9999999999 T",
]  # fmt: skip
BODIES = ["", "x", "x" * 7_900, "x" * 8_000, "x" * 9_000, "🐘" * 2_500, "\x01" * 1_400]
# Of the types that are no text.
DRAWN: dict[str, list[Any]] = {
    "integer": [60, 60, 60, 1000, 1, 0, -1, 2**31 - 1, None],
    "bigint": [1, 2, 3, 0, -1, 2**63 - 1, None], "double precision": NUMBERS,
    "timestamp with time zone": TIMES, "boolean": [True, False, None],
    "uuid": [UUID(int=1), UUID(int=2), None],
    "json": [None, None, "{}", '{"T1":5}', '{"T1":-1}', '{"T1":"x"}', "[]", "7", '{"T1":1e99}'],
}  # fmt: skip


def any_of(dice: random.Random, received: list[str], parameter: str) -> str | None:
    """Draw a value for a parameter: what fits, mostly; what was received; or anything."""
    fitting = {
        "topic": TOPICS, "topics": [*TOPICS, "T*", "*"], "stagings": [str(UUID(int=1)), "x"],
        "query": ["q", None],
        "queue": QUEUES, "source": QUEUES, "queues": [*QUEUES, None], "headers": HEADERS,
        "leases": LEASES, "elements": LEASES, "failed": LEASES, "copy_of": LEASES,
        "encs": [None, "b64", "x"], "bodies": [*BODIES, None], "body": BODIES,
        "token": TOKENS
        + [json.loads(text.partition("\n")[0]).get("Token", "none") for text in received],
        "event": PAYLOADS + received,
        "enc": [None, "b64", "json", "", "utf8"],
        "param": BODIES, "reason": BODIES,
        "message": BODIES + PAYLOADS + received,
        "payload": BODIES,
    }  # fmt: skip
    pool = dice.choices([fitting.get(parameter, IDENTS), HOSTILE, PAYLOADS], [10, 2, 0.3])[0]
    return None if dice.random() < 0.03 else dice.choice(pool)


class Fuzzer:
    """A role that calls public functions with random arguments, and checks each answer."""

    def __init__(self, world: World, role: str, seed: int) -> None:
        self.program = world.program(role)
        self.program.execute("SET synchronous_commit = off")
        self.functions = list(public_functions(world).values())
        self._ahead: list[Function] = []
        self.dice = random.Random(seed)  # noqa: S311
        self.received: list[str] = []
        # How often each function did what it was asked to.
        self.reached: Counter[str] = Counter()

    def step(self) -> None:
        if not self._ahead:
            self._ahead = self.dice.sample(self.functions, len(self.functions))
        function = self._ahead.pop()
        arguments = [self.argument(*parameter) for parameter in function.parameters.items()]
        number = self.program.call(function.name, *arguments)["Err"]
        assert number == "0" or number in function.errors, (function.name, arguments, number)
        self.reached[function.name] += number == "0"
        if self.dice.random() < 0.02:
            self.received = [*self.received, *self.program.payloads()][-50:]

    def argument(self, name: str, kind: str) -> Any:
        if kind.endswith("[]"):
            element_kind = kind.removesuffix("[]")
            return [self.argument(name, element_kind) for _ in range(self.dice.randint(0, 3))]
        if kind == "text":
            return any_of(self.dice, self.received, name)
        # A null without a type fits a duration in seconds and one as an interval.
        return self.dice.choice([v for v in DRAWN[kind] if v is not None or name != "duration"])


@pytest.mark.parametrize(
    "part",
    # Each value in each function is ten thousand calls; every day a sixteenth of them.
    [16, pytest.param(1, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])],
)
def test_every_hostile_name_gets_a_documented_answer(world: World, part: int):
    world.rules("user1 N Topic T RW 5")
    functions = public_functions(world).values()
    for program in world.program("hostile"), world.node("user1", "N"):
        calls = product([*HOSTILE, *PAYLOADS, *TOKENS, None], functions)
        for name, function in islice(calls, 0, None, part):
            # All parameters that are text get the same value.
            arguments = [
                fitting(name, kind) if kind.removesuffix("[]") != "text"
                else [name] if kind.endswith("[]") else name
                for kind in function.parameters.values()
            ]  # fmt: skip
            number = program.call(function.name, *arguments)["Err"]
            assert number == "0" or number in function.errors, (function.name, name, number)


def test_the_longest_names_and_token_of_control_characters_still_fit(world: World):
    name, token = "\x01" * 100, "\x01" * 1000
    world.rule("user1", name, "Topic", name, "RW", 2_000_000)
    world.rule("user1", name, "Rpc", name, "W", 2_000_000)
    program = world.node("user1", name)
    program.ok("topic_listen", name)
    program.ok("topic_notify", name)
    program.ok("topic_send", name, "x" * 9000, token, "json")
    program.ok("topic_send_many", name, ["x"], token, "json")
    program.ok("rpc", name, token, "x" * 9000, "json")
    for header in program.headers(3):
        answer = "return_error" if header["Type"] == "Rpc" else "return"
        program.ok(answer, name, header["Token"], "x" * 9000)
        assert program.headers(1)[0]["Token"] == token


BYTES = 250_000
GIANTS = [sign * (BYTES // len(sign.encode())) for sign in ("x", '{"a":', "🐘")]
# Some ten copies, beside what a backend has anyway.
MAX_KILOBYTES = 60_000
OTHERS: dict[str, Any] = {
    "integer": 60, "bigint": 5, "double precision": 5.0, "boolean": True, "json": '{"T1":5}',
    "timestamp with time zone": "2020-01-01", "uuid": UUID(int=5),
}  # fmt: skip
FITTING: dict[str, Any] = {
    "topic": TOPICS[0], "query": None, "headers": HEADERS[1], "queue": QUEUES[0],
    "source": QUEUES[0], "token": TOKENS[0], "enc": None, "body": "x", "reason": "x",
    "leases": LEASES[0], "elements": LEASES[0], "failed": LEASES[0], "copy_of": LEASES[0],
}  # fmt: skip


def fitting(name: str | None, kind: str) -> Any:
    """Give a parameter a value that gets far into a function."""
    plain = kind.removesuffix("[]")
    value = FITTING.get(str(name), IDENTS[0]) if plain == "text" else OTHERS[plain]
    return [value] if kind.endswith("[]") else value


@pytest.mark.parametrize(
    "part",
    # Each giant in each place takes a minute; every day a tenth of them.
    [10, pytest.param(1, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])],
)
@pytest.mark.parametrize("role", ["hostile", "user1"])
def test_giant_arguments_cost_no_more_than_a_few_copies(world: World, role: str, part: int):
    world.rules(
        "user1 N1 Topic T1 RW 5", "user1 N1 Topic x* RW 5", "user1 N1 Rpc N1 W 5",
        "user1 N1 Queue Q1 RW 5", "user1 N* Topic * O 5",
    )  # fmt: skip
    program = world.program(role, is_fresh=True)
    program.execute("SET statement_timeout = '60s'")
    functions = public_functions(world).values()
    parameters = ((each, *item) for each in functions for item in each.parameters.items())
    texts = [(each, name) for each, name, kind in parameters if kind.removesuffix("[]") == "text"]
    calls = ((*text, giant) for text in texts for giant in GIANTS)
    for function, name, giant in islice(calls, 0, None, part):
        program.call("init", "N1")
        arguments = {key: fitting(key, kind) for key, kind in function.parameters.items()}
        arguments[name] = [giant] if isinstance(arguments[name], list) else giant
        number = program.call(function.name, *arguments.values())["Err"]
        assert number == "0" or number in function.errors, (function.name, name, giant[:5], number)
    status = Path(f"/proc/{program.connection.info.backend_pid}/status").read_text()
    kilobytes = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
    assert 0 < kilobytes["VmHWM"] - kilobytes["RssShmem"] < MAX_KILOBYTES
