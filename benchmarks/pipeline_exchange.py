"""Benchmark of an exchange on Spark beside `exchange run`: when Spark pays, and when not.

python -m benchmarks.pipeline_exchange [--rounds 5] [--quick] [--json FILE]

Three exchanges alike, each from a queue of its own into two: one is run by a process of `exchange
run`, one by two of them, one by `pipeline exchange` with two tasks, all on this machine and one
PostgreSQL. Measured is how long elements of 1 KB that wait take, by turns, how long one takes that
comes when all is at rest, and the memory. A quick run leaves it out: Spark's start takes too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter

from pyspark import __version__ as spark_version

from benchmarks import processor
from benchmarks.exchange_sides import BODY, HEADERS, Graph, Ours, load, process
from benchmarks.pipeline_steady import size
from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server
from project.postgres import Server

ONE, TWO, SPARK = "one", "two", "spark"
RUN_ONE, RUN_TWO = "exchange run, one process", "exchange run, two processes"
COUNT, WARM_UP, LOOKS = 20_000, 2, 3
PATIENCE_SECONDS, POLL_SECONDS = 120, 0.001
# A task goes on for a second after the last element.
REST_SECONDS = 3
HAS_BOTH = """
    SELECT count(DISTINCT e.queue_id) = 2 FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = ANY (%s)
"""


class Running(Ours):
    """An exchange that runs in processes of its own, and what they take."""

    def __init__(self, server: Server, graph: Graph, processes: Sequence[int]) -> None:
        super().__init__(server.url(), graph)
        self.processes = processes
        self.measured = (*processes, server.postmaster.pid)  # type: ignore[union-attr]
        self.rates: list[float] = []
        self.busy: list[float] = []

    def measure(self) -> None:
        """Route what waits: elements a second, and µs of the processors for each."""
        before = processor.seconds(*self.measured)
        self.rates.append(COUNT / self.route(COUNT))
        self.busy.append((processor.seconds(*self.measured) - before) / COUNT * 1e6)

    def milliseconds(self) -> float:
        """Push one when all is at rest; how long until both destinations have it."""
        Event().wait(REST_SECONDS)
        begun = perf_counter()
        self.push_one()
        until(self.has_both)
        taken = perf_counter() - begun
        self.drain()
        return taken * 1000

    def push_one(self) -> None:
        """Push an element that goes to both."""
        push = "SELECT messages.push('filler', %s, %s, headers => %s)"
        self.connection.execute(push, [self.graph.name, BODY, HEADERS])

    def has_both(self) -> bool:
        """Ask whether something is in both destinations."""
        asked = self.connection.execute(HAS_BOTH, [list(self.graph.destinations)])
        return bool(asked.fetchone()[0])  # type: ignore[index]

    def drain(self) -> None:
        """Empty both destinations."""
        for queue in self.graph.destinations:
            self.call("drain", queue)

    @property
    def mebibytes(self) -> float:
        """The memory of its processes."""
        with TemporaryDirectory() as nothing:
            found = [size(pid, nothing) for pid in self.processes]
        return sum(each.java + each.driver + each.workers for each in found)


def until(condition: Callable[[], bool]) -> None:
    """Look every millisecond."""
    end, pause = perf_counter() + PATIENCE_SECONDS, Event()
    while not condition():
        if perf_counter() > end:
            raise TimeoutError("the exchange does not go on")
        pause.wait(POLL_SECONDS)


@contextmanager
def sides(server: Server) -> Iterator[Mapping[str, Running]]:
    """Run all three, each as users do."""
    graphs = {name: Graph(name) for name in (ONE, TWO, SPARK)}
    url = server.url()
    load(url, list(graphs.values()))
    arguments = {
        ONE: [("exchange", "run", ONE)],
        TWO: [("exchange", "run", TWO)] * 2,
        SPARK: [("pipeline", "exchange", SPARK, "--master", "local[2]", "--tasks", "2")],
    }
    with ExitStack() as stack:
        found = {}
        for name, graph in graphs.items():
            begun = [stack.enter_context(process(url, *each)) for each in arguments[name]]
            pids = [each.pid for each in begun]
            found[name] = stack.enter_context(closing(Running(server, graph, pids)))
        found[SPARK].push_one()
        until(lambda: begun[-1].poll() is not None or found[SPARK].has_both())
        if begun[-1].poll() is not None:
            # On a machine that is very busy Spark gives up on its own Python after ten seconds.
            raise RuntimeError("pipeline exchange has ended before it began")
        found[SPARK].drain()
        yield found


def routed(found: Mapping[str, Running], rounds: int) -> list[Row]:
    """Compare how many elements a second go through."""
    for turn in range(WARM_UP + rounds):
        order = list(found.values())
        for side in reversed(order) if turn % 2 else order:
            side.measure()
    rates = {name: side.rates[WARM_UP:] for name, side in found.items()}
    busy = {name: median(side.busy[WARM_UP:]) for name, side in found.items()}
    return [
        Row.of(
            f"pipeline_exchange: rate to {name}", "exchange on Spark, 2 tasks, 1 to 2, 1 KB", peer,
            "elements/s", rates[SPARK], rates[name],
            note=f"CPU {busy[SPARK]:.0f} to {busy[name]:.0f} µs an element, PostgreSQL's with it",
        )
        for name, peer in ((ONE, RUN_ONE), (TWO, RUN_TWO))
    ]  # fmt: skip


def single(found: Mapping[str, Running], rounds: int) -> Row:
    """Compare how long an element takes that comes when all is at rest."""
    taken: dict[str, list[float]] = {SPARK: [], ONE: []}
    for _ in range(rounds):
        for name, times in taken.items():
            times.append(median(found[name].milliseconds() for _ in range(LOOKS)))
    return Row.of(
        "pipeline_exchange: one", "exchange on Spark at rest: push until both have it, p50",
        RUN_ONE, "ms", taken[SPARK], taken[ONE], is_at_most=True,
        note="Spark starts a batch for it",
    )  # fmt: skip


def memory(found: Mapping[str, Running]) -> Row:
    """Compare the memory of the processes, once."""
    return Row.of(
        "pipeline_exchange: memory", "memory of an exchange on Spark", RUN_ONE, "MiB",
        [found[SPARK].mebibytes], [found[ONE].mebibytes], is_at_most=True,
        note="Java, the driver and Python's workers; once, at the end",
    )  # fmt: skip


def measure(options: Options) -> Findings:
    """Measure all of it."""
    findings = Findings(versions={"Spark": spark_version})
    if options.is_quick:
        findings.left_out.append("an exchange on Spark, in the quick run: its start takes too long")
        return findings
    with temporary_server() as server, sides(server) as found:
        findings.rows += routed(found, options.rounds)
        findings.rows += [single(found, options.rounds), memory(found)]
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
