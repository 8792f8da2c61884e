"""What it takes to begin: opening a node, importing the package, and the memory of a node."""

from __future__ import annotations

import asyncio
import compileall
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import psycopg

from benchmarks.results import Findings, Row
from project.postgres import Server
from psqlmessages import AsyncNode, Node

ROOT = Path(__file__).parents[1]
OPENINGS, QUICK_OPENINGS = 20, 10
IMPORTS, QUICK_IMPORTS = 5, 2
NODES = 20
RULE = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES (current_user, 'STARTING.*', 'Topic', 'STARTING', 'RW', 60)
"""
IMPORT = """
from time import perf_counter
begun = perf_counter()
{}
print(perf_counter() - begun)
"""
MEMORY = """
import sys
from pathlib import Path
from psqlmessages import Node

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

nodes = [Node(f"STARTING.{{number}}", sys.argv[1]) for number in range({0})]
before = resident()
for node in nodes:
    node.open()
    node.topic_listen("STARTING")
print((resident() - before) / {0})
for node in nodes:
    node.close()
"""
IMPORTED = "from psqlmessages import Node"
MEGABYTE = 1_000_000


def measure(server: Server, rounds: int, *, is_quick: bool) -> Findings:
    """Measure the rows of beginning."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(RULE)
    count = QUICK_OPENINGS if is_quick else OPENINGS
    opened, connected = openings(server.url(), rounds, count)
    findings = Findings()
    findings.rows.append(
        Row.of(
            "calls: open a node to connect and LISTEN",
            "Node opened", "psycopg.connect and LISTEN", "ms", opened, connected,
            reach=3, is_at_most=True,
        )
    )  # fmt: skip
    if not is_quick:
        opened, connected = asyncio.run(async_openings(server.url(), rounds, count))
        findings.rows.append(
            Row.of(
                "calls: open an AsyncNode to connect and LISTEN",
                "AsyncNode opened", "AsyncConnection.connect and LISTEN", "ms", opened, connected,
                reach=3, is_at_most=True,
            )
        )  # fmt: skip
    findings.rows += imports(rounds, QUICK_IMPORTS if is_quick else IMPORTS, is_quick=is_quick)
    findings.rows.append(memory(server.url(), 1 if is_quick else rounds))
    return findings


def openings(dsn: str, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds until a node is ready, and until a bare session listens; medians by rounds."""

    def by_node() -> Callable[[], None]:
        node = Node("STARTING.ONE", dsn)
        node.open()
        return node.close

    def by_hand() -> Callable[[], None]:
        connection = psycopg.connect(dsn, autocommit=True)
        connection.execute("LISTEN starting")
        return connection.close

    def timed(opening: Callable[[], Callable[[], None]]) -> float:
        begun = perf_counter()
        close = opening()
        taken = perf_counter() - begun
        close()
        return taken * 1000

    timed(by_node), timed(by_hand)
    pairs = [[(timed(by_node), timed(by_hand)) for _ in range(count)] for _ in range(rounds)]
    return medians(pairs)


async def async_openings(dsn: str, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Do as :func:`openings`, on asyncio."""

    async def by_node() -> Callable[[], Awaitable[None]]:
        node = AsyncNode("STARTING.ONE", dsn)
        await node.open()
        return node.close

    async def by_hand() -> Callable[[], Awaitable[None]]:
        connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        await connection.execute("LISTEN starting")
        return connection.close

    async def timed(opening: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> float:
        begun = perf_counter()
        close = await opening()
        taken = perf_counter() - begun
        await close()
        return taken * 1000

    await timed(by_node), await timed(by_hand)
    pairs = [
        [(await timed(by_node), await timed(by_hand)) for _ in range(count)] for _ in range(rounds)
    ]
    return medians(pairs)


def medians(pairs: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Make the medians of each round of what was measured in pairs."""
    ours = [median(mine for mine, _ in of_round) for of_round in pairs]
    return ours, [median(theirs for _, theirs in of_round) for of_round in pairs]


def imports(rounds: int, count: int, *, is_quick: bool) -> list[Row]:
    """Compare imports in interpreters that have imported nothing yet.

    What pip installs is compiled, so this package is too, whatever PYTHONDONTWRITEBYTECODE says.
    """
    compileall.compile_dir(ROOT / "psqlmessages", quiet=1)
    whats = [IMPORTED] if is_quick else [IMPORTED, IMPORTED.replace("Node", "AsyncNode")]
    statements = [*whats, "import psycopg"]
    for statement in statements:
        import_seconds(statement)
    found: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(rounds):
        turns = [
            [import_seconds(statement) * 1000 for statement in statements] for _ in range(count)
        ]
        for statement, times in zip(statements, zip(*turns, strict=True), strict=True):
            found[statement].append(median(times))
    return [
        Row.of(
            f"calls: {what} to import psycopg", what, "import psycopg", "ms",
            found[what], found["import psycopg"], reach=1.3, is_at_most=True,
            note="psycopg's own import is part of both",
        )
        for what in whats
    ]  # fmt: skip


def import_seconds(statement: str) -> float:
    """Import in a fresh interpreter."""
    return float(output(IMPORT.format(statement)))


def memory(dsn: str, rounds: int) -> Row:
    """Measure how much a process grows by each node, which listens."""
    grown = [float(output(MEMORY.format(NODES), dsn)) / MEGABYTE for _ in range(rounds)]
    return Row.of(
        "calls: memory of a node", "memory of a Node", "the bound", "MB", grown, [5] * rounds,
        reach=1, is_at_most=True, note=f"the mean of {NODES} in one process",
    )  # fmt: skip


def output(program: str, *arguments: str) -> str:
    """Run a program in a fresh interpreter: what it prints."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
