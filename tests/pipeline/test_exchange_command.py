"""manage.py psqlmessages pipeline exchange: a process that routes until it is told to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from psqlmessages.graph import stored
from psqlmessages.models import ExchangeCount, PipelineJob
from tests.django.processes import ROOT, environment, manage
from tests.exchanges.field import Field

# Each starts Spark, which takes a while where other work goes on.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(1500)]

COMMAND = (sys.executable, "-m", "django", "psqlmessages", "pipeline", "exchange")


class Job:
    """The process, and the lines it has said."""

    def __init__(self, field: Field, *arguments: str) -> None:
        self._field = field
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--master", "local[2]", "--conf", "spark.driver.memory=512m"],
            # Spark's own processes leave files to the garbage collector.
            env={**environment(field.default.server), "PYTHONWARNINGS": ""},
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += (line.rstrip() for line in self.process.stderr)

    def until_said(self, line: str) -> None:
        """Wait until it has said so."""
        self._field.until(lambda: line in self.lines or self.process.poll() is not None, 600)
        assert line in self.lines, self.lines

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Tell it to end, and wait until it has; its exit code."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(600)
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        print("", *self.lines, sep="\n")
        return code


@pytest.fixture
def job(field: Field) -> Iterator[Job]:
    field.define(x1={"src": "a", "dst": ["b"]})
    job = Job(field, "x1", "--tasks", "2", "--span", "1")
    yield job
    if job.process.poll() is None:
        job.process.kill()
        job.end(None)


def test_it_runs_the_exchange_as_it_is_defined_until_it_is_told_to_end(
    field: Field, job: Job
) -> None:
    job.until_said("runs x1; Ctrl-C ends it")
    field.default.push_many("a", ["it"] * 5)
    field.until(lambda: len(field.default.bodies("b")) == 5, 300)
    field.define(x1={"src": "a", "dst": ["c"]})
    field.until(lambda: field.default.push("a", "new") or field.default.bodies("c"), 300)
    stored.set_running("x1", is_running=False)
    job.until_said("x1 is stopped")
    field.until(
        lambda: field.default.push("a", "late") or len(field.default.bodies("a")) > 200, 100
    )
    stored.set_running("x1", is_running=True)
    field.until(lambda: len(field.default.bodies("a")) < 200, 300)
    assert job.end() == 0, job.lines
    routed = sum(len(field.default.bodies(queue)) for queue in "bc")
    assert "ends after the batch at hand; once more ends it at once" in job.lines
    # Among them: PySpark's daemon may complain after it that its Java has gone.
    assert (
        f"stopped: {routed} routed, 0 no route, 0 too many hops, 0 failed; 0 selectors failed"
        in job.lines
    )
    assert sum(row.count for row in ExchangeCount.objects.filter(outcome="ok")) == routed
    row = PipelineJob.objects.get(name="exchange x1")
    assert (row.state, row.rows) == ("stopped", routed)


def test_an_exchange_that_is_not_there_is_said_before_spark_starts(field: Field) -> None:
    done = manage(field.default.server, *COMMAND[3:], "x2")
    assert (done.returncode, done.stderr) == (1, "psqlmessages: there is no exchange x2\n")
