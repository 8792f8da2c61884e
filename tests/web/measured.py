"""What the pipeline would have written: windows of traffic, and jobs, for the tests of pages."""

import os
import uuid
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from django.db.models import F
from django.utils import timezone

from psqlmessages.models import Exchange, ExchangeCount, PipelineJob, Traffic
from psqlmessages.pipeline.report import contents, html

HOSTILE = "<script>alert(1)</script><b>x</b>"
YEAR_SECONDS = 365 * 24 * 60 * 60
USUAL = {
    "count": 20, "bytes": 4000, "size_p50": 180, "size_p95": 400, "size_p99": 900,
    "latency_p50": 120, "latency_p95": 250, "latency_p99": 800,
}  # fmt: skip


def begin(window: int, back: int = 0) -> int:
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    return (_moment(test) // window - back) * window


@cache
def _moment(_test: str) -> int:
    """Return one moment for all windows of a test."""
    return int(timezone.now().timestamp())


def window(
    topic: str, sender: str = "SENDER", *, back: int = 1, length: int = 10, **values: Any
) -> Traffic:
    """Create a window that ended so many windows ago."""
    starts_at = datetime.fromtimestamp(begin(length, back), tz=UTC)
    given = {**USUAL, "window_seconds": length, "starts_at": starts_at, **values}
    return Traffic.objects.create(topic=topic, sender=sender, **given)


def job(name: str = "traffic", *, silent: float = 0, **values: Any) -> PipelineJob:
    """Create a job with a last heartbeat so many seconds ago, or one that stays alive."""
    silent = silent or -YEAR_SECONDS
    given = {
        "state": PipelineJob.State.RUNNING, "rows": 1234, "rows_per_second": 56.7,
        "lag_seconds": 0, "last_batch": 7, "last_batch_at": timezone.now(), **values,
    }  # fmt: skip
    made = PipelineJob.objects.create(name=name, **given)
    PipelineJob.objects.filter(pk=made.pk).update(seen_at=F("seen_at") - timedelta(seconds=silent))
    return made


def count(exchange: Exchange, *rows: tuple[str, int, int], **routed: Any) -> None:
    """Write rows of two processes, one of them gone; `routed`: more fields of those with OK."""
    for seen_at in ("2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z"):
        given = {"exchange": exchange, "worker": uuid.uuid4(), "seen_at": seen_at}
        for outcome, to, number in rows:
            more = routed if outcome == ExchangeCount.Outcome.OK else {}
            row = given | {"outcome": outcome, "destination": to, "count": number} | more
            ExchangeCount.objects.create(**row)


def forget() -> None:
    Traffic.objects.all().delete()
    PipelineJob.objects.all().delete()


def report(folder: Path, *, is_empty: bool = False) -> str:
    end = datetime(2026, 11, 21, 12, tzinfo=UTC)
    period = contents.Period(end - timedelta(hours=1), end)
    first, step = int(period.begin.timestamp()), 60
    amount = contents.TrafficStatistics(60, 600, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    total = contents.TrafficStatistics(3600, 36000, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    steps = {first + step * number: amount for number in range(60)}
    points = {HOSTILE: dict.fromkeys(steps, 40), "A": dict.fromkeys(steps, 15)}
    named = {HOSTILE: total}
    figures = contents.ReportStatistics("tests", step, total, steps, named, named, points)
    if is_empty:
        figures = contents.ReportStatistics("tests", step, None, {}, {}, {}, {})
    destination = {"to": ("default", HOSTILE), "selector": HOSTILE, "copies": 1234}
    outcomes = {"ok": 1300, "no_route": 66}
    flow = contents.ExchangeFlow(HOSTILE, ("default", "orders"), [destination], outcomes)
    flows = [] if is_empty else [flow]
    page = folder / "report.html"
    page.write_text(html.render_page(contents.Report("db on host", period, end, figures, flows)))
    return page.as_uri()
