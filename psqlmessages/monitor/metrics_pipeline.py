"""Metrics of the pipeline: how its jobs fare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from psqlmessages.graph.counted import ALIVE_SECONDS

JOBS: Final = 200

_JOBS: Final = """
    SELECT name,
        state NOT IN ('stopped', 'failed')
            AND seen_at > statement_timestamp() - make_interval(secs => %s),
        state = 'failed', lag_seconds, rows, rows_per_second, last_batch,
        extract(epoch FROM seen_at)::float8
    FROM psqlmessages_pipelinejob ORDER BY name LIMIT %s
"""
# What is asked, with its values.
QUESTION: Final = (_JOBS, (ALIVE_SECONDS, JOBS))
_FIGURES: Final = {
    "alive": "Whether the job gave a sign of life in the last 10 s, and has not ended",
    "failed": "Whether the job has ended by an error",
    "lag_seconds": "Age of the oldest message that the job has not read yet",
    "rows": "Rows that the job has read since it was started",
    "rows_per_second": "Rows that the job reads each second",
    "last_batch": "Number of its last batch; -1: none yet",
    "seen_timestamp_seconds": "When the job last gave a sign of life, as Unix time",
}


def families(rows: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the families of the jobs; a lag that is not known, or of old, is left out."""
    from prometheus_client.core import GaugeMetricFamily

    found = {
        name: GaugeMetricFamily(f"psqlmessages_pipeline_{name}", text, labels=("job",))
        for name, text in _FIGURES.items()
    }
    for job, is_alive, *values in rows:
        for name, value in zip(_FIGURES, (is_alive, *values), strict=True):
            is_of_now = name not in ("lag_seconds", "rows_per_second") or is_alive
            if value is not None and is_of_now:
                found[name].add_metric((job,), float(value))
    yield from found.values()
