"""Figures of a report, from traffic windows and counters of exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from django.db import connections
from django.db.models import Min

from psqlmessages.exchanges.store import repository
from psqlmessages.models import Exchange, ExchangeCount, Traffic
from psqlmessages.pipeline.report.contents import (
    DRAWN,
    ExchangeFlow,
    Period,
    ReportFigures,
    TrafficAmount,
)
from psqlmessages.traffic_retention import PERCENTILES, Window

# Sum at most this number of windows, if there are longer ones.
_MOST: Final = 1600

_COLUMNS: Final = """count, bytes, size_p50, size_p95, size_p99,
        latency_p50, latency_p95, latency_p99"""
# Keys consist of a kind and a name. Steps begin at multiples of their length since 1970, like
# windows.
_FOUND: Final = f"""
    SELECT topic, sender, {_COLUMNS},
        (extract(epoch FROM starts_at)::bigint / %(step)s * %(step)s) AS at
    FROM psqlmessages_traffic
    WHERE window_seconds = %(window)s AND starts_at >= %(begin)s AND starts_at < %(end)s
        AND (topic = ANY (%(names)s) OR topic ^@ ANY (%(prefixes)s))
"""  # noqa: S608 - only constants
_SUMS: Final = f"""
    WITH found AS MATERIALIZED ({_FOUND}), chosen AS (
        SELECT '' AS key, {_COLUMNS} FROM found
        UNION ALL SELECT 'a' || at, {_COLUMNS} FROM found
        UNION ALL SELECT 't' || topic, {_COLUMNS} FROM found
        UNION ALL SELECT 's' || sender, {_COLUMNS} FROM found
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
    SELECT topic, at, sum(count)::bigint FROM ({_FOUND}) AS found
    WHERE topic = ANY (%(drawn)s) GROUP BY topic, at
"""  # noqa: S608


def figures(period: Period, topics: str, using: str) -> ReportFigures | None:
    """Read the figures of a period; None if nothing was counted.

    ``topics`` are names and patterns, separated by commas.
    """
    window = _window(period, using)
    if window is None:
        return None
    step = period.step(window)
    given = {**period._asdict(), "window": window, "step": step, **_wanted(topics)}
    with connections[using].cursor() as cursor:
        cursor.execute(_SUMS, given)
        amounts = {key: _amount(*row) for key, *row in cursor.fetchall()}
        kinds = {
            kind: {key[1:]: amount for key, amount in amounts.items() if key[:1] == kind}
            for kind in "ats"
        }
        drawn = list(kinds["t"])[:DRAWN]
        cursor.execute(_POINTS, {**given, "drawn": drawn})
        points: dict[str, dict[int, int]] = {topic: {} for topic in drawn}
        for topic, at, count in cursor.fetchall():
            points[topic][at] = count
    steps = {int(at): amount for at, amount in kinds["a"].items()}
    return ReportFigures(
        source=f"windows of {Window(window).label}, counted by the job “traffic”",
        step=step,
        total=amounts.get(""),
        steps=steps,
        topics=kinds["t"],
        senders=kinds["s"],
        points=points,
        counted=(min(steps), max(steps) + step) if steps else None,
    )


def flows(using: str) -> list[ExchangeFlow]:
    """Read the exchanges with their counters since they were created."""
    counts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in ExchangeCount.objects.using(using):
        is_copy = row.outcome == ExchangeCount.Outcome.TO
        counts[row.exchange_id][str(row.destination) if is_copy else row.outcome] += row.count
    return [_flow(exchange, counts[exchange.pk]) for exchange in repository.rows(using)]


def database(using: str) -> str:
    """Return the name, host and version of the database."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_database(), current_setting('server_version')")
        name, version = cursor.fetchone()
    host = connection.settings_dict.get("HOST") or "this machine"
    # A path is the directory of a socket.
    return f"{name} on {'this machine' if host.startswith('/') else host}, PostgreSQL {version}"


def _window(period: Period, using: str) -> int | None:
    """Choose the shortest windows that cover the period and are not too many."""
    traffic = Traffic.objects.using(using).order_by()
    oldest: dict[int, float] = {}
    for window in Window.values:
        of_length = traffic.filter(window_seconds=window)
        within = of_length.filter(starts_at__gte=period.begin, starts_at__lt=period.end)
        if within.exists():
            first = of_length.aggregate(first=Min("starts_at"))["first"]
            oldest[window] = max(first.timestamp(), period.begin.timestamp() + window)
    if not oldest:
        return None
    earliest = min(oldest.values())
    # Windows whose data begin at most one window length after the earliest data.
    reaching = [window for window, first in oldest.items() if first <= earliest + window]
    few = [window for window in reaching if period.seconds / window <= _MOST]
    return min(few) if few else max(reaching)


def _wanted(topics: str) -> dict[str, list[str]]:
    given = [name.strip() for name in topics.split(",") if name.strip()]
    return {
        "names": [name for name in given if not name.endswith("*")],
        "prefixes": [name[:-1] for name in given if name.endswith("*")],
    }


def _amount(count: int, size: int, percentiles: dict[str, Any]) -> TrafficAmount:
    return TrafficAmount(count, size, tuple(percentiles["size"]), tuple(percentiles["latency"]))


def _flow(exchange: Exchange, counts: dict[str, int]) -> ExchangeFlow:
    destinations: Iterable[Any] = exchange.destinations.all()
    return ExchangeFlow(
        exchange.name,
        (exchange.source_namespace, exchange.source_queue),
        [
            {
                "to": (each.namespace, each.queue),
                "selector": each.selector,
                "copies": counts.get(str(each.position), 0),
            }
            for each in destinations
        ],
        {outcome: number for outcome, number in counts.items() if not outcome.isdigit()},
    )
