"""Killed at random, driver or Java, and started again: each row is there once.

ROWS=1000000 KILLS=9 gives the figures of the documentation.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import SystemRandom

import pytest

from tests.conftest import TestedServer
from tests.django.processes import ROOT
from tests.exchanges.test_kill import FAULT
from tests.pipeline import sinks
from tests.pipeline.sinks import QUEUE, TOPIC, Sink
from tests.reliability.counts import counted
from tests.sql.conftest import World

ROWS = int(os.environ.get("ROWS", "2000"))
KILLS = int(os.environ.get("KILLS", "1"))
BATCHES = 10 + 2 * KILLS
START_SECONDS = 600
END_SECONDS = 600
COMMITTED = "SELECT coalesce(sum(batch + 1), 0)::int FROM messages._batch WHERE role = 'user1'"
BODIES = """
    WITH given AS (SELECT format('message %%s', n) AS body FROM generate_series(1, %s) AS n),
    sent AS (
        SELECT m.payload AS body FROM psqlmessages_streammessage AS m
        JOIN psqlmessages_topic AS t ON t.id = m.topic_id AND t.name = %s
    ),
    pushed AS (
        SELECT e.body FROM psqlmessages_element AS e
        JOIN psqlmessages_queue AS q ON q.id = e.queue_id AND q.name = %s
    )
    SELECT (SELECT count(*) FROM (TABLE given EXCEPT ALL TABLE sent) AS lost_in_topic),
           (SELECT count(*) FROM (TABLE sent EXCEPT ALL TABLE given) AS double_in_topic),
           (SELECT count(*) FROM (TABLE given EXCEPT ALL TABLE pushed) AS lost_in_queue),
           (SELECT count(*) FROM (TABLE pushed EXCEPT ALL TABLE given) AS double_in_queue)
"""

pytestmark = [
    pytest.mark.timeout(60 + (KILLS + 1) * 900),
    # Each start of Java takes some seconds.
    pytest.mark.slow,
]


class Driver:
    """The program, in a process group of its own with its Java."""

    def __init__(self, server: TestedServer, folder: Path) -> None:
        self._log = (folder / "log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.sink_program",
             str(folder), TOPIC, QUEUE, str(ROWS // BATCHES)],
            env={**os.environ, "PSQLMESSAGES_DSN": server.url("user1")},
            cwd=ROOT, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def is_running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process.poll() is None

    def kill(self, *, only_java: bool) -> None:
        """End Java alone, at which the driver fails, or all at once."""
        if only_java:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            for child in children.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        else:
            # It may have ended by itself: it had all.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.ends()

    def ends(self) -> int:
        """Wait for its end; the signal or code."""
        code = self._process.wait(END_SECONDS)
        self._log.close()
        return code

    def close(self) -> None:
        self.kill(only_java=False)


@pytest.fixture
def sink(world: World, dsn_file: Callable[[str], str]) -> Sink:
    made = sinks.made(world, dsn_file)
    world.watcher.connection.execute("DELETE FROM messages._batch")
    return made


def committed(sink: Sink) -> int:
    return int(sink.world.watcher.query(COMMITTED))


def done(folder: Path) -> int:
    return sum(1 for _ in folder.glob("checkpoint of */commits/[0-9]*"))


def goes_on(folder: Path, driver: Driver) -> None:
    """Wait until a driver has done a batch, and then a while by chance.

    By its checkpoint: Python's workers, which outlive a driver by a moment, commit for the last.
    """
    before, waits = done(folder), threading.Event()
    for _ in range(START_SECONDS * 20):
        if done(folder) > before or not driver.is_running():
            break
        waits.wait(0.05)
    else:
        raise AssertionError(f"no batch was done in {START_SECONDS} s")
    waits.wait(SystemRandom().random() * (0.2 + ROWS / 300_000))


def test_killed_drivers_neither_lose_nor_double_rows(
    server: TestedServer, sink: Sink, fill: Callable[..., int], tmp_path: Path
) -> None:
    fill("IN", ROWS)
    killed = 0
    for number in range(KILLS):
        driver = Driver(server, tmp_path)
        try:
            goes_on(tmp_path, driver)
            print(f"\nkilled with {committed(sink)} of {2 * BATCHES} batches committed")
            killed += driver.is_running()
            driver.kill(only_java=number % 2 == 1)
        finally:
            driver.close()
    driver = Driver(server, tmp_path)
    try:
        assert driver.ends() == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        driver.close()
    found = sink.world.owner.connection.execute(BODIES, (ROWS, TOPIC, QUEUE)).fetchone()
    assert found is not None
    counted(
        FAULT,
        "the pipeline's sink, driver and Java in turn",
        kills=killed,
        rows=2 * ROWS,
        lost=found[0] + found[2],
        doubled=found[1] + found[3],
    )
    assert found == (0, 0, 0, 0)
    assert killed > 0, "every driver had all before it could be killed"
    assert (tmp_path / "topic").exists(), "no task has failed"
    assert committed(sink) >= 2 * BATCHES
