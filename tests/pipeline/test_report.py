"""pipeline report: the figures are those of SQL, and the page stands alone, whatever names hold."""

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from pyspark.sql import SparkSession

from psqlmessages.management import pipeline_report
from psqlmessages.pipeline.report import compute, contents, html
from psqlmessages.pipeline.report.contents import Report
from psqlmessages.traffic_windows import Window
from tests.sql.conftest import World
from tests.web.measured import begin, forget, window
from tests.web.test_admin_exchanges import new

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DAY = contents.Period(NOW - timedelta(days=1), NOW)
HOSTILE = "</script><script>alert(1)</script>"
SQL_SUMS = """
    SELECT count(*), sum(octet_length(body)),
        percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY octet_length(body))
    FROM messages.stored WHERE topic <> 'OTHER'
"""


@pytest.fixture
def database(transactional_db: None, world: World) -> Iterator[World]:
    forget()
    return world


def amount(count: int = 1) -> contents.TrafficStatistics:
    return contents.TrafficStatistics(count, 10 * count, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def page_of(names: list[str], flows: tuple[contents.ExchangeFlow, ...] = ()) -> str:
    begin, amounts = int(DAY.begin.timestamp()), {name: amount() for name in names}
    total = amount(len(names)) if names else None
    steps, points = {begin: total} if total else {}, {name: {begin: 1} for name in names[:8]}
    figures = contents.ReportStatistics("tests", 300, total, steps, amounts, amounts, points)
    return html.render_page(Report(f"db {HOSTILE}", DAY, NOW, figures, list(flows)))


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def counts(amounts: dict[Any, contents.TrafficStatistics]) -> dict[Any, int]:
    return {name: each.count for name, each in amounts.items()}


def traffic(topics: str = "*", **back: int) -> contents.ReportStatistics:
    now = datetime.now(UTC)
    period = contents.Period(now - timedelta(**back), now)
    return pipeline_report.read_windows(period, topics, "default")


def report(*arguments: str, out: Path) -> str:
    call_command("psqlmessages", "pipeline", "report", "--out", str(out), *arguments)
    return out.read_text()


def test_times_in_usual_formats_are_read_and_steps_are_whole_windows():
    for text, expected in (
        ("24h", NOW - timedelta(days=1)), ("0s", NOW), ("7 d", NOW - timedelta(days=7)),
        ("2026-11-20", datetime(2026, 11, 20, tzinfo=UTC)),
        ("2026-11-20T12:30", datetime(2026, 11, 20, 12, 30, tzinfo=UTC)),
        ("2026-11-20T12:30+02:00", datetime(2026, 11, 20, 10, 30, tzinfo=UTC)),
    ):  # fmt: skip
        assert contents.parse_time(text, NOW) == expected, text
    for text in ("", "yesterday", "12", "h", "2026-13-01", "9999999999d", f"{'9' * 5000}h"):
        with pytest.raises(ValueError, match="24h"):
            contents.parse_time(text, NOW)
    for seconds in (1, 59, 3600, 86400, 7 * 86400, 40 * 86400, 5 * 366 * 86400):
        for length in (1, 10, 60, 3600):
            step = contents.Period(NOW - timedelta(seconds=seconds), NOW).step(length)
            assert (step % length, seconds / step <= 400) == (0, True)


def test_the_page_needs_nothing_but_itself():
    head, _, rest = page_of(["A"]).partition('<script type="application/json"')
    for part in (head, rest.rpartition("<script>")[2]):
        assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:|//)|(im|ex)port """, part)
    assert "default-src 'none'" in head


def test_names_are_text_wherever_they_stand():
    destination = {"to": ("default", HOSTILE), "selector": HOSTILE, "copies": 3}
    flow = contents.ExchangeFlow(HOSTILE, ("default", HOSTILE), [destination], {"ok": 3})
    page = page_of([HOSTILE, "a & b", "<b>"], (flow,))
    assert HOSTILE not in page
    assert page.count("<script") == page.count("</script") == 2
    data = data_of(page)
    assert (data["points"][0][0], data["exchanges"][0]["destinations"][0]["copies"]) == (HOSTILE, 3)
    assert "a &amp; b" in page


@pytest.mark.usefixtures("database")
def test_figures_of_traffic_are_the_sums_of_its_windows():
    for back in (1, 2):
        window("A", "one", length=60, back=back, count=10, bytes=100)
        window("A", "two", length=60, back=back, count=20, bytes=100)
    window("B", "one", length=60, back=1, count=5, bytes=1, latency_p99=9000)
    window("A", "one", length=3600, back=0, count=999)
    found = traffic(minutes=10)
    assert (found.step, found.total.count, found.total.bytes) == (60, 65, 401)
    assert counts(found.topics | found.senders) == {"A": 60, "B": 5, "two": 40, "one": 25}
    assert sorted(counts(found.steps).values()) == [30, 35]
    assert sorted(found.points["A"].values()) == [30, 30]
    assert found.topics["B"].latency == (120, 250, 9000)
    assert found.counted == (begin(60, 2), begin(60))


@pytest.mark.usefixtures("database")
def test_topics_are_chosen_by_pattern_and_the_windows_that_reach_back():
    for topic in ("A", "B.one", "B.two", "C"):
        window(topic, length=10, back=2)
    window("A", length=60, back=4)
    window("A", length=3600, back=30)
    assert sorted(traffic("A, B.*", seconds=30).topics) == ["A", "B.one", "B.two"]
    for length, back in ((10, {"seconds": 30}), (60, {"minutes": 5}), (3600, {"days": 2})):
        assert f"windows of {Window(length).label}," in traffic(**back).source
    forget()
    assert pipeline_report.read_windows(DAY, "*", "default") is None


@pytest.mark.usefixtures("database")
def test_the_command_writes_the_page_with_the_exchanges(tmp_path: Path, capsys):
    window("ORDERS", "SHOP", count=4711)
    new("sort", "orders", "eu")
    page = report("--from", "10m", out=tmp_path / "report.html")
    assert "4,711" in page
    assert data_of(page)["exchanges"][0]["name"] == "sort"
    assert capsys.readouterr().out.strip().endswith("report.html")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(SystemExit):
        report("--of", "traffic", "--archive", "archive", out=tmp_path / "report.html")
    assert "--archive reads messages" in capsys.readouterr().err


def test_figures_equal_those_of_sql(spark: SparkSession, world: World, fill: Callable[..., int]):
    world.rule(world.owner.query("SELECT session_user"), "pipeline.*", "Topic", "*", "R", 60)
    world.rules("user1 N Topic A.1 W 60")
    for topic, count, text in (("A.1", 300, "body of %s"), ("B", 50, "x"), ("OTHER", 10, "x")):
        fill(topic, count, text)
    world.program("user1").ok("publish", "N", "A.1", "é" * 100)
    now = datetime.now(UTC)
    hour = contents.Period(now - timedelta(hours=1), now + timedelta(minutes=1))
    found = compute.compute_statistics(spark, hour, topics="A.*,B")
    count, size, shares = world.execute(SQL_SUMS).fetchone()
    assert (found.total.count, found.total.bytes, count) == (351, size, 351)
    assert found.total.size == pytest.approx(shares)
    assert found.total.latency is None
    assert counts(found.topics) == {"A.1": 301, "B": 50}
    assert counts(found.senders) == {"FILL": 350, "N": 1}
    assert sum(counts(found.steps).values()) == 351
    assert sum(found.points["A.1"].values()) == 301
    assert min(found.steps) % found.step == 0
