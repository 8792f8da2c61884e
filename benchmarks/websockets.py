"""Benchmark of the relay: many WebSockets on one Daphne, beside a group of Channels on another.

python -m benchmarks.websockets [--rounds 5] [--quick] [--json FILE]

Full speed: as many messages are under way as a channel of Channels holds without losing any, by
far. Latency: both get the same few messages a second; it is from before the sender's call until a
client has the frame. The clients are one process, which all sides share.
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

from benchmarks import brokers
from benchmarks.behind import behind
from benchmarks.brokers import NotHere
from benchmarks.crowd import Crowd, body_of
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server
from benchmarks.sites import Site, group_site, memory_bytes, relay_site

RECOMMENDED, BY_PUBSUB = "core.RedisChannelLayer", "pubsub.RedisPubSubChannelLayer"
BODY_BYTES = 1024
UNDER_WAY = 5
# So few that Channels' own layer keeps up, on two cores that others share.
MOST_PER_SECOND, DELIVERIES_PER_SECOND = 4, 500
MOST_MEMORY = 150 * 2**20
WANTED = 1000
UNEQUAL = (
    "ours checks twice a second who may still be there, and its frames name the sender (90 bytes"
    " more); theirs knows no users and keeps a message in Redis until it is received"
)


@dataclass(frozen=True)
class Step:
    """So many WebSockets of each side; in each round so many seconds of each."""

    sockets: int
    rounds: int = 3
    full_speed: float = 1
    paced: float = 1.5

    @property
    def per_second(self) -> float:
        """So many messages a second are sent for the latency."""
        return min(MOST_PER_SECOND, DELIVERIES_PER_SECOND / self.sockets)


@dataclass
class Figures:
    """Of one side at one step, one of each round: deliveries/s, and p50 and p99 in ms."""

    rates: list[float] = field(default_factory=list)
    halves: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)


def measure(options: Options) -> Findings:
    """Measure each number of WebSockets, few first."""
    _allow_files()
    findings = Findings()
    steps = [Step(100, min(options.rounds, 3), 0.4, 0)]
    if not options.is_quick:
        curve = [Step(sockets) for sockets in (1, 10, 100, 300)]
        steps = [*curve, Step(WANTED, options.rounds, 2, 6)]
    layers = [RECOMMENDED] if options.is_quick else [RECOMMENDED, BY_PUBSUB]
    with Crowd() as crowd, _sites(layers, steps[-1].sockets, findings) as sites:
        found: dict[int, dict[str, Figures]] = {}
        memory = 0
        for step in steps:
            # The second layer is measured for the largest crowd alone.
            shown = sites if step.sockets == WANTED else sites[:2]
            for site in shown:
                crowd.open(site.name, step.sockets, site.place)
            memory = memory or memory_bytes(sites[0].pid)
            found[step.sockets] = _measured(crowd, shown, step)
            if step.sockets in (100, WANTED):
                _compare(findings, step, found[step.sockets])
        if not options.is_quick:
            _note_memory(findings, memory_bytes(sites[0].pid) - memory)
            _draw(findings, found)
    if not options.is_quick:
        findings.rows.append(behind(options.rounds))
    return findings


@contextmanager
def _sites(layers: Sequence[str], sockets: int, findings: Findings) -> Iterator[list[Site]]:
    with ExitStack() as stack:
        server = stack.enter_context(temporary_server())
        sites: list[Site] = [stack.enter_context(relay_site(server, sockets))]
        try:
            port = stack.enter_context(brokers.own_redis())
            sites += [stack.enter_context(group_site(layer, port)) for layer in layers]
            findings.versions |= _versions()
        except NotHere as reason:
            findings.left_out.append(f"WebSockets by Channels: {reason}")
        yield sites


def _measured(crowd: Crowd, sites: Sequence[Site], step: Step) -> dict[str, Figures]:
    found = {site.name: Figures() for site in sites}
    for site in sites:
        _full_speed(crowd, site, step.sockets, 0)
    for turn in range(step.rounds):
        for site in reversed(sites) if turn % 2 else sites:
            figures = found[site.name]
            figures.rates.append(_full_speed(crowd, site, step.sockets, step.full_speed))
            if step.paced:
                late = _paced(crowd, site, step)
                figures.halves.append(late[len(late) // 2] * 1000)
                figures.tails.append(late[len(late) * 99 // 100] * 1000)
    return found


def _full_speed(crowd: Crowd, site: Site, sockets: int, seconds: float) -> float:
    """Send as fast as it is delivered, one message at least: deliveries a second."""
    crowd.begin(site.name)
    begun, messages = perf_counter(), 0
    while not messages or perf_counter() - begun < seconds:
        site.send(body_of(BODY_BYTES))
        messages += 1
        crowd.wait((messages - UNDER_WAY) * sockets)
    crowd.wait(messages * sockets)
    return messages * sockets / (perf_counter() - begun)


def _paced(crowd: Crowd, site: Site, step: Step) -> list[float]:
    """Send some a second: in seconds how late each was, sorted."""
    crowd.begin(site.name)
    tick, messages = Event(), round(step.paced * step.per_second)
    for _ in range(messages):
        tick.wait(1 / step.per_second)
        site.send(body_of(BODY_BYTES))
    crowd.wait(messages * step.sockets)
    return crowd.latencies()


def _compare(findings: Findings, step: Step, found: dict[str, Figures]) -> None:
    """Add the rows of a step: our figures beside those of each other side."""
    ours, *others = found.items()
    for name, theirs in others:
        is_goal = step.sockets == WANTED and name == RECOMMENDED
        pace = f"1 KB to {step.sockets:,} WebSockets, {step.per_second:g} a second"
        full = f"1 KB to {step.sockets:,} WebSockets, full speed"
        for word, what, unit, figure, reach in (
            ("deliveries", full, "deliveries/s", "rates", 1.5),
            ("p50", f"{pace}, p50", "ms", "halves", None),
            ("p99", f"{pace}, p99", "ms", "tails", 1.0),
        ):
            if mine := getattr(ours[1], figure):
                row = Row.of(
                    f"websockets: {word} of {step.sockets}, {name.partition('.')[0]}",
                    what, f"Channels, {name.partition('.')[2]}", unit, mine,
                    getattr(theirs, figure), reach=reach if is_goal else None,
                    is_at_most=unit == "ms", note=UNEQUAL,
                )  # fmt: skip
                findings.rows.append(row)


def _note_memory(findings: Findings, grown: int) -> None:
    row = Row.of(
        "websockets: memory", f"memory of Daphne for {WANTED:,} WebSockets", "150 MiB",
        "MiB", [grown / 2**20], [MOST_MEMORY / 2**20], reach=1.0, is_at_most=True,
        note="after all that was measured, but for the first WebSocket",
    )  # fmt: skip
    findings.rows.append(row)


def _draw(findings: Findings, found: dict[int, dict[str, Figures]]) -> None:
    pace = f"Latency of WebSockets, p99, at most {MOST_PER_SECOND} messages a second"
    for figure, title, unit in (
        ("rates", "Deliveries to WebSockets at full speed", "deliveries/s"),
        ("tails", pace, "ms"),
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        for sockets, sides in found.items():
            for name, figures in sides.items():
                point = (float(sockets), median(getattr(figures, figure)))
                lines.setdefault(name, []).append(point)
        findings.curves.append(Curve(f"websockets: {figure}", title, "WebSockets", unit, lines))


def _versions() -> dict[str, str]:
    packages = ("daphne", "autobahn", "twisted", "channels", "channels-redis", "redis", "hiredis")
    found = {name: version_of(name) for name in packages}
    found["redis-py"] = found.pop("redis")
    return found | {"Redis": brokers.version("redis-server")}


def _allow_files() -> None:
    """Let this process and those that it starts have a file for each WebSocket."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    run(measure, __doc__)
