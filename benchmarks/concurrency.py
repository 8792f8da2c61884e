"""Benchmark of concurrency: 100 asyncio tasks that call at the same time, on one client.

python -m benchmarks.concurrency [--rounds 5] [--quick] [--json FILE]

The tasks run in a separate process, as in a web server or a worker. In the last row of each
comparison, four processes with 25 tasks each do the same work. Clients connect for each round,
because a notification wakes every listening session of its database. Bodies have 1 KB.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as package_version
from multiprocessing.connection import Connection
from time import monotonic

import psycopg

from benchmarks import call_sides
from benchmarks import concurrent_clients as clients
from benchmarks.brokers import PeerMissing, run_nats, run_redis, version
from benchmarks.databases import create_database
from benchmarks.results import Findings, Options, Row, run
from benchmarks.send_receiver import Addresses, Receiver, run_receiver
from benchmarks.sends import REDIS_SETTINGS
from benchmarks.servers import temporary_server
from project.postgres import Server

TASKS, PROCESSES = 100, 4
WARM_UP, TRIAL_CALLS = 2, 10
SECONDS, QUICK_SECONDS, QUICK_ROUNDS = 1.0, 0.3, 3
INSTALL = "pip install -r benchmarks/requirements.txt"


@dataclass(frozen=True)
class Side:
    """A system to measure; ``receive`` is a key of WAYS, or "" without a receiver."""

    name: str
    open_client: clients.OpenClient
    address: str
    receive: str = ""
    processes: int = 1


@dataclass(frozen=True)
class Peer:
    """A side to compare with, and the ratio to reach."""

    side: Side
    goal: float
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Our side, its peers, and our side in four processes."""

    key: str
    unit: str
    ours: Side
    peers: Sequence[Peer]
    parallel: Side
    parallel_note: str = ""


async def run_round(
    pipe: Connection, open_client: clients.OpenClient, address: str, number: int, tasks: int,
    calls: int,
) -> None:  # fmt: skip
    """Connect, report ready, wait for the parent process, make the calls, and report the result."""
    async with open_client(address, number) as client:
        await run_tasks(client, tasks, WARM_UP)
        pipe.send(None)
        # This blocks the event loop, but no task runs now.
        pipe.recv()
        pipe.send(await run_tasks(client, tasks, calls))


async def run_tasks(client: clients.Client, tasks: int, calls: int) -> clients.Finished:
    """Let each task make this number of calls, one after the other."""

    async def run_task() -> None:
        for _ in range(calls):
            await client.call()

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(run_task())
    if client.finish is None:
        return clients.Finished(tasks * calls, monotonic())
    return await client.finish()


def run_rounds(pipe: Connection) -> None:
    """Run rounds until the pipe is closed."""
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        asyncio.run(run_round(pipe, *arguments))


@contextmanager
def process_of_tasks() -> Iterator[Connection]:
    """Start a process that runs rounds; yield its pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_rounds, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


@dataclass(frozen=True)
class Bench:
    """The processes of the tasks, and the receiver of the messages."""

    pipes: Sequence[Connection]
    receiver: Receiver
    options: Options

    def measure_rates(self, sides: Sequence[Side]) -> dict[str, list[float]]:
        """Measure calls/s of each side in turns; every other round is in reverse order."""
        seconds = QUICK_SECONDS if self.options.is_quick else SECONDS
        calls = {}
        for side in sides:
            tasks = TASKS // side.processes
            rate = self.measure_rate(side, TRIAL_CALLS * side.processes)
            calls[side.name] = max(TRIAL_CALLS, int(rate * seconds / side.processes / tasks))
        rates: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(self.options.rounds):
            for side in reversed(sides) if turn % 2 else sides:
                rates[side.name].append(self.measure_rate(side, calls[side.name]))
        return rates

    def measure_rate(self, side: Side, calls: int) -> float:
        """Run one round in the processes of a side, with ``calls`` calls of each task."""
        pipes, tasks = self.pipes[: side.processes], TASKS // side.processes
        if side.receive:
            self.receiver.expect(side.receive, TASKS * (WARM_UP + calls))
        for number, pipe in enumerate(pipes):
            pipe.send((side.open_client, side.address, number, tasks, calls))
        for pipe in pipes:
            pipe.recv()
        begun = monotonic()
        for pipe in pipes:
            pipe.send(None)
        finished = [pipe.recv() for pipe in pipes]
        if side.receive:
            self.receiver.done_at()
        elements = sum(each.elements for each in finished)
        if elements != TASKS * calls:
            raise AssertionError(f"{side.name}: {elements} elements instead of {TASKS * calls}")
        return elements / (max(each.at for each in finished) - begun)

    def compare(self, comparison: Comparison) -> Iterator[Row]:
        """Yield a row for each peer, and one for four processes."""
        ours, parallel = comparison.ours, comparison.parallel
        sides = [ours, *(peer.side for peer in comparison.peers)]
        rates = self.measure_rates([*sides, parallel])
        for peer in comparison.peers:
            yield Row.of(
                f"concurrency: {comparison.key} to {peer.side.name}", ours.name, peer.side.name,
                comparison.unit, rates[ours.name], rates[peer.side.name], goal=peer.goal,
                note=peer.note,
            )  # fmt: skip
        yield Row.of(
            f"concurrency: {comparison.key}, {PROCESSES} processes", parallel.name,
            f"1 process with {TASKS} tasks", comparison.unit, rates[parallel.name],
            rates[ours.name], goal=1.5, note=comparison.parallel_note,
        )  # fmt: skip


class Sides:
    """Starts the servers and answering processes, and returns what to compare."""

    def __init__(self, server: Server, stack: ExitStack, findings: Findings) -> None:
        self.server, self.stack, self.findings = server, stack, findings
        self.dsn = server.url()

    def ours(
        self, name: str, open_client: clients.OpenClient, *, receive: str = "", address: str = ""
    ) -> tuple[Side, Side]:
        """Return our side with one process, and with four."""
        address = address or self.dsn
        return (
            Side(f"{name} by {TASKS} tasks", open_client, address, receive),
            Side(
                f"{name} by {PROCESSES} processes with {TASKS // PROCESSES} tasks each",
                open_client, address, receive, PROCESSES,
            ),
        )  # fmt: skip

    def try_peers(self, *opens: Callable[[], Peer]) -> list[Peer]:
        """Open peers; leave out those that are not installed."""
        peers = []
        for open_ in opens:
            try:
                peers.append(open_())
            except (PeerMissing, ImportError) as error:
                self.findings.left_out.append(f"{error}")
        return peers

    def sends(self, redis_port: int, nats_port: int) -> Comparison:
        """Compare sends with Redis and NATS, by the rate of the senders."""
        one, four = self.ours("topic_send", clients.topic_send, receive="receive_with_node")
        peers = []
        if redis_port:
            side = Side(
                "redis.asyncio publish", clients.redis_publish, str(redis_port),
                "receive_from_redis",
            )  # fmt: skip
            peers.append(Peer(side, 3, "a connection for each task, from the client's pool"))
        if nats_port:
            side = Side(
                "nats-py publish and flush", clients.nats_publish, str(nats_port),
                "receive_from_nats",
            )  # fmt: skip
            peers.append(Peer(side, 1.5))
        return Comparison("sends", "messages/s", one, peers, four)

    def publishes(self) -> Comparison:
        """Compare durable publishing with JetStream."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(clients.SUBSCRIBE)
        one, four = self.ours("publish", clients.publish)
        opens = (
            partial(self._jetstream, "JetStream, sync_interval: always", 5, syncs_always=True),
            partial(self._jetstream, "JetStream, lazy", 1, syncs_always=False),
        )
        return Comparison("publish", "messages/s", one, self.try_peers(*opens), four)

    def _jetstream(self, name: str, goal: float, *, syncs_always: bool) -> Peer:
        port = self.stack.enter_context(run_nats(has_jetstream=True, syncs_always=syncs_always))
        note = "" if syncs_always else "the peer syncs every 2 minutes"
        return Peer(Side(name, clients.jetstream_publish, str(port)), goal, note)

    def queues(self) -> Comparison:
        """Compare push and consume with PgQueuer."""
        one, four = self.ours("push, then consume", clients.push_and_consume)
        peers = self.try_peers(self._pgqueuer)
        return Comparison("queue", "elements/s", one, peers, four)

    def _pgqueuer(self) -> Peer:
        asyncio.run(clients.install_pgqueuer(self.dsn))
        self.findings.versions["PgQueuer"] = package_version("pgqueuer")
        note = (
            f"tasks push, then one worker takes {clients.BATCH} at once; the peer with 10 sessions"
        )
        return Peer(Side("PgQueuer", clients.pgqueuer, self.dsn), 3, note)

    def calls(self, nats_port: int) -> Comparison:
        """Compare calls with NATS. Our sides have a database each, so calls wake no idle node."""
        answer = call_sides.answer_with_async_node
        addresses = []
        for processes in (1, PROCESSES):
            dsn = create_database(self.server, f"calls{processes}")
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(clients.SETUP)
            for number in range(processes):
                ident = f"{call_sides.ANSWERER}.{number}"
                answering = call_sides.answering(partial(answer, ident=ident), dsn)
                self.stack.enter_context(answering)
            addresses.append(dsn)
        one, _ = self.ours("call", clients.call, address=addresses[0])
        _, four = self.ours("call", clients.call, address=addresses[-1])
        peers = []
        if nats_port:
            url = f"nats://127.0.0.1:{nats_port}"
            self.stack.enter_context(call_sides.answering(call_sides.answer_with_nats, url))
            peers.append(Peer(Side("nats-py request", clients.nats_request, str(nats_port)), 0.7))
        note = "each process calls an answering process of its own"
        return Comparison("call", "calls/s", one, peers, four, note)


def start_redis(stack: ExitStack, findings: Findings) -> int:
    """Start Redis, if it is installed; return its port, or 0."""
    try:
        import redis

        port = stack.enter_context(run_redis(*REDIS_SETTINGS))
    except (PeerMissing, ImportError) as error:
        findings.left_out.append(f"Redis: {error}")
        return 0
    findings.versions |= {"redis-py": redis.__version__, "Redis": version("redis-server")}
    return port


def start_nats(stack: ExitStack, findings: Findings) -> int:
    """Start NATS, if it is installed; return its port, or 0."""
    try:
        import nats  # noqa: F401

        port = stack.enter_context(run_nats())
    except (PeerMissing, ImportError) as error:
        findings.left_out.append(f"NATS: {error}")
        return 0
    findings.versions |= {"nats-py": package_version("nats-py"), "NATS": version("nats-server")}
    return port


def measure(options: Options) -> Findings:
    """Measure all rows; in a quick run, fewer and shorter rounds."""
    findings = Findings()
    if options.is_quick:
        options = Options(min(options.rounds, QUICK_ROUNDS), is_quick=True)
    with ExitStack() as stack:
        server = stack.enter_context(temporary_server({"max_connections": "200"}))
        sides = Sides(server, stack, findings)
        # Copy the database before adding rules, because each copy adds its own.
        nats_port = start_nats(stack, findings)
        redis_port = start_redis(stack, findings)
        calls = sides.calls(nats_port)
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(clients.SETUP)
        receiver = stack.enter_context(run_receiver(Addresses(sides.dsn, redis_port, nats_port)))
        pipes = [stack.enter_context(process_of_tasks()) for _ in range(PROCESSES)]
        bench = Bench(pipes, receiver, options)
        comparisons = (
            sides.sends(redis_port, nats_port),
            sides.publishes(),
            sides.queues(),
            calls,
        )
        for comparison in comparisons:
            findings.rows += bench.compare(comparison)
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
