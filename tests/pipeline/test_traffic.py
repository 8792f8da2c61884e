"""Traffic: windows are those that SQL computes of the same messages, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from psqlmessages.pipeline import jobs, traffic
from psqlmessages.pipeline.traffic import Window
from psqlmessages.pipeline.traffic_table import TrafficTable
from tests.pipeline.traffic_field import SENDERS, TOPICS, TrafficField
from tests.sql.conftest import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Run = Callable[..., list[str]]


@pytest.fixture
def field(world: World) -> TrafficField:
    return TrafficField(world)


@pytest.fixture
def table() -> Iterator[TrafficTable]:
    with closing(TrafficTable()) as table:
        yield table


@pytest.fixture
def run(spark: SparkSession, table: TrafficTable, checkpoint: str) -> Run:
    """Count what is there and end; the lines that were printed."""

    def run(write: Callable[[Any], object] = table.write, **arguments: Any) -> list[str]:
        lines: list[str] = []
        query = traffic.start(
            spark,
            write,
            **{"checkpoint": checkpoint, "trigger": {"availableNow": True}, **arguments},
        )
        jobs.follow(query, lambda _: None, lambda: None, lines.append)
        return lines

    return run


def test_windows_are_those_of_sql(field: TrafficField, run: Run) -> None:
    field.publish_everywhere(200)
    field.spread(2 * 60 * 60)
    run(lateness=timedelta(hours=3), options={"maxRowsPerTrigger": "500"})
    assert len(field.expected()) > len(TOPICS) * len(SENDERS) * 3
    assert field.written() == field.expected()


def test_what_commits_late_is_counted_and_what_is_rolled_back_is_not(
    field: TrafficField, run: Run
) -> None:
    late, undone = field.new_publisher(), field.new_publisher()
    for program in (late, undone):
        program.connection.execute("BEGIN")
        program.ok("publish_many", "STORE", "PARCELS", ["late"] * 7)
    field.publish_everywhere(20)
    run()
    held_back = {key[0] for key in field.written()}
    late.connection.execute("COMMIT")
    undone.connection.execute("ROLLBACK")
    field.publish_everywhere(20)
    run()
    assert held_back == {"ORDERS", "BILLS"}
    assert field.written() == field.expected()


def test_a_batch_that_is_replayed_doubles_nothing(
    field: TrafficField, run: Run, table: TrafficTable, checkpoint: str
) -> None:
    batches: list[list[Window]] = []

    def write(windows: list[Window]) -> None:
        batches.append(sorted(windows, key=lambda window: (window.topic, window.window_seconds)))
        table.write(windows)

    field.publish(30)
    run(write)
    # As after a kill between the writing and the note that the batch has ended.
    (Path(checkpoint) / "commits" / "0").unlink()
    field.publish(30)
    run(write)
    assert batches[0] == batches[1]
    assert len(batches) == 3
    assert field.written() == field.expected()


def test_what_comes_too_late_is_said_and_windows_that_are_over_are_kept_no_more(
    field: TrafficField, spark: SparkSession, table: TrafficTable, checkpoint: str
) -> None:
    lines: list[str] = []
    moment = datetime.now(UTC) - timedelta(hours=1)
    for hours in (3, 0, 0, 3, 0):
        field.publish(3)
        field.date(moment - timedelta(hours=hours), the_last=3)
    query = traffic.start(
        spark, table.write, checkpoint=checkpoint, trigger={"availableNow": True},
        lateness=timedelta(minutes=2), options={"maxRowsPerTrigger": "3"},
    )  # fmt: skip
    jobs.follow(query, lambda _: None, lambda: None, lines.append)
    kept = [int(each.stateOperators[0].numRowsTotal) for each in query.recentProgress]
    too_late = [line for line in lines if line.startswith("too late")]
    assert [line.partition(" when")[0] for line in too_late] == ["too late: 3 windows were closed"]
    # One of each length; those of three hours ago are gone.
    assert (kept[0], kept[-1]) == (3, 3)


def test_a_job_that_begins_anew_lessens_no_window(
    field: TrafficField, run: Run, tmp_path: Path
) -> None:
    field.publish(50)
    run()
    before = field.written()
    field.forget(20)
    run(checkpoint=str(tmp_path / "another"))
    assert field.written() == before


def test_latency_is_from_publishing_to_the_batch_and_never_negative(spark: SparkSession) -> None:
    # 1, 2, … 100 seconds before a moment whose hour has all of them; and one by a clock ahead.
    before = datetime.now(UTC)
    hour_starts = (before - timedelta(seconds=100)).replace(minute=0, second=0, microsecond=0)
    latest = min(before, hour_starts + timedelta(hours=1))
    made = spark.range(1, 101).selectExpr(
        "'T' AS topic", "'S' AS sender", "'' AS body",
        f"timestamp_micros({round(latest.timestamp() * 1e6)})"
        " - make_interval(0, 0, 0, 0, 0, 0, id) AS published_at",
    )  # fmt: skip
    ahead = spark.sql(
        "SELECT 'A' AS topic, 'S' AS sender, '' AS body, now() + INTERVAL 1 HOUR AS published_at"
    )
    found = traffic.collected(traffic.windows(made.unionAll(ahead)))
    hour = next(each for each in found if each.topic == "T" and each.window_seconds == 3600)
    least = (before - latest).total_seconds() * 1000 + 50_500
    assert hour.starts_at == hour_starts
    assert least - 1000 <= hour.latency_p50 <= least + 60_000
    assert hour.latency_p95 - hour.latency_p50 == pytest.approx(44_550, abs=1500)
    assert {each.latency_p50 for each in found if each.topic == "A"} == {0}
