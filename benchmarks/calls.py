"""RPC calls between processes; opening a node; importing the package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from importlib.metadata import version as package_version
from statistics import quantiles
from time import perf_counter
from typing import Any

from benchmarks import call_sides, startup
from benchmarks.brokers import PeerMissing, run_nats, version
from benchmarks.databases import create_database
from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server
from project.postgres import Server

BODY = "x" * 1000
# Turns are short, so that a disturbance of the machine affects all sides.
TURNS, CALLS, QUICK_CALLS, WARM_UP = 10, 50, 20, 3
QUICK_ROUNDS = 3
RULES = [
    (call_sides.CALLER, "Rpc", call_sides.ANSWERER, "W"),
    (call_sides.ANSWERER, "Rpc", call_sides.CALLER, "W"),
]
NODE, ASYNC_NODE, NATS = "Node.call", "AsyncNode.call", "nats-py request"
NOTIFY, ASYNC_NOTIFY = "two NOTIFY hops by psycopg", "two NOTIFY hops by psycopg's AsyncConnection"
NOTIFY_PEERS = {NODE: NOTIFY, ASYNC_NODE: ASYNC_NOTIFY}
# Takes the number of calls, and returns the seconds of each.
Side = Callable[[int], list[float]]
# The seconds of each call, by side and round.
Times = dict[str, list[list[float]]]


def measure(options: Options) -> Findings:
    """Measure calls, opening and importing."""
    findings = Findings(versions={"psycopg": package_version("psycopg")})
    rounds = min(options.rounds, QUICK_ROUNDS) if options.is_quick else options.rounds
    with temporary_server() as server:
        with asyncio.Runner() as runner, ExitStack() as stack:
            sides = postgres_sides(server, stack, runner) | nats_side(stack, runner, findings)
            times = measure_calls(sides, rounds, QUICK_CALLS if options.is_quick else CALLS)
        # The 99th percentile of a few calls is random.
        findings.rows += compare(times, (50,) if options.is_quick else (50, 99))
        findings.add(startup.measure(server, rounds, is_quick=options.is_quick))
    return findings


def postgres_sides(server: Server, stack: ExitStack, runner: asyncio.Runner) -> dict[str, Side]:
    """Open our sides and their psycopg peers, each pair in its own database."""
    sides = call_sides
    a, b = create_database(server, "a", RULES), create_database(server, "b")
    c, d = create_database(server, "c", RULES), create_database(server, "d")
    return {
        NODE: sync_side(stack, sides.answer_with_node, sides.node_call, a),
        NOTIFY: sync_side(stack, sides.answer_with_psycopg, sides.psycopg_call, b),
        ASYNC_NODE: async_side(
            stack, runner, sides.answer_with_async_node, sides.async_node_call, c
        ),
        ASYNC_NOTIFY: async_side(
            stack, runner, sides.answer_with_async_psycopg, sides.async_psycopg_call, d
        ),
    }


def nats_side(stack: ExitStack, runner: asyncio.Runner, findings: Findings) -> dict[str, Side]:
    """Start a NATS server with two clients, if it is installed."""
    try:
        url = f"nats://127.0.0.1:{stack.enter_context(run_nats())}"
        findings.versions["NATS"] = version("nats-server")
    except PeerMissing as error:
        findings.left_out.append(str(error))
        return {}
    findings.versions["nats-py"] = package_version("nats-py")
    return {NATS: async_side(stack, runner, call_sides.answer_with_nats, call_sides.nats_call, url)}


def sync_side(stack: ExitStack, answer: Any, open_caller: Any, address: str) -> Side:
    """Start an answering process and a caller."""
    stack.enter_context(call_sides.answering(answer, address))
    call = open_caller(address, stack)

    def call_many(count: int) -> list[float]:
        times = []
        for _ in range(count):
            begun = perf_counter()
            call(BODY)
            times.append(perf_counter() - begun)
        return times

    return call_many


def async_side(
    stack: ExitStack, runner: asyncio.Runner, answer: Any, open_caller: Any, address: str
) -> Side:
    """Start an answering process and an asynchronous caller."""
    stack.enter_context(call_sides.answering(answer, address))
    call = stack.enter_context(async_caller(runner, open_caller, address))

    async def call_many(count: int) -> list[float]:
        times = []
        for _ in range(count):
            begun = perf_counter()
            await call(BODY)
            times.append(perf_counter() - begun)
        return times

    return lambda count: runner.run(call_many(count))


@contextmanager
def async_caller(runner: asyncio.Runner, open_caller: Any, address: str) -> Iterator[Any]:
    """Open a caller in the runner's event loop, and close it there."""
    stack = AsyncExitStack()
    try:
        yield runner.run(open_caller(address, stack))
    finally:
        runner.run(stack.aclose())


def measure_calls(sides: Mapping[str, Side], rounds: int, calls: int) -> Times:
    """Let the sides call in turns; return the seconds of each call by side and round."""
    times: Times = {name: [[] for _ in range(rounds)] for name in sides}
    for turn in range(rounds * TURNS):
        order = list(sides.items())
        for name, side in reversed(order) if turn % 2 else order:
            side(WARM_UP)
            times[name][turn // TURNS] += side(calls)
    return times


def compare(times: Times, percents: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each pair of sides and each percentile."""
    percentiles = {
        name: [quantiles(seconds, n=100) for seconds in by_round]
        for name, by_round in times.items()
    }
    for ours, peer in NOTIFY_PEERS.items():
        for percent in percents:
            note = "1 KB in both directions"
            yield to_row(percentiles, ours, peer, percent, 1.8 if percent == 50 else None, note)
    if NATS in times:
        note = "1 KB in both directions; both with asyncio"
        for percent in percents:
            yield to_row(percentiles, ASYNC_NODE, NATS, percent, 1.5, note)


def to_row(
    percentiles: Mapping[str, list[list[float]]], ours: str, peer: str, percent: int,
    goal: float | None, note: str,
) -> Row:  # fmt: skip
    """Compare one percentile, in milliseconds."""
    figures = [[each[percent - 1] * 1000 for each in percentiles[name]] for name in (ours, peer)]
    return Row.of(
        f"calls: {ours} p{percent} to {peer.partition(' by ')[0]}",
        f"{ours} round trip p{percent}", peer, "ms", *figures,
        goal=goal, is_lower_better=True, note=note,
    )  # fmt: skip


if __name__ == "__main__":
    run(measure, __doc__)
