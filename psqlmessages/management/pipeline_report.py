"""Command pipeline report: statistics of a period as one HTML page."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from django.db import connections
from django.db.models import Min

from psqlmessages.cli.output import CliCommand, one_line
from psqlmessages.exchanges.store import repository
from psqlmessages.management.pipeline import JobContext, split_names
from psqlmessages.models import ExchangeCount, Traffic
from psqlmessages.orm import fetch
from psqlmessages.pipeline.job_runner import RUNNING, STOPPED, JobProgress
from psqlmessages.pipeline.report import contents, html
from psqlmessages.pipeline.report.contents import (
    CHART_TOPICS,
    ExchangeFlow,
    Period,
    ReportStatistics,
    TrafficStatistics,
)
from psqlmessages.traffic_windows import PERCENTILES, Window

_HEARTBEAT_SECONDS: Final = 2.0


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="begin",
        metavar="TIME",
        default="24h",
        help="start, such as 2026-11-21T12:00 (without a zone: UTC), or how long ago: 30m, 24h, 7d"
        " (default: 24h)",
    )
    parser.add_argument(
        "--to", dest="end", metavar="TIME", default="0s", help="end, as for --from (default: now)"
    )
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="the file, for example report.html"
    )
    parser.add_argument(
        "--topic",
        dest="topics",
        metavar="NAMES",
        default="*",
        help="topics and patterns, separated by commas (default: *)",
    )
    parser.add_argument(
        "--of",
        choices=("traffic", "messages"),
        help="source of the statistics. traffic: the windows that the job `traffic` has counted"
        " (fast, with latencies); messages: the stored messages, read with Spark (default: traffic,"
        " or messages if there are no windows)",
    )
    parser.add_argument(
        "--archive",
        metavar="DIR",
        help="read the stored messages and those of this archive, with Spark (not with --of"
        " traffic)",
    )


def run(arguments: Namespace) -> int:
    """Write the page, and print its path; raise ValueError for an invalid period or source."""
    if arguments.archive and arguments.of == "traffic":
        raise ValueError(
            "--archive reads messages, but --of traffic reads counted windows. Remove one of the"
            " two options"
        )
    now = datetime.now(UTC)
    period = contents.Period(
        contents.parse_time(arguments.begin, now), contents.parse_time(arguments.end, now)
    )
    if period.begin >= period.end:
        raise ValueError(f"--from {arguments.begin} is not before --to {arguments.end}")
    statistics = _read_statistics(arguments, period)
    page = html.render_page(
        contents.Report(
            database=_describe_database(arguments.database),
            period=period,
            made_at=now,
            statistics=statistics,
            flows=_read_flows(arguments.database),
        )
    )
    _write(Path(arguments.out), page)
    count = statistics.total.count if statistics.total else 0
    print(f"{count:,} messages, {statistics.source}", file=sys.stderr)
    print(one_line(arguments.out))
    return 0


def _read_statistics(arguments: Namespace, period: Period) -> ReportStatistics:
    """Read the statistics from the source that --of and --archive select."""
    if arguments.of != "messages" and not arguments.archive:
        statistics = read_windows(period, arguments.topics, arguments.database)
        if statistics is not None:
            return statistics
        if arguments.of == "traffic":
            raise ValueError(
                "there are no traffic windows in this period. Choose another period, use"
                " --of messages, or start the job `traffic`"
            )
    return _count_messages(arguments, period)


def _count_messages(arguments: Namespace, period: Period) -> ReportStatistics:
    with JobContext(COMMAND.name, arguments) as context, ThreadPoolExecutor(1) as executor:
        from psqlmessages.pipeline.report import compute

        context.say("reading the messages with Spark")
        future = executor.submit(
            compute.compute_statistics,
            context.spark,
            period,
            topics=arguments.topics,
            archive=arguments.archive,
        )
        while True:
            context.record(JobProgress(RUNNING))
            try:
                statistics = future.result(_HEARTBEAT_SECONDS)
            except TimeoutError:
                continue
            rows = statistics.total.count if statistics.total else 0
            context.record(JobProgress(STOPPED, rows=rows))
            return statistics


def _write(file: Path, page: str) -> None:
    """Write the page to a draft and rename the draft, so that the file is always complete."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


# If a period has more windows than this, read longer windows if there are any.
_MAX_WINDOWS: Final = 1600

_COLUMNS: Final = """count, bytes, size_p50, size_p95, size_p99,
        latency_p50, latency_p95, latency_p99"""
# A step is the time between two points of the chart. ``at`` is the start of the step that contains
# a window. Steps and windows start at multiples of their length since 1970.
_WINDOWS: Final = f"""
    SELECT topic, sender, {_COLUMNS},
        (extract(epoch FROM starts_at)::bigint / %(step)s * %(step)s) AS at
    FROM psqlmessages_traffic
    WHERE window_seconds = %(window)s AND starts_at >= %(begin)s AND starts_at < %(end)s
        AND (topic = ANY (%(names)s) OR topic ^@ ANY (%(prefixes)s))
"""  # noqa: S608 - only constants
# Keys of the rows: '' (total), 'a' and the start of a step, 't' and a topic, 's' and a sender.
# PERCENTILES reads ``chosen``.
_SUMS: Final = f"""
    WITH windows AS MATERIALIZED ({_WINDOWS}), chosen AS (
        SELECT '' AS key, {_COLUMNS} FROM windows
        UNION ALL SELECT 'a' || at, {_COLUMNS} FROM windows
        UNION ALL SELECT 't' || topic, {_COLUMNS} FROM windows
        UNION ALL SELECT 's' || sender, {_COLUMNS} FROM windows
    ), measured AS (
        SELECT key, json_object_agg(kind, json_build_array(p50, p95, p99)) AS percentiles
        FROM ({PERCENTILES}) AS p GROUP BY key
    ), summed AS (
        SELECT key, sum(count)::bigint AS number, sum(bytes)::bigint AS size
        FROM chosen GROUP BY key
    )
    SELECT key, number, size, percentiles FROM summed JOIN measured USING (key)
    ORDER BY number DESC, key
"""  # noqa: S608
_POINTS: Final = f"""
    SELECT topic, at, sum(count)::bigint FROM ({_WINDOWS}) AS windows
    WHERE topic = ANY (%(chart_topics)s) GROUP BY topic, at
"""  # noqa: S608


def read_windows(period: Period, topics: str, using: str) -> ReportStatistics | None:
    """Read the statistics of a period from traffic windows; None if it has no windows.

    ``topics`` has names and patterns, separated by commas.
    """
    window = _choose_window_length(period, using)
    if window is None:
        return None
    step = period.step(window)
    topic_names = split_names(topics)
    parameters = {
        **period._asdict(),
        "window": window,
        "step": step,
        "names": [name for name in topic_names if not name.endswith("*")],
        "prefixes": [name[:-1] for name in topic_names if name.endswith("*")],
    }
    amounts = {
        key: TrafficStatistics(count, size, tuple(by["size"]), tuple(by["latency"]))
        for key, count, size, by in fetch(_SUMS, parameters, using)
    }
    by_kind = {
        kind: {key[1:]: amount for key, amount in amounts.items() if key[:1] == kind}
        for kind in "ats"
    }
    chart_topics = list(by_kind["t"])[:CHART_TOPICS]
    points: dict[str, dict[int, int]] = {topic: {} for topic in chart_topics}
    for topic, at, count in fetch(_POINTS, {**parameters, "chart_topics": chart_topics}, using):
        points[topic][at] = count
    steps = {int(at): amount for at, amount in by_kind["a"].items()}
    return ReportStatistics(
        source=f"windows of {Window(window).label}, counted by the job “traffic”",
        step=step,
        total=amounts.get(""),
        steps=steps,
        topics=by_kind["t"],
        senders=by_kind["s"],
        points=points,
        counted=(min(steps), max(steps) + step) if steps else None,
    )


def _read_flows(using: str) -> list[ExchangeFlow]:
    """Read the exchanges and their counters. A counter counts since its exchange was created."""
    outcomes: dict[int, Counter[str]] = defaultdict(Counter)
    copies: dict[int, Counter[int]] = defaultdict(Counter)
    for row in ExchangeCount.objects.using(using):
        if row.outcome == ExchangeCount.Outcome.TO:
            copies[row.exchange_id][row.destination] += row.count
        else:
            outcomes[row.exchange_id][row.outcome] += row.count
    return [
        ExchangeFlow(
            exchange.name,
            (exchange.source_namespace, exchange.source_queue),
            [
                {
                    "to": (each.namespace, each.queue),
                    "selector": each.selector,
                    "copies": copies[exchange.pk][each.position],
                }
                for each in exchange.destinations.all()
            ],
            dict(outcomes[exchange.pk]),
        )
        for exchange in repository.rows(using)
    ]


def _describe_database(using: str) -> str:
    query = "SELECT current_database(), current_setting('server_version')"
    ((name, version),) = fetch(query, (), using)
    host = connections[using].settings_dict.get("HOST")
    # A path is the directory of a socket.
    if not host or host.startswith("/"):
        host = "this machine"
    return f"{name} on {host}, PostgreSQL {version}"


def _choose_window_length(period: Period, using: str) -> int | None:
    """Choose a window length whose windows cover the period; None if it has no windows.

    Among these lengths, chooses the shortest one with at most _MAX_WINDOWS windows; if each has
    more, the longest.
    """
    traffic = Traffic.objects.using(using).order_by()
    # By length: the start of its first window in the period, or an upper bound of this start.
    oldest: dict[int, float] = {}
    for window in Window.values:
        rows = traffic.filter(window_seconds=window)
        if rows.filter(starts_at__gte=period.begin, starts_at__lt=period.end).exists():
            first = rows.aggregate(first=Min("starts_at"))["first"]
            oldest[window] = max(first.timestamp(), period.begin.timestamp() + window)
    if not oldest:
        return None
    earliest = min(oldest.values())
    # A length covers the period if its windows start at most one window later than those of the
    # length that starts earliest.
    covering = [window for window, first in oldest.items() if first <= earliest + window]
    few_enough = [window for window in covering if period.seconds / window <= _MAX_WINDOWS]
    return min(few_enough) if few_enough else max(covering)


COMMAND = CliCommand(
    "report",
    "write one HTML page with charts of a period: rates, sizes, latencies, senders, exchanges",
    _configure,
    run,
)
