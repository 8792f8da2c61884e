"""Calls: a question to another process and its answer; opening a node; importing the package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed
from statistics import quantiles
from time import perf_counter
from typing import Any

from benchmarks import answerers, starting
from benchmarks.brokers import NotHere, own_nats, version
from benchmarks.copies import copy
from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server
from project.postgres import Server

BODY = "x" * 1000
# Short turns, so that what disturbs the machine for a moment disturbs all sides.
TURNS, CALLS, QUICK_CALLS, WARM_UP = 10, 50, 20, 3
QUICK_ROUNDS = 3
RULES = [
    (answerers.ASKER, "Rpc", answerers.ANSWERER, "W"),
    (answerers.ANSWERER, "Rpc", answerers.ASKER, "W"),
]
NODE, ASYNC_NODE, NATS = "Node.call", "AsyncNode.call", "nats-py request"
HAND, ASYNC_HAND = "two NOTIFY hops by psycopg", "two NOTIFY hops by psycopg's AsyncConnection"
HANDS = {NODE: HAND, ASYNC_NODE: ASYNC_HAND}
Times = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Side:
    """One way to ask: seconds of each of so many questions."""

    times: Callable[[int], list[float]]


def measure(options: Options) -> Findings:
    """Measure the rows of calls, of opening and of importing."""
    findings = Findings(versions={"psycopg": installed("psycopg")})
    rounds = min(options.rounds, QUICK_ROUNDS) if options.is_quick else options.rounds
    with temporary_server() as server:
        with asyncio.Runner() as runner, ExitStack() as stack:
            sides = {**own_sides(server, stack, runner), **nats_side(stack, runner, findings)}
            times = ask(sides, rounds, QUICK_CALLS if options.is_quick else CALLS)
        # The slowest hundredth of a few calls is chance.
        findings.rows += rows(times, (50,) if options.is_quick else (50, 99))
        findings.add(starting.measure(server, rounds, is_quick=options.is_quick))
    return findings


def own_sides(server: Server, stack: ExitStack, runner: asyncio.Runner) -> dict[str, Side]:
    """Have ours and those by hand ready, each in a database of its own."""
    return {
        NODE: side(stack, answerers.answer_by_node, answerers.node_asker, copy(server, "a", RULES)),
        HAND: side(stack, answerers.answer_by_hand, answerers.hand_asker, copy(server, "b")),
        ASYNC_NODE: async_side(
            *(stack, runner, answerers.answer_by_async_node, answerers.async_node_asker),
            copy(server, "c", RULES),
        ),
        ASYNC_HAND: async_side(
            *(stack, runner, answerers.answer_by_async_hand, answerers.async_hand_asker),
            copy(server, "d"),
        ),
    }


def nats_side(stack: ExitStack, runner: asyncio.Runner, findings: Findings) -> dict[str, Side]:
    """Have a server of NATS with its two clients ready, if there is one."""
    try:
        url = f"nats://127.0.0.1:{stack.enter_context(own_nats())}"
        findings.versions["NATS"] = version("nats-server")
    except NotHere as error:
        findings.left_out.append(str(error))
        return {}
    findings.versions["nats-py"] = installed("nats-py")
    return {NATS: async_side(stack, runner, answerers.answer_by_nats, answerers.nats_asker, url)}


def side(stack: ExitStack, answer: Any, asker: Any, address: str) -> Side:
    """Start who answers and who asks."""
    stack.enter_context(answerers.answering(answer, address))
    ask_once = asker(address, stack)

    def times(count: int) -> list[float]:
        found = []
        for _ in range(count):
            begun = perf_counter()
            ask_once(BODY)
            found.append(perf_counter() - begun)
        return found

    return Side(times)


def async_side(
    stack: ExitStack, runner: asyncio.Runner, answer: Any, asker: Any, address: str
) -> Side:
    """Do the same where asking is asynchronous."""
    stack.enter_context(answerers.answering(answer, address))
    ask_once = stack.enter_context(async_asker(runner, asker, address))

    async def ask_many(count: int) -> list[float]:
        found = []
        for _ in range(count):
            begun = perf_counter()
            await ask_once(BODY)
            found.append(perf_counter() - begun)
        return found

    return Side(lambda count: runner.run(ask_many(count)))


@contextmanager
def async_asker(runner: asyncio.Runner, asker: Any, address: str) -> Iterator[Any]:
    """Open who asks on the runner's loop, and close it there."""
    stack = AsyncExitStack()
    try:
        yield runner.run(asker(address, stack))
    finally:
        runner.run(stack.aclose())


def ask(sides: Mapping[str, Side], rounds: int, calls: int) -> Times:
    """Ask in turns; for each side the seconds of each question, by rounds."""
    found: Times = {name: [[] for _ in range(rounds)] for name in sides}
    for number in range(rounds * TURNS):
        order = list(sides.items())
        for name, one in reversed(order) if number % 2 else order:
            one.times(WARM_UP)
            found[name][number // TURNS] += one.times(calls)
    return found


def rows(times: Times, percents: Sequence[int]) -> Iterator[Row]:
    """Compare these percentiles of each round."""
    percentiles = {
        name: [quantiles(of_round, n=100) for of_round in by_round]
        for name, by_round in times.items()
    }
    for ours, by_hand in HANDS.items():
        for percent in percents:
            yield row(percentiles, ours, by_hand, percent, "1 KB there and back")
    if NATS in times:
        note = "1 KB there and back; both on asyncio"
        for percent in percents:
            yield row(percentiles, ASYNC_NODE, NATS, percent, note)


def row(
    percentiles: Mapping[str, list[list[float]]], ours: str, peer: str, percent: int, note: str
) -> Row:
    """Compare one percentile, in milliseconds."""
    figures = [[each[percent - 1] * 1000 for each in percentiles[name]] for name in (ours, peer)]
    return Row.of(
        f"calls: {ours} p{percent} to {peer.partition(' by ')[0]}",
        f"{ours} round trip p{percent}", peer, "ms", *figures,
        reach=1.5, is_at_most=True, note=note,
    )  # fmt: skip


if __name__ == "__main__":
    run(measure, __doc__)
