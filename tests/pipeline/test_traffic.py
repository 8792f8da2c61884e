"""Jobs: windows of traffic are those that SQL computes, and a job tells how it fares."""

import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from django.core.management import CommandError, call_command
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from project.postgres import Server
from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.management.pipeline import JobContext
from psqlmessages.pipeline import job_runner, traffic
from psqlmessages.pipeline.job_runner import JobFailed, JobProgress, JobRunner
from psqlmessages.pipeline.offsets import Lag
from psqlmessages.pipeline.traffic import TrafficTable, TrafficWindow
from tests.exchanges.conftest import namespace
from tests.pipeline.processes import until
from tests.pipeline.traffic_field import SENDERS, TOPICS, TrafficField
from tests.sql.conftest import World

Query = Callable[..., StreamingQuery]
pytestmark = pytest.mark.usefixtures("django")


@pytest.fixture
def field(world: World) -> TrafficField:
    return TrafficField(world)


@pytest.fixture
def table() -> Iterator[TrafficTable]:
    with closing(TrafficTable()) as table:
        yield table


@pytest.fixture
def query(field: TrafficField, spark: SparkSession, checkpoint: str, monkeypatch) -> Query:
    monkeypatch.setattr(job_runner, "RECORD_SECONDS", 0.1)
    return lambda write, **given: traffic.start(
        spark, write, **{"checkpoint": checkpoint, "trigger": {"availableNow": True}, **given}
    )


def followed(query: StreamingQuery, lag: Any = lambda: None) -> tuple[list[JobProgress], list[str]]:
    """Wait for the end of a query; return its progress and the printed lines."""
    told: list[JobProgress] = []
    lines: list[str] = []
    JobRunner(query, told.append, lag, lines.append).run()
    return told, lines


def test_windows_equal_those_of_sql_despite_late_and_repeated_rows(
    field: TrafficField, query: Query, table: TrafficTable, checkpoint: str, tmp_path: Path
):
    batches: list[list[TrafficWindow]] = []

    def write(windows: list[TrafficWindow]) -> None:
        batches.append(sorted(windows, key=lambda each: (each.topic, each.sender, each.starts_at)))
        table.write(windows)

    late, undone = field.world.program("user1"), field.world.program("user1")
    for program in (late, undone):
        program.execute("BEGIN")
        program.ok("publish_many", "STORE", "PARCELS", ["late"] * 7)
    field.publish_everywhere(40)
    field.spread(2 * 60 * 60)
    given: dict[str, Any] = {"lateness": timedelta(hours=3)}
    followed(query(write, **given))
    held_back = {key[0] for key in field.written()}
    late.execute("COMMIT")
    undone.execute("ROLLBACK")
    # As if it had been killed between the writing and the commit.
    (Path(checkpoint) / "commits" / "0").unlink()
    followed(query(write, **given, options={"maxRowsPerTrigger": "50"}))
    assert held_back == {"ORDERS", "BILLS"}
    assert batches[0] == batches[1]
    assert len(batches) > 3
    assert len(field.expected()) > len(TOPICS) * len(SENDERS) * 3
    assert field.written() == field.expected()
    # A new job does not reduce windows of which it reads only a part.
    before = field.written()
    oldest = "SELECT id FROM messages.stored ORDER BY id LIMIT 20"
    field.owner.execute(f"DELETE FROM psqlmessages_streammessage WHERE id IN ({oldest})")
    followed(query(table.write, **given, checkpoint=str(tmp_path / "another")))
    assert field.written() == before


def test_late_messages_are_not_counted(field: TrafficField, query: Query, table: TrafficTable):
    moment = datetime.now(UTC) - timedelta(hours=1)
    for hours in (3, 0, 0, 3, 0):
        field.publish(3)
        field.date(moment - timedelta(hours=hours), the_last=3)
    given = {"lateness": timedelta(minutes=2), "options": {"maxRowsPerTrigger": "3"}}
    running = query(table.write, **given)
    _, lines = followed(running)
    kept = [int(each.stateOperators[0].numRowsTotal) for each in running.recentProgress]
    too_late = [line for line in lines if line.startswith("too late")]
    assert [line.partition(" b")[0] for line in too_late] == ["too late: 3 windows were closed"]
    # One window of each length; those of three hours ago are closed.
    assert (kept[0], kept[-1]) == (3, 3)


def test_latency_is_from_publishing_to_the_batch_and_never_negative(spark: SparkSession):
    # 1, 2, … 100 seconds before a moment in the same hour; and one with a clock ahead.
    before = datetime.now(UTC)
    hour_starts = (before - timedelta(seconds=100)).replace(minute=0, second=0, microsecond=0)
    latest = min(before, hour_starts + timedelta(hours=1))
    made = spark.range(1, 101).selectExpr(
        "'T' AS topic", "'S' AS sender", "'' AS body",
        f"timestamp_micros({round(latest.timestamp() * 1e6)})"
        " - make_interval(0, 0, 0, 0, 0, 0, id) AS published_at",
    )  # fmt: skip
    names = "'A' AS topic, 'S' AS sender, '' AS body, now() + INTERVAL 1 HOUR AS published_at"
    both = made.unionAll(spark.sql(f"SELECT {names}"))
    found = traffic.collect_windows(traffic.group_by_window(both))
    hour = next(each for each in found if each.topic == "T" and each.window_seconds == 3600)
    least = (before - latest).total_seconds() * 1000 + 50_500
    assert hour.starts_at == hour_starts
    assert least - 1000 <= hour.latency_p50 <= least + 60_000
    assert hour.latency_p95 - hour.latency_p50 == pytest.approx(44_550, abs=1500)
    assert {each.latency_p50 for each in found if each.topic == "A"} == {0}


def test_a_job_shows_its_lag_and_ends_by_signal(field: TrafficField, query: Query, checkpoint: str):
    began, go_on, told = Event(), Event(), list[JobProgress]()
    batches: list[Any] = []

    def write(windows: Any) -> None:
        if batches:
            began.set()
            assert go_on.wait(600)
        batches.append(windows)

    def act() -> None:
        until(lambda: told and told[-1].lag_seconds == 0 and told[-1].batch == 0)
        field.publish(5, "PARCELS", "STORE")
        began.wait(600)
        until(lambda: told[-1].lag_seconds)
        os.kill(os.getpid(), signal.SIGTERM)
        # The job now waits for the end of the batch.
        Event().wait(0.5)
        assert len(batches) == 1
        go_on.set()

    field.publish(10)
    running = query(write, trigger={"processingTime": "0 seconds"})
    thread = Thread(target=act)
    thread.start()
    with closing(Lag(running, traffic.IDENT, ["*"])) as lag:
        JobRunner(running, told.append, lag, lambda _: None).run()
        thread.join()
    assert len(batches) == 2
    assert (Path(checkpoint) / "commits" / "1").exists()
    assert not running.isActive
    assert (told[-1].state, told[-1].batch, told[-1].rows) == ("stopped", 1, 15)
    assert told[-1].lag_seconds == 0
    assert 0 < max(each.lag_seconds or 0 for each in told) < 300


def test_an_absent_database_is_waiting_and_no_lag_ends_a_job(field: TrafficField, query: Query):
    asked = Event()
    canceled = psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
    errors = [canceled, ServerUnreachable("it is away")]

    def lag() -> float | None:
        if errors:
            raise errors.pop(0)
        asked.set()
        return None

    field.publish(3)
    told, lines = followed(query(lambda _: asked.wait(600)), lag)
    assert [line for line in lines if not line.startswith("batch ")] == [
        "the lag is unknown: canceling statement due to statement timeout",
        "waiting for the database", "continuing",
    ]  # fmt: skip
    assert "waiting" in {each.state for each in told}
    assert (told[-1].state, told[-1].rows, told[-1].lag_seconds) == ("stopped", 3, None)


def test_a_query_that_fails_says_why_in_one_line(field: TrafficField, query: Query):
    told: list[JobProgress] = []

    def write(_: Any) -> None:
        raise ServerUnreachable("nobody is there")

    field.publish(1)
    with pytest.raises(JobFailed) as raised:
        JobRunner(query(write), told.append, lambda: 0.0, lambda _: None).run()
    assert str(raised.value) == "nobody is there"
    assert (told[-1].state, told[-1].error) == ("failed", "nobody is there")


def test_the_command_counts_available_elements_and_fails_without_a_right(
    field: TrafficField, spark: SparkSession, checkpoint: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    command = ("psqlmessages", "pipeline", "traffic", "--once")
    field.publish_everywhere(7)
    call_command(*command, "--checkpoint", checkpoint)
    assert "reading 3 topics as pipeline.traffic" in capsys.readouterr().err
    assert field.job("state", "rows", "lag_seconds", "error") == ("stopped", 42, 0.0, "")
    assert field.written() == field.expected() != {}
    field.owner.execute("DELETE FROM messages.auth WHERE ident = 'pipeline.*'")
    see = "See https://psqlmessages.readthedocs.io/en/stable/reference/errors/#error-16"
    for topics, dest in (("ORDERS", "ORDERS"), ("*", "*"), ("ORDERS,B", "TOPIC")):
        with pytest.raises((SystemExit, MessagesError)):
            call_command(*command, "--topic", topics, "--checkpoint", str(tmp_path / "none"))
        state, error = field.job("state", "error")
        rule = f"('{Server.owner}', 'pipeline.traffic', 'Topic', '{dest}', 'R', 60)"
        assert (state, rule in error) == ("failed", True), error
        assert capsys.readouterr().err == f"psqlmessages: {error}\n{see}\n"
    assert not (tmp_path / "none").exists()


def test_behind_a_pooler_jobs_connect_by_the_alias_direct():
    direct = namespace("direct", OPTIONS={"application_name": "direct"})
    job = JobContext("traffic", Namespace(database="default"))
    with patch.dict(os.environ), direct, job:
        assert "application_name=direct" in os.environ["PSQLMESSAGES_DSN"]


def test_arguments_that_mean_nothing_are_refused():
    for option, value in (
        ("--conf", "spark"), ("--trigger", "soon"), ("--lateness", "-1"), ("--rows", "0"),
    ):  # fmt: skip
        with pytest.raises(CommandError, match=option):
            call_command("psqlmessages", "pipeline", "traffic", option, value)
