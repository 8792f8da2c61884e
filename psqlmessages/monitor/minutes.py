"""History of a topic or a queue: its counts per minute as JSON for the charts."""

from __future__ import annotations

import time
from typing import Any, Final
from urllib.parse import urlencode

from django.core.exceptions import BadRequest
from django.db import router
from django.http import HttpRequest
from django.urls import reverse

from psqlmessages.conf import get_settings
from psqlmessages.models import HistoryPeriod, TopicMinute
from psqlmessages.models.names import is_name
from psqlmessages.monitor.json_views import json_view, read_shared_text, to_json
from psqlmessages.monitor.minute_writer import END_OF_LAST_MINUTE, LOCK_IDS, MINUTE_SECONDS
from psqlmessages.monitor.queries import fetch_rows

_TIMEOUT_SECONDS: Final = 3.0
_HOUR_SECONDS: Final = 60 * MINUTE_SECONDS
# The length of a step for each length of a chart, in seconds.
STEPS: Final = {
    _HOUR_SECONDS: MINUTE_SECONDS,
    6 * _HOUR_SECONDS: MINUTE_SECONDS,
    24 * _HOUR_SECONDS: 5 * MINUTE_SECONDS,
    7 * 24 * _HOUR_SECONDS: 30 * MINUTE_SECONDS,
}

# The periods with counted minutes. A period without an end goes on if its writer holds the lock;
# otherwise it ended after the last stored minute.
_PERIODS: Final = f"""
    SELECT coalesce(json_agg(json_build_array(
        extract(epoch FROM p.starts_at)::bigint,
        extract(epoch FROM coalesce(p.ends_at, CASE WHEN EXISTS (
            SELECT FROM pg_locks AS l
            WHERE l.locktype = 'advisory' AND l.classid = %(lock_class)s
              AND l.objid = %(lock_object)s AND l.objsubid = 2 AND l.granted AND l.pid = p.pid
              AND l.database = (
                  SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()
              )
        ) THEN date_trunc('minute', statement_timestamp()) ELSE {END_OF_LAST_MINUTE} END,
            p.starts_at))::bigint
    ) ORDER BY p.starts_at), '[]')
    FROM psqlmessages_historyperiod AS p
    WHERE p.kind = %(kind)s AND (p.ends_at IS NULL OR p.ends_at > to_timestamp(%(starts_at)s))
"""  # noqa: S608 - built from constants
_STEP: Final = "(floor(extract(epoch FROM m.minute) / %(step)s) * %(step)s)::bigint"
# A row of the topic '' sums the counts of topics that have no row for this minute. For such a
# topic, the minute is unknown.
_TOPIC: Final = f"""
    SELECT ({_PERIODS}), (
        SELECT coalesce(json_agg(json_build_array(s.at, s.messages, s.bytes) ORDER BY s.at), '[]')
        FROM (
            SELECT {_STEP} AS at, sum(m.messages)::bigint AS messages, sum(m.bytes)::bigint AS bytes
            FROM psqlmessages_topicminute AS m
            WHERE m.topic = %(name)s AND m.minute >= to_timestamp(%(starts_at)s) GROUP BY 1
        ) AS s
    ), (
        SELECT coalesce(json_agg(DISTINCT {_STEP}), '[]') FROM psqlmessages_topicminute AS m
        WHERE m.topic = '' AND m.minute >= to_timestamp(%(starts_at)s)
    ), NULL::bigint
"""  # noqa: S608
# The last column is the backlog before the chart. It comes from the last row before the chart, or
# else from the first row in the chart, or else from the present counters.
_QUEUE: Final = f"""
    SELECT ({_PERIODS}), (
        SELECT coalesce(json_agg(
            json_build_array(s.at, s.pushed, s.taken, s.removed, s.backlog) ORDER BY s.at
        ), '[]')
        FROM (
            SELECT {_STEP} AS at, sum(m.puts)::bigint AS pushed, sum(m.gets)::bigint AS taken,
                sum(m.removes)::bigint AS removed,
                (array_agg(m.backlog ORDER BY m.minute DESC))[1] AS backlog
            FROM psqlmessages_queueminute AS m
            WHERE m.queue = %(name)s AND m.minute >= to_timestamp(%(starts_at)s) GROUP BY 1
        ) AS s
    ), '[]'::json, coalesce(
        (
            SELECT m.backlog FROM psqlmessages_queueminute AS m
            WHERE m.queue = %(name)s AND m.minute < to_timestamp(%(starts_at)s)
            ORDER BY m.minute DESC LIMIT 1
        ), (
            SELECT m.backlog - m.puts + m.gets + m.removes FROM psqlmessages_queueminute AS m
            WHERE m.queue = %(name)s AND m.minute >= to_timestamp(%(starts_at)s)
            ORDER BY m.minute LIMIT 1
        ), (
            SELECT sum(c.puts - c.gets - c.commits - c.removes - c.dead_letters)::bigint
            FROM psqlmessages_queuecount AS c JOIN psqlmessages_queue AS q ON q.id = c.queue_id
            WHERE q.name = %(name)s
        )
    )
"""  # noqa: S608
_QUERIES: Final = {HistoryPeriod.Subject.TOPIC: _TOPIC, HistoryPeriod.Subject.QUEUE: _QUEUE}


def history_url(kind: str, name: str) -> str:
    """Return the URL of the data of a chart; "" if the setting HISTORY_DAYS is 0.

    A page with a chart puts this URL into its context as ``history_url``, includes the template
    ``_history.html``, and loads ``minutes.js``.
    """
    if not get_settings().HISTORY_DAYS:
        return ""
    return f"{reverse('psqlmessages:monitor_history')}?{urlencode({kind: name})}"


async def read_minutes(kind: str, name: str, seconds: int) -> str | None:
    """Return the counts of the last ``seconds`` as JSON text; None if they cannot be read."""
    step, now = STEPS[seconds], time.time()
    starts_at = (int(now) // step + 1) * step - seconds
    values = {
        "kind": kind, "name": name, "starts_at": starts_at, "step": step,
        "lock_class": LOCK_IDS[0], "lock_object": LOCK_IDS[1],
    }  # fmt: skip
    query = (_QUERIES[HistoryPeriod.Subject(kind)], values)
    rows = await fetch_rows(router.db_for_read(TopicMinute), query, _TIMEOUT_SECONDS)
    if rows is None:
        return None
    ((periods, points, unknown, backlog),) = rows
    counted = {at for at, *_ in points}
    return to_json(
        {
            "kind": kind,
            "now": now,
            "begin": starts_at,
            "step": step,
            "seconds": seconds,
            "periods": periods,
            "points": points,
            "unknown": [at for at in unknown if at not in counted],
            "backlog": backlog or 0,
        }
    )


@json_view
async def history_data(request: HttpRequest) -> str | None:
    """Return the history of ``?topic=`` or ``?queue=``; ``seconds=`` is the length of the chart."""
    parameters: dict[str, Any] = request.GET.dict()
    seconds = parameters.pop("seconds", str(_HOUR_SECONDS))
    if seconds not in map(str, STEPS):
        raise BadRequest(f"seconds must be one of {', '.join(map(str, STEPS))}")
    match list(parameters.items()):
        case [("topic" | "queue" as kind, str(name))] if is_name(name):
            length = int(seconds)
            key = ("history", kind, name, length)
            return await read_shared_text(key, lambda: read_minutes(kind, name, length))
    raise BadRequest("exactly one of topic and queue must be given, as a valid name")
