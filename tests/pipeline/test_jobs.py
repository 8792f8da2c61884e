"""Jobs: they end after the batch at hand, tell how they fare, and say in a line what failed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.pipeline import jobs, traffic
from psqlmessages.pipeline.jobs import JobFailed, Progress
from psqlmessages.pipeline.lag import Lag
from tests.django.processes import manage, start
from tests.pipeline.traffic_field import JOB, TrafficField
from tests.sql.conftest import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Start = Callable[..., "StreamingQuery"]


@pytest.fixture
def field(world: World) -> TrafficField:
    return TrafficField(world)


@pytest.fixture
def query(field: TrafficField, spark: SparkSession, checkpoint: str) -> Start:
    """Start a query over the field's topics, whose batches are handed to a function."""

    def begin(write: Callable[[Any], object], **trigger: Any) -> StreamingQuery:
        return traffic.start(
            spark, write, checkpoint=checkpoint, trigger=trigger or {"processingTime": "0 seconds"}
        )

    return begin


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_batch_at_hand_end(
    field: TrafficField, query: Start, checkpoint: str, number: signal.Signals
) -> None:
    began, go_on, told = Event(), Event(), list[Progress]()
    batches: list[Any] = []

    def write(windows: Any) -> None:
        began.set()
        assert go_on.wait(600)
        batches.append(windows)

    def interrupt() -> None:
        began.wait(600)
        os.kill(os.getpid(), number)
        # It is looked for the end of the batch now, and none may come before it is let go.
        Event().wait(0.5)
        assert not batches
        go_on.set()

    field.publish(10)
    running = query(write)
    thread = Thread(target=interrupt)
    thread.start()
    jobs.follow(running, told.append, lambda: None, lambda _: None)
    thread.join()
    assert len(batches) == 1
    assert (Path(checkpoint) / "commits" / "0").exists()
    assert not running.isActive
    assert (told[-1].state, told[-1].batch, told[-1].rows) == ("stopped", 0, 10)


def test_the_lag_is_the_age_of_what_waits_and_falls_to_zero(
    field: TrafficField, query: Start
) -> None:
    began, go_on, told = Event(), Event(), list[Progress]()
    batches: list[Any] = []

    def write(windows: Any) -> None:
        batches.append(windows)
        if len(batches) == 2:
            began.set()
            assert go_on.wait(600)

    def second() -> None:
        for _ in range(6000):
            if told and told[-1].lag_seconds == 0:
                break
            Event().wait(0.1)
        field.publish(5, "PARCELS", "STORE")
        began.wait(600)
        for _ in range(6000):
            if told[-1].lag_seconds:
                break
            Event().wait(0.1)
        go_on.set()
        for _ in range(6000):
            if told[-1].lag_seconds == 0 and told[-1].batch == 1:
                break
            Event().wait(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    field.publish(10)
    running = query(write)
    thread = Thread(target=second)
    thread.start()
    lag = Lag(running, traffic.CLIENT, ["*"])
    try:
        jobs.follow(running, told.append, lag, lambda _: None)
    finally:
        thread.join()
        lag.close()
    waited = [each.lag_seconds for each in told if each.lag_seconds]
    assert 0 < max(waited) < 300
    assert told[-1].lag_seconds == 0
    assert told[-1].rows == 15


def test_a_lag_that_cannot_be_asked_for_ends_no_job(field: TrafficField, query: Start) -> None:
    told, said = list[Progress](), list[str]()

    def lag() -> float | None:
        raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")

    field.publish(3)
    running = query(lambda _: None, availableNow=True)
    jobs.follow(running, told.append, lag, said.append)
    assert (told[-1].state, told[-1].rows, told[-1].lag_seconds) == ("stopped", 3, None)
    assert said.count("the lag is not known: canceling statement due to statement timeout") == 1


def test_a_query_that_fails_says_why_in_one_line(field: TrafficField, query: Start) -> None:
    told: list[Progress] = []

    def write(_: Any) -> None:
        raise ServerUnreachable("nobody is there")

    field.publish(1)
    with pytest.raises(JobFailed, match=r"^nobody is there$"):
        jobs.follow(query(write, availableNow=True), told.append, lambda: 0.0, lambda _: None)
    assert (told[-1].state, told[-1].error) == ("failed", "nobody is there")


def test_a_database_that_is_away_is_told_as_waiting(field: TrafficField, query: Start) -> None:
    told, lines = list[Progress](), list[str]()

    def away() -> float:
        raise ServerUnreachable("it is away")

    field.publish(1)
    jobs.follow(query(lambda _: None, availableNow=True), told.append, away, lines.append)
    assert "waits for the database" in lines
    assert "waiting" in {each.state for each in told}
    assert told[-1].state == "stopped"


@pytest.mark.timeout(1500)
def test_a_job_that_runs_tells_so_and_ctrl_c_ends_it(field: TrafficField, tmp_path: Path) -> None:
    process = start(
        field.world.server, *JOB, "--trigger", "0 seconds", "--checkpoint", str(tmp_path)
    )  # fmt: skip
    try:
        field.publish(7)
        for _ in range(6000):
            if field.job("state", "rows", "lag_seconds") == ("running", 7, 0.0):
                break
            Event().wait(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert "ends after the batch at hand" in said
    assert field.job("state", "rows", "last_batch", "lag_seconds") == ("stopped", 7, 0, 0.0)


def test_without_a_right_it_fails_before_spark_has_started(
    field: TrafficField, tmp_path: Path
) -> None:
    field.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'pipeline.*'")
    done = manage(
        *(field.world.server, *JOB, "--topic", "ORDERS", "--once"),
        *("--checkpoint", str(tmp_path / "none")),
    )  # fmt: skip
    state, error = field.job("state", "error")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"psqlmessages: {error}"
    assert state == "failed"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "wrong", [("--conf", "spark"), ("--trigger", "soon"), ("--lateness", "-1"), ("--rows", "0")]
)
def test_arguments_that_mean_nothing_are_refused(wrong: tuple[str, str]) -> None:
    from django.core.management import CommandError, call_command

    with pytest.raises(CommandError, match=wrong[0]):
        call_command("psqlmessages", "pipeline", "traffic", *wrong)
