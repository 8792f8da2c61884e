"""Benchmark of the relay: many WebSockets on one Daphne, compared with a group of Channels.

python -m benchmarks.websockets [--rounds 5] [--quick] [--json FILE]

At full speed, 5 messages are sent ahead. A channel of Channels stores far more without losses.
For the latency, all sides get the same few messages per second. A latency begins before the
sender's call, and ends when a client has the frame. One process has the clients of all sides.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version as version_of
from statistics import median
from threading import Event
from time import perf_counter

from benchmarks import brokers, cpu_time, slow_consumer
from benchmarks.brokers import PeerMissing
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server
from benchmarks.websocket_clients import WebSocketClients, timed_body
from benchmarks.websocket_sites import Site, group_site, memory_bytes, relay_site

RECOMMENDED, BY_PUBSUB = "core.RedisChannelLayer", "pubsub.RedisPubSubChannelLayer"
BODY_BYTES = 1024
MAX_AHEAD = 5
# Channels' layer can keep up with these rates on two cores that run other programs too.
MAX_PER_SECOND, DELIVERIES_PER_SECOND = 4, 500
MAX_MEMORY_BYTES = 150 * 2**20
MAX_SOCKETS = 1000
# CPU of Daphne per delivery to 1,000 WebSockets before ADR 35, in µs: `single` if each message is
# sent after the delivery of the one before, `full` at full speed.
FORMER_CPU = {"single": 13.4, "full": 4.4}
SINGLE_MESSAGES = 100
NOTE = (
    "ours checks permissions twice a second, and its frames contain the sender (90 bytes more); the"
    " peer has no users, and stores a message in Redis until it is received"
)


@dataclass(frozen=True)
class Step:
    """A number of WebSockets, and for how many seconds each side is measured in a round."""

    sockets: int
    rounds: int = 3
    full_speed_seconds: float = 1
    latency_seconds: float = 1.5

    @property
    def per_second(self) -> float:
        """The messages per second for the latency."""
        return min(MAX_PER_SECOND, DELIVERIES_PER_SECOND / self.sockets)


@dataclass
class Figures:
    """The figures of a side at a step, one for each round.

    Deliveries/s, latencies in ms, and µs of CPU per delivery at full speed.
    """

    rates: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    full_cpu: list[float] = field(default_factory=list)


def measure(options: Options) -> Findings:
    """Measure with more and more WebSockets."""
    _raise_file_limit()
    findings = Findings()
    steps = [Step(100, min(options.rounds, 3), 0.4, 0)]
    if not options.is_quick:
        curve = [Step(sockets) for sockets in (1, 10, 100, 300)]
        steps = [*curve, Step(MAX_SOCKETS, options.rounds, 2, 6)]
    layers = [RECOMMENDED] if options.is_quick else [RECOMMENDED, BY_PUBSUB]
    with WebSocketClients() as clients, _run_sites(layers, steps[-1].sockets, findings) as sites:
        found: dict[int, dict[str, Figures]] = {}
        memory = 0
        for step in steps:
            # The second layer is measured only with the largest number of WebSockets.
            step_sites = sites if step.sockets == MAX_SOCKETS else sites[:2]
            for site in step_sites:
                clients.open(site.name, step.sockets, site.endpoint)
            memory = memory or memory_bytes(sites[0].pid)
            found[step.sockets] = _measure_step(clients, step_sites, step)
            if step.sockets in (100, MAX_SOCKETS):
                _add_rows(findings, step, found[step.sockets])
        if not options.is_quick:
            single_cpu = [_measure_single_cpu(clients, sites[0]) for _ in range(options.rounds)]
            _add_cpu(findings, found[MAX_SOCKETS][sites[0].name].full_cpu, single_cpu)
            _add_memory(findings, memory_bytes(sites[0].pid) - memory)
            _add_curves(findings, found)
    if not options.is_quick:
        findings.rows.append(slow_consumer.measure(options.rounds))
    return findings


@contextmanager
def _run_sites(layers: Sequence[str], sockets: int, findings: Findings) -> Iterator[list[Site]]:
    with ExitStack() as stack:
        server = stack.enter_context(temporary_server())
        sites: list[Site] = [stack.enter_context(relay_site(server, sockets))]
        try:
            port = stack.enter_context(brokers.run_redis())
            sites += [stack.enter_context(group_site(layer, port)) for layer in layers]
            findings.versions |= _versions()
        except PeerMissing as reason:
            findings.left_out.append(f"WebSockets by Channels: {reason}")
        yield sites


def _measure_step(
    clients: WebSocketClients, sites: Sequence[Site], step: Step
) -> dict[str, Figures]:
    found = {site.name: Figures() for site in sites}
    for site in sites:
        _measure_rate(clients, site, step.sockets, 0)
    for turn in range(step.rounds):
        for site in reversed(sites) if turn % 2 else sites:
            figures = found[site.name]
            before = cpu_time.process_nanoseconds(site.pid)
            rate, messages = _measure_rate(clients, site, step.sockets, step.full_speed_seconds)
            used = cpu_time.process_nanoseconds(site.pid) - before
            figures.rates.append(rate)
            figures.full_cpu.append(used / 1000 / (messages * step.sockets))
            if step.latency_seconds:
                latencies = _measure_latencies(clients, site, step)
                figures.p50.append(latencies[len(latencies) // 2] * 1000)
                figures.p99.append(latencies[len(latencies) * 99 // 100] * 1000)
    return found


def _measure_rate(
    clients: WebSocketClients, site: Site, sockets: int, seconds: float
) -> tuple[float, int]:
    """Send one or more messages at full speed; return deliveries/s and the number of messages."""
    clients.begin(site.name)
    begun, messages = perf_counter(), 0
    while not messages or perf_counter() - begun < seconds:
        site.send(timed_body(BODY_BYTES))
        messages += 1
        clients.wait((messages - MAX_AHEAD) * sockets)
    clients.wait(messages * sockets)
    return messages * sockets / (perf_counter() - begun), messages


def _measure_latencies(clients: WebSocketClients, site: Site, step: Step) -> list[float]:
    """Send some messages per second; return the latencies in seconds, sorted."""
    clients.begin(site.name)
    pause, messages = Event(), round(step.latency_seconds * step.per_second)
    for _ in range(messages):
        pause.wait(1 / step.per_second)
        site.send(timed_body(BODY_BYTES))
    clients.wait(messages * step.sockets)
    return clients.latencies()


def _measure_single_cpu(clients: WebSocketClients, site: Site) -> float:
    """Send messages, each after the delivery of the one before; return µs of CPU per delivery."""
    clients.begin(site.name)
    before = cpu_time.process_nanoseconds(site.pid)
    for messages in range(1, SINGLE_MESSAGES + 1):
        site.send(timed_body(BODY_BYTES))
        clients.wait(messages * MAX_SOCKETS)
    used = cpu_time.process_nanoseconds(site.pid) - before
    return used / 1000 / (SINGLE_MESSAGES * MAX_SOCKETS)


def _add_rows(findings: Findings, step: Step, found: dict[str, Figures]) -> None:
    """Add the rows of a step, which compare our figures with those of each peer."""
    ours, *peers = found.items()
    for name, theirs in peers:
        has_goal = step.sockets == MAX_SOCKETS and name == RECOMMENDED
        pace = f"1 KB to {step.sockets:,} WebSockets, {step.per_second:g} per second"
        full = f"1 KB to {step.sockets:,} WebSockets, full speed"
        for key, subject, unit, figure, goal in (
            ("deliveries", full, "deliveries/s", "rates", 1.5),
            ("p50", f"{pace}, p50", "ms", "p50", None),
            ("p99", f"{pace}, p99", "ms", "p99", 1.0),
        ):
            if mine := getattr(ours[1], figure):
                row = Row.of(
                    f"websockets: {key} of {step.sockets}, {name.partition('.')[0]}",
                    subject, f"Channels, {name.partition('.')[2]}", unit, mine,
                    getattr(theirs, figure), goal=goal if has_goal else None,
                    is_lower_better=unit == "ms", note=NOTE,
                )  # fmt: skip
                findings.rows.append(row)


def _add_cpu(findings: Findings, full: list[float], single: list[float]) -> None:
    for key, speed, used in (
        ("single", "one message after the other", single),
        ("full", "full speed", full),
    ):
        row = Row.of(
            f"websockets: CPU, {key}",
            f"CPU of Daphne per delivery to {MAX_SOCKETS:,} WebSockets, {speed}", "before ADR 35",
            "µs", used, [FORMER_CPU[key]] * len(used), goal=0.5, is_lower_better=True,
            note="the peer's figure is of another run: another speed of the machine changes the"
            " ratio",
        )  # fmt: skip
        findings.rows.append(row)


def _add_memory(findings: Findings, grown: int) -> None:
    row = Row.of(
        "websockets: memory", f"memory of Daphne for {MAX_SOCKETS:,} WebSockets", "150 MiB",
        "MiB", [grown / 2**20], [MAX_MEMORY_BYTES / 2**20], goal=1.0, is_lower_better=True,
        note="the growth from the first WebSocket until the end of the measurements",
    )  # fmt: skip
    findings.rows.append(row)


def _add_curves(findings: Findings, found: dict[int, dict[str, Figures]]) -> None:
    pace = f"Latency of WebSockets, p99, at most {MAX_PER_SECOND} messages per second"
    for key, figure, title, unit in (
        ("rates", "rates", "Deliveries to WebSockets at full speed", "deliveries/s"),
        ("tails", "p99", pace, "ms"),
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        for sockets, sides in found.items():
            for name, figures in sides.items():
                point = (float(sockets), median(getattr(figures, figure)))
                lines.setdefault(name, []).append(point)
        findings.curves.append(Curve(f"websockets: {key}", title, "WebSockets", unit, lines))


def _versions() -> dict[str, str]:
    packages = ("daphne", "autobahn", "twisted", "channels", "channels-redis", "redis", "hiredis")
    found = {name: version_of(name) for name in packages}
    found["redis-py"] = found.pop("redis")
    return found | {"Redis": brokers.version("redis-server")}


def _raise_file_limit() -> None:
    """Let this process and its children open a file for each WebSocket."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


if __name__ == "__main__":
    run(measure, __doc__)
