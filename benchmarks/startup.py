"""Start-up: the time to open a node and to import the package, and the memory of a node."""

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
IMPORT_NODE = "from psqlmessages import Node"
MEGABYTE = 1_000_000


def measure(server: Server, rounds: int, *, is_quick: bool) -> Findings:
    """Measure opening, importing and memory."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(RULE)
    count = QUICK_OPENINGS if is_quick else OPENINGS
    opened, connected = openings(server.url(), rounds, count)
    findings = Findings()
    findings.rows.append(
        Row.of(
            "calls: open a node to connect and LISTEN",
            "open a Node", "psycopg.connect and LISTEN", "ms", opened, connected,
            goal=3, is_lower_better=True,
        )
    )  # fmt: skip
    if not is_quick:
        opened, connected = asyncio.run(async_openings(server.url(), rounds, count))
        findings.rows.append(
            Row.of(
                "calls: open an AsyncNode to connect and LISTEN",
                "open an AsyncNode", "AsyncConnection.connect and LISTEN", "ms", opened, connected,
                goal=3, is_lower_better=True,
            )
        )  # fmt: skip
    findings.rows += imports(rounds, QUICK_IMPORTS if is_quick else IMPORTS, is_quick=is_quick)
    findings.rows.append(memory(server.url(), 1 if is_quick else rounds))
    return findings


def openings(dsn: str, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Return the median ms of each round to open a Node, and a psycopg session that listens."""

    def open_node() -> Callable[[], None]:
        node = Node("STARTING.ONE", dsn)
        node.open()
        return node.close

    def open_session() -> Callable[[], None]:
        connection = psycopg.connect(dsn, autocommit=True)
        connection.execute("LISTEN starting")
        return connection.close

    def time(opening: Callable[[], Callable[[], None]]) -> float:
        begun = perf_counter()
        close = opening()
        taken = perf_counter() - begun
        close()
        return taken * 1000

    time(open_node), time(open_session)
    pairs = [[(time(open_node), time(open_session)) for _ in range(count)] for _ in range(rounds)]
    return medians(pairs)


async def async_openings(dsn: str, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Do the same as `openings`, with asyncio."""

    async def open_node() -> Callable[[], Awaitable[None]]:
        node = AsyncNode("STARTING.ONE", dsn)
        await node.open()
        return node.close

    async def open_session() -> Callable[[], Awaitable[None]]:
        connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        await connection.execute("LISTEN starting")
        return connection.close

    async def time(opening: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> float:
        begun = perf_counter()
        close = await opening()
        taken = perf_counter() - begun
        await close()
        return taken * 1000

    await time(open_node), await time(open_session)
    pairs = [
        [(await time(open_node), await time(open_session)) for _ in range(count)]
        for _ in range(rounds)
    ]
    return medians(pairs)


def medians(rounds: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Return the medians of our times and of the peer's in each round of pairs."""
    ours = [median(mine for mine, _ in pairs) for pairs in rounds]
    return ours, [median(theirs for _, theirs in pairs) for pairs in rounds]


def imports(rounds: int, count: int, *, is_quick: bool) -> list[Row]:
    """Compare imports in new interpreters.

    Compile this package first, because pip compiles the packages that it installs.
    """
    compileall.compile_dir(ROOT / "psqlmessages", quiet=1)
    ours = [IMPORT_NODE] if is_quick else [IMPORT_NODE, IMPORT_NODE.replace("Node", "AsyncNode")]
    statements = [*ours, "import psycopg"]
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
            f"calls: {statement} to import psycopg", statement, "import psycopg", "ms",
            found[statement], found["import psycopg"], goal=1.3, is_lower_better=True,
            note="both include the import of psycopg",
        )
        for statement in ours
    ]  # fmt: skip


def import_seconds(statement: str) -> float:
    """Run an import in a new interpreter; return the seconds that it took."""
    return float(run_program(IMPORT.format(statement)))


def memory(dsn: str, rounds: int) -> Row:
    """Measure how much memory a process needs for each listening node."""
    grown = [float(run_program(MEMORY.format(NODES), dsn)) / MEGABYTE for _ in range(rounds)]
    return Row.of(
        "calls: memory of a node", "memory of a Node", "the limit", "MB", grown, [5] * rounds,
        goal=1, is_lower_better=True, note=f"the mean of {NODES} in one process",
    )  # fmt: skip


def run_program(program: str, *arguments: str) -> str:
    """Run a program in a new interpreter; return its output."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
