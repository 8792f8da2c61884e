"""Sends to a topic with one listener in another process, against pg_notify, Redis and NATS.

One by one: messages a second that the sender hands over, waiting for the server each time. Batches
and large bodies: messages a second from the first call until the receiver has them all.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import NamedTuple

import psycopg

from benchmarks.brokers import NotHere, own_nats, own_redis, version
from benchmarks.results import Findings, Options, Row, run
from benchmarks.send_crowd import crowd_rates
from benchmarks.send_receiver import Addresses, Receiver, receiver
from benchmarks.send_ways import PREPARE, Way, async_node, nats_ways, postgres, redis_ways
from benchmarks.servers import temporary_server

SMALL = {"10 B": 10, "1 KB": 1000}
LARGE = {"10 KB": 10_000, "50 KB": 50_000, "100 KB": 100_000}
BATCH = 500
SENDERS = 4
TRIAL = 200
SECONDS, QUICK_SECONDS = 0.5, 0.15
# A subscriber that falls behind is not cut off, as a round of ours waits for all too.
REDIS = ("--client-output-buffer-limit", "pubsub 0 0 0")


class Rates(NamedTuple):
    """Messages a second of each round: handed over, and received."""

    sent: list[float]
    received: list[float]


class Bench:
    """The processes of one run."""

    def __init__(
        self, options: Options, addresses: Addresses, other: Receiver, stack: ExitStack
    ) -> None:
        self.options = options
        self.addresses = addresses
        self.other = other
        self.postgres = stack.enter_context(postgres(addresses.dsn))
        self.redis = stack.enter_context(redis_ways(addresses.redis)) if addresses.redis else None
        self.nats = stack.enter_context(nats_ways(addresses.nats)) if addresses.nats else None

    def rates(self, ways: dict[str, Way]) -> dict[str, Rates]:
        """Measure each in turns, each other round in reverse order."""
        seconds = QUICK_SECONDS if self.options.is_quick else SECONDS
        calls = {name: self._calls_for(way, seconds) for name, way in ways.items()}
        found = {name: Rates([], []) for name in ways}
        for turn in range(self.options.rounds):
            for name in reversed(ways) if turn % 2 else ways:
                sent, received = self._round(ways[name], calls[name])
                found[name].sent.append(sent)
                found[name].received.append(received)
        return found

    def _calls_for(self, way: Way, seconds: float) -> int:
        trial = max(5, TRIAL // way.batch)
        if not self.options.is_quick:
            self._round(way, trial)
        return max(trial, int(self._round(way, trial)[1] * seconds / way.batch))

    def _round(self, way: Way, calls: int) -> tuple[float, float]:
        messages = calls * way.batch
        self.other.expect(way.receiving, messages)
        begun = monotonic()
        way.act(calls)
        sent = monotonic() - begun
        return messages / sent, messages / (self.other.done_at() - begun)


def text(size: int) -> str:
    """Make a body that cannot be compressed."""
    return base64.b64encode(os.urandom(size))[:size].decode()


def one_by_one(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Against pg_notify on the same connection: the receiver counts notifications, for all."""
    body = text(size)
    ways = {
        "node": bench.postgres.node(body, "count"),
        "bare": bench.postgres.bare(body),
    }
    if not bench.options.is_quick:
        ways["function"] = bench.postgres.function(body)
    found = bench.rates(ways)
    yield Row.of(
        f"sends: {name} to pg_notify", f"topic_send one by one, {name}", "SELECT pg_notify",
        "messages/s", found["node"].sent, found["bare"].sent, reach=0.7,
        note="a prepared statement on the same connection; notifications are only counted",
    )  # fmt: skip
    if "function" in found:
        yield Row.of(
            f"sends: {name} by SQL to pg_notify", f"SELECT messages.topic_send, {name}",
            "SELECT pg_notify", "messages/s", found["function"].sent, found["bare"].sent,
            note="both prepared, through psycopg on the same connection",
        )  # fmt: skip


def to_brokers(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Against PUBLISH of redis-py, and publish and flush of nats-py; the receivers take all."""
    body = text(size)
    ways = {"node": bench.postgres.node(body, "take_by_node")}
    if bench.redis is not None:
        ways["redis"] = bench.redis(body, 1)
    if bench.nats is not None:
        ways["nats"] = bench.nats(body)
    found = bench.rates(ways)
    sent, what = found["node"].sent, f"topic_send one by one, {name}"
    if "redis" in found:
        yield Row.of(
            f"sends: {name} to redis-py", what, "redis-py PUBLISH", "messages/s",
            sent, found["redis"].sent, reach=1.0, note="Redis knows no rules and no transactions",
        )  # fmt: skip
    if "nats" in found:
        yield Row.of(
            f"sends: {name} to nats-py", what, "nats-py publish and flush", "messages/s",
            sent, found["nats"].sent, reach=1.0,
            note="a Node is synchronous, nats-py is asyncio; NATS knows no transactions",
        )  # fmt: skip


def async_to_nats(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Both asyncio, one by one."""
    if bench.nats is None:
        return
    body = text(size)
    with async_node(bench.addresses.dsn) as way:
        found = bench.rates({"node": way(body), "nats": bench.nats(body)})
    yield Row.of(
        f"sends: {name} by AsyncNode to nats-py", f"AsyncNode.topic_send one by one, {name}",
        "nats-py publish and flush", "messages/s", found["node"].sent, found["nats"].sent,
        note="both asyncio; NATS knows no transactions",
    )  # fmt: skip


def many(bench: Bench) -> Iterator[Row]:
    """Batches of 500, until all are received."""
    bodies = [text(1000)] * BATCH
    ways = {"node": bench.postgres.node_many(bodies), "bare": bench.postgres.bare_many(bodies)}
    if bench.redis is not None:
        ways["redis"] = bench.redis(bodies[0], BATCH)
    found = bench.rates(ways)
    received, what = found["node"].received, f"topic_send_many of {BATCH}, 1 KB, received"
    yield Row.of(
        "sends: many to pg_notify", what, f"pg_notify over an array of {BATCH}", "messages/s",
        received, found["bare"].received, reach=0.6,
        note="by psycopg's notifies(), which gives payloads; a Node gives messages",
    )  # fmt: skip
    if "redis" in found:
        yield Row.of(
            "sends: many to redis-py", what, f"redis-py pipelines of {BATCH}", "messages/s",
            received, found["redis"].received, reach=1.5, note="pipelines without MULTI",
        )  # fmt: skip


def large(bench: Bench, name: str, size: int) -> Iterator[Row]:
    """Bodies over the limit of NOTIFY, one by one, until all are fetched."""
    body = text(size)
    ways = {
        "node": bench.postgres.node(body, "take_by_node"),
        "kept": bench.postgres.kept(body),
    }
    found = bench.rates(ways)
    yield Row.of(
        f"sends: {name} to INSERT, NOTIFY, SELECT", f"topic_send, {name}, received",
        "INSERT, NOTIFY and SELECT by hand", "messages/s",
        found["node"].received, found["kept"].received, reach=0.8,
        note="by hand: an unlogged table that nobody empties, INSERT and NOTIFY in one statement",
    )  # fmt: skip


def crowd(bench: Bench) -> Iterator[Row]:
    """Four processes send at once."""
    body = text(1000)
    together, alone = crowd_rates(
        bench.addresses.dsn, bench.other, body, SENDERS, 4000, bench.options.rounds
    )
    yield Row.of(
        "sends: 4 senders at once", f"{SENDERS} senders at once, 1 KB", "1 sender", "messages/s",
        together, alone, reach=1.0, note="each sender is a process with a Node",
    )  # fmt: skip


@contextmanager
def _brokers(dsn: str, findings: Findings) -> Iterator[Addresses]:
    with ExitStack() as stack:
        ports = {"redis": 0, "nats": 0}
        try:
            import redis

            ports["redis"] = stack.enter_context(own_redis(*REDIS))
            findings.versions["redis-py"] = redis.__version__
            findings.versions["Redis"] = version("redis-server")
        except (NotHere, ImportError) as error:
            findings.left_out.append(f"Redis: {error}")
        try:
            import nats.aio.client

            ports["nats"] = stack.enter_context(own_nats())
            findings.versions["nats-py"] = nats.aio.client.__version__
            findings.versions["NATS"] = version("nats-server")
        except (NotHere, ImportError) as error:
            findings.left_out.append(f"NATS: {error}")
        yield Addresses(dsn, **ports)


def _quick_rows(bench: Bench) -> Iterator[Row]:
    yield from one_by_one(bench, "1 KB", 1_000)
    yield from many(bench)
    yield from large(bench, "10 KB", 10_000)


def _rows(bench: Bench) -> Iterator[Row]:
    for name, size in SMALL.items():
        yield from one_by_one(bench, name, size)
        yield from to_brokers(bench, name, size)
        yield from async_to_nats(bench, name, size)
    yield from many(bench)
    for name, size in LARGE.items():
        yield from large(bench, name, size)
    yield from crowd(bench)


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
            addresses = stack.enter_context(_brokers(dsn, findings))
        other = stack.enter_context(receiver(addresses))
        bench = Bench(options, addresses, other, stack)
        findings.rows += _quick_rows(bench) if options.is_quick else _rows(bench)
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
