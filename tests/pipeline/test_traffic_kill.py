"""Traffic killed again and again, Python and Java in turn: each window is still that of SQL."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.django.processes import manage, start
from tests.exchanges.test_kill import FAULT
from tests.pipeline.traffic_field import JOB, SENDERS, TOPICS, TrafficField
from tests.reliability.counts import counted as told
from tests.sql.conftest import World

# Each takes a start of Spark. Of which KILLS=9 are wanted for the figures.
KILLS = int(os.environ.get("KILLS", "1"))


class Publishing(Thread):
    """Publishes without an end: in transactions that last, end out of order, and are undone."""

    def __init__(self, field: TrafficField) -> None:
        super().__init__()
        self._field = field
        self._is_over = Event()
        self._chance = random.Random(17)  # noqa: S311 - to be the same each time
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._publish()
        except BaseException as error:
            self.error = error
            raise

    def stop(self) -> None:
        self._is_over.set()
        self.join()
        assert self.error is None

    def _publish(self) -> None:
        programs = [self._field.new_publisher() for _ in range(4)]
        while not self._is_over.wait(0.02):
            program = self._chance.choice(programs)
            connection = program.connection
            if connection.info.transaction_status:
                connection.execute(self._chance.choice(["COMMIT", "COMMIT", "ROLLBACK"]))
                continue
            connection.execute("BEGIN")
            bodies = ["x" * self._chance.randrange(500) for _ in range(20)]
            topic, sender = self._chance.choice(TOPICS), self._chance.choice(SENDERS)
            program.ok("publish_many", sender, topic, bodies)
        for program in programs:
            program.connection.execute("ROLLBACK")


@pytest.mark.slow  # Spark is started for each kill, and once more
@pytest.mark.timeout(1500 + KILLS * 300)
def test_killed_again_and_again_each_window_is_that_of_sql(world: World, tmp_path: Path) -> None:
    field = TrafficField(world)
    arguments = (*JOB, "--checkpoint", str(tmp_path / "checkpoint"))
    publishing = Publishing(field)
    publishing.start()
    try:
        for number in range(KILLS):
            before = counted(field)
            process = start(world.server, *arguments, "--trigger", "0 seconds")
            until(lambda before=before: counted(field) > before, process)
            java = java_of(process.pid)
            Event().wait(random.SystemRandom().uniform(0, 2))
            os.kill(java if number % 2 else process.pid, signal.SIGKILL)
            process.communicate(timeout=600)
            # It would write to the same checkpoint.
            until(lambda java=java: not is_alive(java))
    finally:
        publishing.stop()
    done = manage(world.server, *arguments, "--once", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "reads 3 topics as pipeline.traffic" in done.stderr
    assert field.job("state", "lag_seconds", "error") == ("stopped", 0.0, "")
    written, expected = field.written(), field.expected()
    told(
        FAULT,
        "the job of traffic, Java and Python in turn",
        kills=KILLS,
        messages=field.owner.query("SELECT count(*) FROM messages.stored"),
        windows=len(expected),
        unlike_those_of_sql=sum(
            written.get(key) != expected.get(key) for key in written.keys() | expected.keys()
        ),
    )
    assert written == expected


def counted(field: TrafficField) -> int:
    found = field.owner.query(
        "SELECT coalesce(sum(count), 0) FROM psqlmessages_traffic WHERE window_seconds = 3600"
    )
    return int(found)


def until(is_so: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until it is so, some minutes at most, and not for a process that has ended."""
    for _ in range(12000):
        if is_so():
            return
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        Event().wait(0.05)
    raise AssertionError("never so")


def java_of(parent: int) -> int:
    """The Java process that a driver has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        name, (_, ppid) = status_of(int(entry.name))
        if name == "java" and ppid == parent:
            return int(entry.name)
    raise AssertionError(f"{parent} has no Java")


def is_alive(pid: int) -> bool:
    return status_of(pid)[1][0] not in ("", "Z", "X")


def status_of(pid: int) -> tuple[str, tuple[str, int]]:
    """The name of a process, its state and its parent; nothing where it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", ("", 0)
    name, _, rest = text.partition("(")[2].rpartition(") ")
    state, ppid = rest.split()[:2]
    return name, (state, int(ppid))
