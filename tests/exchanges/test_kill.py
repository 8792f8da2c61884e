"""Killed at every step, and at random: each element of a source still gives its copies once."""

import json
import signal
from collections.abc import Callable, Iterator
from secrets import SystemRandom
from threading import Thread

import pytest
from django.db import connections

from psqlmessages.models import ExchangeCount
from tests.conftest import TestedServer
from tests.django.processes import environment, start, talking
from tests.exchanges.field import Bed, Field, flow
from tests.reliability.counts import report, size

pytestmark = [pytest.mark.usefixtures("committing"), pytest.mark.timeout(600)]

FAULT = "an exchange, worker or Spark job is killed"
# The statements of a batch and those before the first one, and a few of the next batch.
STEPS = 16
KILLS = size(5, 100)
# Each kill restarts the process: only one test of each kind runs daily.
NIGHTLY = pytest.mark.nightly
EXPIRE = "UPDATE psqlmessages_element SET available_at = clock_timestamp() WHERE lease IS NOT NULL"
FLOWS = {"within": ("b", "c"), "between": ("b", "eu/b", "eu/c"), "between, popped": ("b", "eu/b")}

Dies = Callable[[str, float], None]


@pytest.fixture
def dies(wide_field: Field, server: TestedServer) -> Iterator[Dies]:
    """Run workers in a process; each worker is killed as requested."""
    databases = {alias: dict(connections.settings[alias]) for alias in connections}
    given = json.dumps({"DATABASES": databases})
    variables = {"DJANGO_SETTINGS_MODULE": "tests.web.site_settings", "SITE_SETTINGS": given}
    process = talking("-m", "tests.exchanges.killed_workers", env=environment(server) | variables)

    def die(how: str, number: float) -> None:
        process.stdin.write(f"{how} {number}\n")
        assert process.stdout.readline().split() == [str(-signal.SIGKILL)]
        wide_field.default.connection.execute(EXPIRE)

    yield die
    process.communicate()


def all_queues(field: Field) -> dict[str, list[str]]:
    found = {f"{ns}/{queue}": bed.bodies(queue) for ns, bed in field.beds.items() for queue in "bc"}
    return {name: sorted(bodies, key=int) for name, bodies in found.items() if bodies}


@pytest.mark.parametrize("how", ["execute", pytest.param("asked", marks=NIGHTLY)])
@pytest.mark.parametrize("kind", [pytest.param("within", marks=NIGHTLY), "between"])
def test_a_kill_at_any_step_loses_none(wide_field: Field, dies: Dies, kind: str, how: str):
    field, pushed = wide_field, []
    field.define(x1=flow("a", *FLOWS[kind], wsize=4))
    for step in range(1, STEPS + 1):
        new = [str(step * 100 + number) for number in range(24)]
        field.default.push_many("a", new)
        pushed += new
        dies(how, step)
    field.run_until_idle(400)
    queues = all_queues(field)
    before = "before each statement" if how == "execute" else "after each round trip"
    report_kills(f"an exchange {kind} databases, {before}", STEPS, pushed, queues)
    places = [each if "/" in each else f"default/{each}" for each in FLOWS[kind]]
    assert queues == dict.fromkeys(places, pushed)


def report_kills(case: str, kills: int, pushed: list[str], queues: dict[str, list[str]]) -> None:
    lost = sum(len(set(pushed) - set(bodies)) for bodies in queues.values())
    doubled = sum(len(bodies) - len(set(bodies)) for bodies in queues.values())
    report(FAULT, case, kills=kills, elements=len(pushed), lost=lost, duplicated=doubled)


@pytest.mark.parametrize(
    "kind", ["within", *(pytest.param(kind, marks=NIGHTLY) for kind in list(FLOWS)[1:])]
)
def test_random_kills_under_load_double_nothing(wide_field: Field, dies: Dies, kind: str):
    field, chance = wide_field, SystemRandom()
    popped = {"reserve": False} if "popped" in kind else {}
    field.define(x1=flow("a", *FLOWS[kind], parallel=2, wsize=50, **popped))
    numbers = [str(number) for number in range(KILLS * 400)]

    def push() -> None:
        for first in range(0, len(numbers), 200):
            field.beds["pusher"].push_many("a", numbers[first : first + 200])

    field.beds["pusher"] = Bed(field.default.server)
    pushing = Thread(target=push)
    pushing.start()
    for _ in range(KILLS):
        dies("after", round(chance.uniform(0, 0.2), 3))
    pushing.join()
    field.run_until_idle(400)
    field.beds.pop("pusher").close()
    queues = all_queues(field)
    where = f"{kind.partition(',')[0]} databases"
    where += " with `reserve: false` (at most once)" if popped else ""
    report_kills(f"an exchange {where}, at random under load", KILLS, numbers, queues)
    if not popped:
        assert queues == dict.fromkeys(queues, numbers)
    assert queues["default/b"] == numbers
    other = queues["eu/b" if "between" in kind else "default/c"]
    assert len(other) == len(set(other))


def shares_of_two() -> list[int]:
    """Return how many elements each of two workers has routed, as far as stored."""
    shares = [row.count for row in ExchangeCount.objects.filter(outcome="ok")]
    return shares + [0] * (2 - len(shares))


def test_two_processes_share_the_work_and_one_continues_alone(field: Field, server: TestedServer):
    field.define(x1=flow("a", "b", "c", parallel=2, wsize=100))
    processes = [start(server, "psqlmessages", "exchange", "run") for _ in range(2)]
    bodies, pushed = [str(number) for number in range(205_000)], 0
    try:
        for process in processes:
            assert process.stderr.readline() == "running x1; press Ctrl-C to stop\n"
        while pushed < 2_000 or (min(shares_of_two()) <= 200 and pushed < 200_000):
            field.default.push_many("a", bodies[pushed : pushed + 500])
            pushed += 500
            field.until_idle()
        assert min(shares_of_two()) > 200
        field.until(lambda: sum(shares_of_two()) == pushed)
        field.default.push_many("a", bodies[pushed : pushed + 5_000])
        field.until(lambda: len(field.default.bodies("b")) > pushed)
        processes[0].kill()
        field.until_idle()
    finally:
        processes[0].kill()
        processes[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0], said
    assert "stopped: " in said[1]
    for queue in "bc":
        assert sorted(field.default.bodies(queue), key=int) == bodies[: pushed + 5_000]
