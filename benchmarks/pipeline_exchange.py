"""Benchmark of an exchange on Spark, compared with `exchange run`.

python -m benchmarks.pipeline_exchange [--rounds 5] [--quick] [--json FILE]

Three equal exchanges route from their own queue to two queues. One is run by a process of `exchange
run`, one by two such processes, one by `pipeline exchange` with two tasks. All use one PostgreSQL
on this machine. Rows are the rate for waiting elements of 1 KB, the delay of a single element while
the exchange is idle, and the memory. A quick run measures nothing: Spark takes too long to start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter

from pyspark import __version__ as spark_version

from benchmarks import cpu_time
from benchmarks.exchange_sides import (
    BODY,
    HEADERS,
    Exchange,
    RunningExchange,
    command_process,
    load,
)
from benchmarks.pipeline_steady import measure_job
from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server
from project.postgres import Server

ONE, TWO, SPARK = "one", "two", "spark"
RUN_ONE, RUN_TWO = "exchange run, one process", "exchange run, two processes"
COUNT, WARM_UP, SINGLES = 20_000, 2, 3
TIMEOUT_SECONDS, POLL_SECONDS = 120, 0.001
# A task runs for a second after the last element.
IDLE_SECONDS = 3
HAS_BOTH = """
    SELECT count(DISTINCT e.queue_id) = 2 FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = ANY (%s)
"""


class MeasuredExchange(RunningExchange):
    """An exchange, and the CPU time and memory of the processes that run it."""

    def __init__(self, server: Server, exchange: Exchange, processes: Sequence[int]) -> None:
        super().__init__(server.url(), exchange)
        self.processes = processes
        self.all_processes = (*processes, server.postmaster.pid)  # type: ignore[union-attr]
        self.rates: list[float] = []
        self.cpu_microseconds: list[float] = []

    def measure(self) -> None:
        """Route waiting elements; record elements/s, and the CPU time of an element."""
        before = cpu_time.seconds(*self.all_processes)
        self.rates.append(COUNT / self.route(COUNT))
        spent = cpu_time.seconds(*self.all_processes) - before
        self.cpu_microseconds.append(spent / COUNT * 1e6)

    def measure_single(self) -> float:
        """Push an element while the exchange is idle; return the ms until it is in both queues."""
        Event().wait(IDLE_SECONDS)
        begun = perf_counter()
        self.push_one()
        wait_until(self.has_both)
        taken = perf_counter() - begun
        self.drain()
        return taken * 1000

    def push_one(self) -> None:
        """Push an element that goes to both destinations."""
        push = "SELECT messages.push('filler', %s, %s, headers => %s)"
        self.connection.execute(push, [self.exchange.name, BODY, HEADERS])

    def has_both(self) -> bool:
        """Return whether both destinations have an element."""
        cursor = self.connection.execute(HAS_BOTH, [list(self.exchange.destinations)])
        return bool(cursor.fetchone()[0])  # type: ignore[index]

    def drain(self) -> None:
        """Empty both destinations."""
        for queue in self.exchange.destinations:
            self.call("drain", queue)

    def measure_memory(self) -> float:
        """Return the MiB of memory of the processes."""
        with TemporaryDirectory() as empty:
            sizes = [measure_job(pid, empty) for pid in self.processes]
        return sum(size.java + size.driver + size.workers for size in sizes)


def wait_until(condition: Callable[[], bool]) -> None:
    """Check a condition every millisecond until it is true."""
    end, pause = perf_counter() + TIMEOUT_SECONDS, Event()
    while not condition():
        if perf_counter() > end:
            raise TimeoutError("the exchange does not continue")
        pause.wait(POLL_SECONDS)


@contextmanager
def run_exchanges(server: Server) -> Iterator[Mapping[str, MeasuredExchange]]:
    """Run the three exchanges."""
    exchanges = {name: Exchange(name) for name in (ONE, TWO, SPARK)}
    url = server.url()
    load(url, list(exchanges.values()))
    arguments = {
        ONE: [("exchange", "run", ONE)],
        TWO: [("exchange", "run", TWO)] * 2,
        SPARK: [("pipeline", "exchange", SPARK, "--master", "local[2]", "--tasks", "2")],
    }
    with ExitStack() as stack:
        sides = {}
        for name, exchange in exchanges.items():
            started = [stack.enter_context(command_process(url, *each)) for each in arguments[name]]
            pids = [each.pid for each in started]
            sides[name] = stack.enter_context(closing(MeasuredExchange(server, exchange, pids)))
        spark, spark_process = sides[SPARK], started[-1]
        spark.push_one()
        wait_until(lambda: spark_process.poll() is not None or spark.has_both())
        if spark_process.poll() is not None:
            # Spark waits ten seconds for its Python process. A very busy machine needs longer.
            raise RuntimeError("pipeline exchange ended before it had routed an element")
        spark.drain()
        yield sides


def compare_rates(sides: Mapping[str, MeasuredExchange], rounds: int) -> list[Row]:
    """Compare elements/s of waiting elements."""
    for turn in range(WARM_UP + rounds):
        order = list(sides.values())
        for side in reversed(order) if turn % 2 else order:
            side.measure()
    rates = {name: side.rates[WARM_UP:] for name, side in sides.items()}
    cpu = {name: median(side.cpu_microseconds[WARM_UP:]) for name, side in sides.items()}
    return [
        Row.of(
            f"pipeline_exchange: rate to {name}", "exchange on Spark, 2 tasks, 1 to 2, 1 KB", peer,
            "elements/s", rates[SPARK], rates[name],
            note=f"CPU {cpu[SPARK]:.0f} to {cpu[name]:.0f} µs per element, with PostgreSQL's",
        )
        for name, peer in ((ONE, RUN_ONE), (TWO, RUN_TWO))
    ]  # fmt: skip


def compare_singles(sides: Mapping[str, MeasuredExchange], rounds: int) -> Row:
    """Compare the delay of an element while the exchange is idle."""
    delays: dict[str, list[float]] = {SPARK: [], ONE: []}
    for _ in range(rounds):
        for name, found in delays.items():
            found.append(median(sides[name].measure_single() for _ in range(SINGLES)))
    return Row.of(
        "pipeline_exchange: one", "idle exchange on Spark: push until both queues have it, p50",
        RUN_ONE, "ms", delays[SPARK], delays[ONE], is_lower_better=True,
        note="Spark starts a batch for the element",
    )  # fmt: skip


def compare_memory(sides: Mapping[str, MeasuredExchange]) -> Row:
    """Compare the memory of the processes, once."""
    return Row.of(
        "pipeline_exchange: memory", "memory of an exchange on Spark", RUN_ONE, "MiB",
        [sides[SPARK].measure_memory()], [sides[ONE].measure_memory()], is_lower_better=True,
        note="Java, the driver and Python's workers; measured once, at the end",
    )  # fmt: skip


def measure(options: Options) -> Findings:
    """Measure rates, delays and memory."""
    findings = Findings(versions={"Spark": spark_version})
    if options.is_quick:
        findings.left_out.append("an exchange on Spark, in the quick run: its start takes too long")
        return findings
    with temporary_server() as server, run_exchanges(server) as sides:
        findings.rows += compare_rates(sides, options.rounds)
        findings.rows += [compare_singles(sides, options.rounds), compare_memory(sides)]
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
