"""Giant arguments: megabytes in a call make no backend grow beyond a few times that."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.sql.public import public_functions
from tests.sql.test_random_calls import HEADERS, IDENTS, LEASES, QUEUES, TOKENS, TOPICS

BYTES = 250_000
GIANTS = [sign * (BYTES // len(sign.encode())) for sign in ("x", '{"a":', "🐘")]
# Some ten copies, beside what a backend has anyway.
MOST_KILOBYTES = 60_000
FITTING: dict[str, Any] = {
    "topic": TOPICS[0], "query": None, "headers": HEADERS[1], "queue": QUEUES[0],
    "source": QUEUES[0], "token": TOKENS[0], "enc": None, "body": "x", "reason": "x",
    "leases": LEASES[0], "elements": LEASES[0], "failed": LEASES[0], "copy_of": LEASES[0],
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "integer": 60, "bigint": 1, "double precision": 0.0, "timestamp with time zone": None,
    "boolean": False, "uuid": None, "json": None,
}  # fmt: skip


def fitting(name: str, kind: str) -> Any:
    """Give a parameter a value that gets far into a function."""
    plain = kind.removesuffix("[]")
    value = FITTING.get(name, IDENTS[0]) if plain == "text" else OTHERS[plain]
    return [value] if kind.endswith("[]") else value


def peak_kilobytes(program: Program) -> int:
    """Read how much memory the backend of a connection ever had, the shared part left out."""
    status = Path(f"/proc/{program.connection.info.backend_pid}/status").read_text()
    amount = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
    return amount["VmHWM"] - amount["RssShmem"]


@pytest.mark.parametrize(
    "part",
    # Each giant in each place takes a minute; every day a fifth of them.
    [5, pytest.param(1, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])],
)
@pytest.mark.parametrize("role", ["hostile", "user1"])
def test_giant_arguments_cost_no_more_than_a_few_copies(world: World, role: str, part: int) -> None:
    world.rules(
        "user1 N1 Topic T1 RW 5", "user1 N1 Topic x* RW 5", "user1 N1 Rpc N1 W 5",
        "user1 N1 Queue Q1 RW 5", "user1 N* Topic * O 5",
    )  # fmt: skip
    worst, program = (0, ""), world.program(role, is_fresh=True)
    program.execute("SET statement_timeout = '60s'")
    calls = (
        (function, name, kind, giant)
        for function in public_functions(world).values()
        for name, kind in function.parameters.items()
        if kind.removesuffix("[]") in {"text", "json"}
        for giant in GIANTS
    )
    for function, name, kind, giant in islice(calls, 0, None, part):
        program.call("init", "N1")
        arguments = {n: fitting(n, k) for n, k in function.parameters.items()}
        arguments[name] = [giant] if kind.endswith("[]") else giant
        if kind == "json":
            arguments[name] = f'{{"T1":{giant[:1000]!r}}}'.replace("'", '"')
        where = f"{function.name}({name} = {giant[:5]}...)"
        try:
            number = program.call(function.name, *arguments.values())["Err"]
        except psycopg.errors.InvalidTextRepresentation:
            assert kind == "json", where
            continue
        assert number == "0" or number in function.errors, (where, number)
        worst = max(worst, (peak_kilobytes(program), where))
    print(worst)
    assert 0 < worst[0] < MOST_KILOBYTES, worst
