"""Traffic pages: message counts by window, and jobs; read at most every 2 s for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from django.db import router
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from psqlmessages import traffic_windows
from psqlmessages.exchanges.store.stats import WORKER_TIMEOUT_SECONDS
from psqlmessages.models import PipelineJob, Traffic
from psqlmessages.models.pipeline import ENDED_STATES
from psqlmessages.monitor.json_views import json_view, read_shared_text, to_json
from psqlmessages.monitor.names import object_url
from psqlmessages.monitor.queries import Query, fetch_rows
from psqlmessages.monitor.views import (
    admin_page,
    common_context,
    require_monitor_access,
    require_name,
)

# Reading half a day of a topic with 40 senders takes 0.7 s. The browser ends a request after 6 s.
_TIMEOUT_SECONDS: Final = 5.0
_JOBS_TIMEOUT_SECONDS: Final = 2.0
# After a slow query, pause for four times its duration: reading takes at most a fifth of the time.
_PAUSE_FACTOR: Final = 4.0
MAX_TOPICS: Final = 500
MAX_SENDERS: Final = 50
_MAX_JOBS: Final = 200

_JOBS_AND_TIMES_QUERY: Final = """
    SELECT statement_timestamp(),
        (SELECT min(starts_at) FROM psqlmessages_traffic WHERE window_seconds = %s),
        (SELECT max(starts_at) FROM psqlmessages_traffic WHERE window_seconds = %s),
        (SELECT coalesce(json_agg(j ORDER BY j.name), '[]') FROM (
            SELECT name, state, rows, rows_per_second, lag_seconds, error, last_batch,
                extract(epoch FROM last_batch_at)::float8 AS last_batch_at,
                extract(epoch FROM started_at)::float8 AS started_at,
                extract(epoch FROM seen_at)::float8 AS seen_at
            FROM psqlmessages_pipelinejob ORDER BY name LIMIT %s
        ) AS j)
"""
# Percentiles and sums of the rows in ``chosen``, by its column ``key``.
_AMOUNTS: Final = f"""
    measured AS (
        SELECT key, json_object_agg(kind, json_build_array(p50, p95, p99)) AS percentiles
        FROM ({traffic_windows.PERCENTILES}) AS found GROUP BY key
    ), summed AS (
        SELECT key, sum(count)::bigint AS number, sum(bytes)::bigint AS size,
            extract(epoch FROM max(starts_at))::bigint AS last
        FROM chosen GROUP BY key
    )
"""  # noqa: S608 - built from constants
_COLUMNS: Final = """count, bytes, starts_at,
            size_p50, size_p95, size_p99, latency_p50, latency_p95, latency_p99"""
_ALL_TOPICS_QUERY: Final = f"""
    WITH chosen AS (
        SELECT topic AS key, {_COLUMNS} FROM psqlmessages_traffic
        WHERE window_seconds = %s AND starts_at >= to_timestamp(%s)
    ), {_AMOUNTS}, points AS (
        SELECT key, json_agg(
            json_build_array(extract(epoch FROM starts_at)::bigint, number) ORDER BY starts_at
        ) AS points
        FROM (SELECT key, starts_at, sum(count)::bigint AS number FROM chosen GROUP BY 1, 2) AS n
        GROUP BY key
    )
    SELECT key, number, size, last, percentiles, points
    FROM summed JOIN measured USING (key) JOIN points USING (key)
    ORDER BY number DESC, key LIMIT %s
"""  # noqa: S608
# ``key`` is the start of a window, a space followed by a sender, or an empty string for the total.
_ONE_TOPIC_QUERY: Final = f"""
    WITH found AS (
        SELECT sender, {_COLUMNS} FROM psqlmessages_traffic
        WHERE topic = %s AND window_seconds = %s AND starts_at >= to_timestamp(%s)
    ), chosen AS (
        SELECT extract(epoch FROM starts_at)::bigint::text AS key, {_COLUMNS} FROM found
        UNION ALL SELECT ' ' || sender, {_COLUMNS} FROM found
        UNION ALL SELECT '', {_COLUMNS} FROM found
    ), {_AMOUNTS}
    SELECT key, number, size, last, percentiles
    FROM summed JOIN measured USING (key) ORDER BY number DESC, key
"""  # noqa: S608


class TrafficSelection(NamedTuple):
    """Selects data of a page: window length, time range up to now, and a topic (None: all)."""

    window_seconds: int
    range_seconds: int
    topic: str | None = None


async def read_traffic(selection: TrafficSelection) -> str | None:
    """Read the data of a page as JSON text; None if it cannot be read."""
    query: Query
    window = selection.window_seconds
    starts_at = (int(time.time()) // window + 1) * window - selection.range_seconds
    if selection.topic is None:
        query = (_ALL_TOPICS_QUERY, (window, starts_at, MAX_TOPICS + 1))
    else:
        query = (_ONE_TOPIC_QUERY, (selection.topic, window, starts_at))
    jobs_query = (_JOBS_AND_TIMES_QUERY, (window, window, _MAX_JOBS))
    jobs, rows = await asyncio.gather(
        fetch_rows(router.db_for_read(PipelineJob), jobs_query, _JOBS_TIMEOUT_SECONDS),
        fetch_rows(router.db_for_read(Traffic), query, _TIMEOUT_SECONDS),
    )
    if jobs is None or rows is None:
        return None
    describe = _describe_topics if selection.topic is None else _describe_topic
    return to_json({**_describe_time(selection, starts_at, jobs[0]), **describe(rows)})


def _describe_time(
    selection: TrafficSelection, starts_at: int, row: tuple[Any, ...]
) -> dict[str, Any]:
    now, oldest, newest, jobs = row
    for job in jobs:
        age = now.timestamp() - job["seen_at"]
        job["is_alive"] = job["state"] not in ENDED_STATES and age < WORKER_TIMEOUT_SECONDS
    counting_jobs = [job for job in jobs if job["is_alive"] and job["name"].startswith("traffic")]
    return {
        "now": now.timestamp(),
        "window": selection.window_seconds,
        "seconds": selection.range_seconds,
        "begin": starts_at,
        # Missing windows before this time are unknown, not zero: nothing was counted.
        "since": oldest and oldest.timestamp(),
        "until": newest and newest.timestamp() + selection.window_seconds,
        "is_counting": bool(counting_jobs),
        "lag": max((job["lag_seconds"] or 0 for job in counting_jobs), default=0),
        "jobs": jobs,
    }


def _describe_topics(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    return {
        "limit": MAX_TOPICS,
        "has_more": len(rows) > MAX_TOPICS,
        "topics": [
            {"topic": key, **_amounts(row), "points": points}
            for key, *row, points in rows[:MAX_TOPICS]
        ],
    }


def _describe_topic(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    senders = [(key[1:], row) for key, *row in rows if key.startswith(" ")]
    return {
        "limit": MAX_SENDERS,
        "has_more": len(senders) > MAX_SENDERS,
        "total": next((_amounts(row) for key, *row in rows if not key), None),
        "senders": [{"sender": key, **_amounts(row)} for key, row in senders[:MAX_SENDERS]],
        "windows": sorted(
            ([int(key), _amounts(row)] for key, *row in rows if key and not key.startswith(" ")),
            key=lambda window: window[0],
        ),
    }


def _amounts(row: list[Any]) -> dict[str, Any]:
    count, size, last, percentiles = row
    return {"count": count, "bytes": size, "last": last, **percentiles}


# Views

_MINUTE, _HOUR, _DAY = 60, 60 * 60, 24 * 60 * 60
# The available window lengths and time ranges, in seconds; a range has at most 720 windows.
RANGES: Final = {
    (10, 10 * _MINUTE): _("10 minutes"),
    (10, _HOUR): _("1 hour"),
    (60, _HOUR): _("1 hour"),
    (60, 6 * _HOUR): _("6 hours"),
    (60, 12 * _HOUR): _("12 hours"),
    (3600, _DAY): _("1 day"),
    (3600, 7 * _DAY): _("7 days"),
    (3600, 30 * _DAY): _("30 days"),
}
_WINDOW_LENGTHS: Final = {10: _("10 s"), 60: _("1 min"), 3600: _("1 h")}
# The page of all topics reads more rows, so it offers only some ranges.
_LIST_RANGES: Final = ((10, 10 * _MINUTE), (60, _HOUR), (3600, _DAY), (3600, 7 * _DAY))


class RangeLink(NamedTuple):
    """A link to the same page with another window length or time range."""

    text: str
    query: str
    is_current: bool


@require_safe
@require_monitor_access
def traffic(request: HttpRequest) -> HttpResponse:
    """Show all topics and the pipeline jobs."""
    window, seconds = _selected_range(request, _LIST_RANGES)
    context = {
        **_page_context(request, window, seconds),
        "choices": [
            RangeLink(RANGES[choice], _query_string(None, *choice), choice == (window, seconds))
            for choice in _LIST_RANGES
        ],
        "admin_jobs_url": admin_page(request, "pipelinejob"),
    }
    return render(request, "psqlmessages/monitor/traffic.html", context)


@require_safe
@require_monitor_access
def traffic_topic(request: HttpRequest) -> HttpResponse:
    """Show one topic, given by ``?name=``."""
    name = require_name(request.GET.get("name", ""))
    window, seconds = _selected_range(request, RANGES)
    shortest = {choice[0]: choice for choice in reversed(RANGES)}
    context = {
        **_page_context(request, window, seconds, name),
        "topic": name,
        "topic_url": object_url("topic", name),
        "windows": [
            RangeLink(text, _query_string(name, *shortest[length]), length == window)
            for length, text in _WINDOW_LENGTHS.items()
        ],
        "choices": [
            RangeLink(text, _query_string(name, *choice), choice == (window, seconds))
            for choice, text in RANGES.items()
            if choice[0] == window
        ],
        "admin_traffic_url": admin_page(
            request, "traffic", {"q": name, "window_seconds": str(window)}
        ),
    }
    return render(request, "psqlmessages/monitor/traffic_topic.html", context)


@json_view
async def traffic_data(request: HttpRequest) -> str | None:
    """Return the data of a page as JSON text; None if it cannot be read."""
    topic = require_name(request.GET["name"]) if "name" in request.GET else None
    selection = TrafficSelection(*_selected_range(request, RANGES), topic)
    return await read_shared_text(selection, lambda: read_traffic(selection), _PAUSE_FACTOR)


def _selected_range(request: HttpRequest, ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the window length and range in the URL, or the first of ``ranges`` if not allowed."""
    query = request.GET.get("window", ""), request.GET.get("seconds", "")
    selected = (choice for choice in ranges if tuple(map(str, choice)) == query)
    return next(selected, next(iter(ranges)))


def _query_string(topic: str | None, window: int, seconds: int) -> str:
    name = {} if topic is None else {"name": topic}
    return "?" + urlencode({**name, "window": window, "seconds": seconds})


def _page_context(
    request: HttpRequest, window: int, seconds: int, topic: str | None = None
) -> dict[str, Any]:
    return {
        **common_context(request),
        "data_url": reverse("psqlmessages:monitor_traffic_figures")
        + _query_string(topic, window, seconds),
        "traffic_topic_url": reverse("psqlmessages:monitor_traffic_topic"),
        "choice_query": urlencode({"window": window, "seconds": seconds}),
        "window_text": _WINDOW_LENGTHS[window],
        "range_text": RANGES[window, seconds],
    }
