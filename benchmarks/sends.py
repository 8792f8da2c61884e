"""Benchmark of sends to a topic with one listener, compared with pg_notify, Redis and NATS.

The listener is another process. For single small messages, the rate is that of the sender, which
waits for the server each time. For batches and large bodies, the time ends when the receiver has
all messages.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import NamedTuple

import psycopg

from benchmarks.brokers import PeerMissing, run_nats, run_redis, version
from benchmarks.parallel_senders import parallel_rates
from benchmarks.results import Findings, Options, Row, run
from benchmarks.send_methods import (
    PREPARE,
    SendMethod,
    open_async_node,
    open_nats,
    open_postgres,
    open_redis,
)
from benchmarks.send_receiver import Addresses, Receiver, run_receiver
from benchmarks.servers import temporary_server

SMALL = {"10 B": 10, "1 KB": 1000}
LARGE = {"10 KB": 10_000, "50 KB": 50_000, "100 KB": 100_000}
BATCH = 500
SENDERS = 4
TRIAL_MESSAGES = 200
SECONDS, QUICK_SECONDS = 0.5, 0.15
# Redis must not disconnect a slow subscriber: each round waits for all messages.
REDIS_SETTINGS = ("--client-output-buffer-limit", "pubsub 0 0 0")


class Rates(NamedTuple):
    """Messages/s of each round, until all messages were sent, and until all were received."""

    sent: list[float]
    received: list[float]


class Bench:
    """The connections of one run to the servers, and the receiver."""

    def __init__(
        self, options: Options, addresses: Addresses, receiver: Receiver, stack: ExitStack
    ) -> None:
        self.options = options
        self.addresses = addresses
        self.receiver = receiver
        self.postgres = stack.enter_context(open_postgres(addresses.dsn))
        self.redis = stack.enter_context(open_redis(addresses.redis)) if addresses.redis else None
        self.nats = stack.enter_context(open_nats(addresses.nats)) if addresses.nats else None

    def measure_rates(self, methods: dict[str, SendMethod]) -> dict[str, Rates]:
        """Measure the methods in turns; every other round is in reverse order."""
        seconds = QUICK_SECONDS if self.options.is_quick else SECONDS
        calls = {name: self._choose_calls(method, seconds) for name, method in methods.items()}
        found = {name: Rates([], []) for name in methods}
        for turn in range(self.options.rounds):
            for name in reversed(methods) if turn % 2 else methods:
                sent, received = self._run_round(methods[name], calls[name])
                found[name].sent.append(sent)
                found[name].received.append(received)
        return found

    def _choose_calls(self, method: SendMethod, seconds: float) -> int:
        """Return how many calls take about this time until all their messages are received."""
        trial = max(5, TRIAL_MESSAGES // method.batch)
        if not self.options.is_quick:
            self._run_round(method, trial)
        return max(trial, int(self._run_round(method, trial)[1] * seconds / method.batch))

    def _run_round(self, method: SendMethod, calls: int) -> tuple[float, float]:
        messages = calls * method.batch
        self.receiver.expect(method.receive, messages)
        begun = monotonic()
        method.send(calls)
        sent = monotonic() - begun
        return messages / sent, messages / (self.receiver.done_at() - begun)


def random_text(size: int) -> str:
    """Return a body that cannot be compressed."""
    return base64.b64encode(os.urandom(size))[:size].decode()


def compare_single(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Compare single sends with pg_notify; the receiver only counts notifications."""
    body = random_text(size)
    methods = {
        "node": bench.postgres.node(body, "count"),
        "notify": bench.postgres.notify(body),
    }
    if not bench.options.is_quick:
        methods["function"] = bench.postgres.function(body)
    found = bench.measure_rates(methods)
    yield Row.of(
        f"sends: {name} to pg_notify", f"topic_send one by one, {name}", "SELECT pg_notify",
        "messages/s", found["node"].sent, found["notify"].sent, goal=0.75,
        note="a prepared statement on the same connection; the receiver only counts notifications",
    )  # fmt: skip
    if "function" in found:
        yield Row.of(
            f"sends: {name} by SQL to pg_notify", f"SELECT messages.topic_send, {name}",
            "SELECT pg_notify", "messages/s", found["function"].sent, found["notify"].sent,
            note="both prepared, with psycopg on the same connection",
        )  # fmt: skip


def compare_brokers(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Compare single sends with Redis and NATS; the receivers read whole messages."""
    body = random_text(size)
    methods = {"node": bench.postgres.node(body, "receive_with_node")}
    if bench.redis is not None:
        methods["redis"] = bench.redis(body, 1)
    if bench.nats is not None:
        methods["nats"] = bench.nats(body)
    found = bench.measure_rates(methods)
    sent, subject = found["node"].sent, f"topic_send one by one, {name}"
    if "redis" in found:
        yield Row.of(
            f"sends: {name} to redis-py", subject, "redis-py PUBLISH", "messages/s",
            sent, found["redis"].sent, goal=1.0, note="PUBLISH has no rules and no transactions",
        )  # fmt: skip
    if "nats" in found:
        yield Row.of(
            f"sends: {name} to nats-py", subject, "nats-py publish and flush", "messages/s",
            sent, found["nats"].sent, goal=1.0,
            note="a Node is synchronous, nats-py is asyncio; NATS has no transactions",
        )  # fmt: skip


def compare_async(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Compare single sends of an AsyncNode with NATS."""
    if bench.nats is None:
        return
    body = random_text(size)
    with open_async_node(bench.addresses.dsn) as method:
        found = bench.measure_rates({"node": method(body), "nats": bench.nats(body)})
    yield Row.of(
        f"sends: {name} by AsyncNode to nats-py", f"AsyncNode.topic_send one by one, {name}",
        "nats-py publish and flush", "messages/s", found["node"].sent, found["nats"].sent,
        note="both asyncio; NATS has no transactions",
    )  # fmt: skip


def compare_batches(bench: Bench) -> Iterator[Row]:
    """Compare batches of 500 messages, until all are received."""
    bodies = [random_text(1000)] * BATCH
    postgres = bench.postgres
    methods = {"node": postgres.node_many(bodies), "notify": postgres.notify_many(bodies)}
    if bench.redis is not None:
        methods["redis"] = bench.redis(bodies[0], BATCH)
    found = bench.measure_rates(methods)
    received, subject = found["node"].received, f"topic_send_many of {BATCH}, 1 KB, received"
    yield Row.of(
        "sends: many to pg_notify", subject, f"pg_notify over an array of {BATCH}", "messages/s",
        received, found["notify"].received, goal=0.6,
        note="the peer receives payloads by psycopg's notifies(); a Node receives messages",
    )  # fmt: skip
    if "redis" in found:
        yield Row.of(
            "sends: many to redis-py", subject, f"redis-py pipelines of {BATCH}", "messages/s",
            received, found["redis"].received, goal=1.5, note="pipelines without MULTI",
        )  # fmt: skip


def compare_large(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Compare bodies over the NOTIFY limit, one by one, until all are fetched."""
    body = random_text(size)
    methods = {
        "node": bench.postgres.node(body, "receive_with_node"),
        "plain": bench.postgres.store_and_notify(body),
    }
    found = bench.measure_rates(methods)
    yield Row.of(
        f"sends: {name} to INSERT, NOTIFY, SELECT", f"topic_send, {name}, received",
        "INSERT, NOTIFY and SELECT by hand", "messages/s",
        found["node"].received, found["plain"].received,
        note="by hand: an unlogged table that is never emptied; INSERT and NOTIFY in one statement",
    )  # fmt: skip


def compare_parallel(bench: Bench) -> Iterator[Row]:
    """Compare four parallel senders with one."""
    body = random_text(1000)
    together, alone = parallel_rates(
        bench.addresses.dsn, bench.receiver, body, SENDERS, 4000, bench.options.rounds
    )
    yield Row.of(
        "sends: 4 senders at once", f"{SENDERS} parallel senders, 1 KB", "1 sender", "messages/s",
        together, alone, goal=1.0, note="each sender is a process with a Node",
    )  # fmt: skip


@contextmanager
def _run_brokers(dsn: str, findings: Findings) -> Iterator[Addresses]:
    with ExitStack() as stack:
        ports = {"redis": 0, "nats": 0}
        try:
            import redis

            ports["redis"] = stack.enter_context(run_redis(*REDIS_SETTINGS))
            findings.versions["redis-py"] = redis.__version__
            findings.versions["Redis"] = version("redis-server")
        except (PeerMissing, ImportError) as error:
            findings.left_out.append(f"Redis: {error}")
        try:
            import nats.aio.client

            ports["nats"] = stack.enter_context(run_nats())
            findings.versions["nats-py"] = nats.aio.client.__version__
            findings.versions["NATS"] = version("nats-server")
        except (PeerMissing, ImportError) as error:
            findings.left_out.append(f"NATS: {error}")
        yield Addresses(dsn, **ports)


def _quick_rows(bench: Bench) -> Iterator[Row]:
    yield from compare_single(bench, "1 KB", 1_000)
    yield from compare_batches(bench)
    yield from compare_large(bench, "10 KB", 10_000)


def _rows(bench: Bench) -> Iterator[Row]:
    for name, size in SMALL.items():
        yield from compare_single(bench, name, size)
        yield from compare_brokers(bench, name, size)
        yield from compare_async(bench, name, size)
    yield from compare_batches(bench)
    for name, size in LARGE.items():
        yield from compare_large(bench, name, size)
    yield from compare_parallel(bench)


def measure(options: Options) -> Findings:
    """Measure all rows."""
    findings = Findings(versions={"psycopg": psycopg.__version__})
    with ExitStack() as stack:
        dsn = stack.enter_context(temporary_server()).url()
        with psycopg.connect(dsn, autocommit=True) as admin:
            findings.versions["PostgreSQL"] = admin.info.parameter_status("server_version") or ""
            admin.execute(PREPARE)
        addresses = Addresses(dsn, 0, 0)
        if not options.is_quick:
            addresses = stack.enter_context(_run_brokers(dsn, findings))
        receiver = stack.enter_context(run_receiver(addresses))
        bench = Bench(options, addresses, receiver, stack)
        findings.rows += _quick_rows(bench) if options.is_quick else _rows(bench)
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
