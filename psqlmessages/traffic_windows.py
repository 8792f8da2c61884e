"""Traffic windows: SQL for percentiles of several windows, and removal of old windows."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django.db import DEFAULT_DB_ALIAS
from django.db.models.functions import Now

from psqlmessages.conf import get_settings
from psqlmessages.models import Traffic

Window = Traffic.Window

# In each window, half of the messages have at most the value p50, 95 % at most p95, 99 % at most
# p99. For several windows, each of these values stands for some messages. A percentile is the
# lowest value at which their sum reaches the wanted part of all messages. The caller must define
# `chosen`: rows of windows, each with a key.
PERCENTILES: Final = """
    SELECT key, kind,
        min(value) FILTER (WHERE below >= 0.5 * whole) AS p50,
        min(value) FILTER (WHERE below >= 0.95 * whole) AS p95,
        min(value) FILTER (WHERE below >= 0.99 * whole) AS p99
    FROM (
        SELECT key, kind, value,
            sum(weight) OVER (PARTITION BY key, kind ORDER BY value) AS below,
            -- The weights add up to 0.99 of the count; the factor 1 - 1e-9 allows for rounding.
            sum(weight) OVER (PARTITION BY key, kind) / 0.99 * (1 - 1e-9) AS whole
        FROM chosen CROSS JOIN LATERAL (VALUES
            ('latency', latency_p50, 0.5 * count::float8),
            ('latency', latency_p95, 0.45 * count::float8),
            ('latency', latency_p99, 0.04 * count::float8),
            ('size', size_p50, 0.5 * count::float8),
            ('size', size_p95, 0.45 * count::float8),
            ('size', size_p99, 0.04 * count::float8)
        ) AS point (kind, value, weight)
    ) AS points GROUP BY key, kind
"""
# Rows per transaction: few, so that other sessions hardly wait.
_BATCH: Final = 10_000


def prune(using: str = DEFAULT_DB_ALIAS) -> int:
    """Remove the windows that are older than the settings allow; return their number."""
    settings, traffic, removed = get_settings(), Traffic.objects.using(using), 0
    for window, days in (
        (Window.SECONDS_10, settings.TRAFFIC_DAYS_OF_TEN_SECONDS),
        (Window.MINUTE, settings.TRAFFIC_DAYS_OF_MINUTES),
        (Window.HOUR, settings.TRAFFIC_DAYS_OF_HOURS),
    ):
        expired = traffic.filter(window_seconds=window, starts_at__lt=Now() - timedelta(days=days))
        while batch := list(expired.order_by("starts_at").values_list("pk", flat=True)[:_BATCH]):
            removed += traffic.filter(pk__in=batch).delete()[0]
    return removed
