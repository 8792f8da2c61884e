"""Spark killed with -9 under load: each element of a source still gives its copies once."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import SystemRandom

import pytest

from psqlmessages.graph import stored
from psqlmessages.pipeline.exchange_definition import written
from tests.conftest import TestedServer
from tests.django.processes import ROOT
from tests.exchanges.conftest import EU
from tests.exchanges.field import Bed, Field
from tests.exchanges.test_kill import EXPIRE, tell

# Of which KILLS=5 ELEMENTS=40000 are wanted for the figures.
KILLS = int(os.environ.get("KILLS", "1"))
ELEMENTS = int(os.environ.get("ELEMENTS", "4000"))

# Each kill is of a Spark that has to start first.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(1500 * KILLS)]
BEGUN = """
    SELECT count(*) > %s FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'b'
"""
COUNT = """
    SELECT count(*) FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'b'
"""


class Driver:
    """A driver and its Java, in a group of their own."""

    def __init__(self, server: TestedServer, home: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.mortal_exchange"],
            env={
                **os.environ,
                "TMPDIR": str(home),
                "PSQLMESSAGES_DSN": server.url(),
                "PSQLMESSAGES_DSN_EU": TestedServer(server.server, EU).url(),
            },
            cwd=ROOT, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None
        definitions = [stored.compiled(row) for row in stored.rows()]
        self._process.stdin.write(f"{written(definitions)}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill both at once; Python's workers find that out for themselves."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def driver(server: TestedServer, tmp_path: Path) -> Iterator[Callable[[], Driver]]:
    """Start a driver; none of them outlives the test."""
    started: list[Driver] = []

    def start() -> Driver:
        started.append(Driver(server, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def bodies(field: Field) -> dict[str, list[str]]:
    return {
        f"{alias}/{queue}": sorted(bed.bodies(queue), key=int)
        for alias, bed in field.beds.items()
        for queue in "bcf"
        if bed.bodies(queue)
    }


def test_killed_at_random_under_load_nothing_is_lost_or_doubled(
    wide_field: Field, server: TestedServer, driver: Callable[[], Driver]
) -> None:
    field, chance = wide_field, SystemRandom()
    field.define(
        within={"consumer": {"parallel": 2, "wsize": 40}, "src": "a", "dst": ["b", "c"]},
        between={"consumer": {"parallel": 2, "wsize": 40}, "src": "e", "dst": ["f", "eu/f"]},
    )
    numbers = [str(number) for number in range(ELEMENTS)]
    pusher = Bed(server)

    def push(some: list[str]) -> None:
        for start in range(0, len(some), 500):
            for queue in "ae":
                pusher.push_many(queue, some[start : start + 500])

    share = ELEMENTS // (KILLS + 1)
    for kill in range(KILLS):
        running = driver()
        before = field.default.query(COUNT)
        pushing = threading.Thread(target=push, args=(numbers[kill * share : (kill + 1) * share],))
        pushing.start()
        field.until(lambda: field.default.query(BEGUN, before), 600)  # noqa: B023
        threading.Event().wait(chance.uniform(0, 0.4 + share / 4000))
        running.kill()
        pushing.join()
        left = [len(field.default.bodies(queue)) for queue in "ae"]
        print(f"\nkilled with {left} of {share * (kill + 1)} each in the sources")
    push(numbers[KILLS * share :])
    pusher.close()
    field.default.connection.execute(EXPIRE)
    # Whoever takes over, here a local worker, goes on where the dead had come to.
    field.run_until_idle()
    field.until(lambda: not field.default.bodies("a") and not field.default.bodies("e"))
    expected = ("default/b", "default/c", "default/f", "eu/f")
    queues = bodies(field)
    tell("exchanges on Spark, driver and Java at once under load", KILLS, numbers, queues)
    assert queues == dict.fromkeys(expected, numbers)
