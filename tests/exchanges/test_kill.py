"""Killed at every step, and at random: each element of a source still gives its copies once."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from secrets import SystemRandom
from threading import Thread

import pytest
from django.db import connections

from psqlmessages.models import ExchangeCount
from tests.conftest import TestedServer
from tests.django.processes import ROOT, environment
from tests.exchanges.field import Bed, Field, working
from tests.reliability.counts import counted, size

pytestmark = [pytest.mark.usefixtures("committing"), pytest.mark.timeout(600)]

FAULT = "an exchange, worker or Spark job is killed"
# So many statements a batch has, with those that come before the first; and a few of the next.
STEPS = 16
KILLS = size(5, 100)
# Each kill costs a start of the process, so one of each kind is enough for every day.
NIGHTLY = pytest.mark.nightly
EXPIRE = "UPDATE psqlmessages_element SET available_at = clock_timestamp() WHERE lease IS NOT NULL"
DEFINITIONS = {
    "within": {"src": "a", "dst": ["b", "c"]},
    "between": {"src": "a", "dst": ["b", "eu/b", "eu/c"]},
    "between, popped": {"consumer": {"reserve": False}, "src": "a", "dst": ["b", "eu/b"]},
}


def environment_of(server: TestedServer) -> dict[str, str]:
    """The environment of a process that has the same namespaces as this one."""
    databases = {alias: dict(connections.settings[alias]) for alias in connections}
    return {
        **environment(server),
        "DJANGO_SETTINGS_MODULE": "tests.web.site_settings",
        "SITE_SETTINGS": json.dumps({"DATABASES": databases}),
    }


class Mortal:
    """The process that runs workers, and kills each."""

    def __init__(self, server: TestedServer) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.exchanges.mortal"],
            env=environment_of(server), cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def dies(self, how: str, number: float) -> None:
        """Run a worker that is killed so."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{how} {number}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().split() == [str(-signal.SIGKILL)]

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def mortal(wide_field: Field, server: TestedServer) -> Iterator[Mortal]:
    mortal = Mortal(server)
    yield mortal
    mortal.close()


def all_queues(field: Field) -> dict[str, list[str]]:
    return {
        f"{alias}/{queue}": sorted(bed.bodies(queue), key=int)
        for alias, bed in field.beds.items()
        for queue in "bc"
        if bed.bodies(queue)
    }


def finish(field: Field) -> None:
    """Let an undying worker do the rest; leases of the dead are not waited for."""
    field.default.connection.execute(EXPIRE)
    with working():
        field.until_idle(400)


@pytest.mark.parametrize(
    ("flow", "how"),
    [
        pytest.param("within", "execute", marks=NIGHTLY),
        pytest.param("within", "asked", marks=NIGHTLY),
        ("between", "execute"),
        pytest.param("between", "asked", marks=NIGHTLY),
    ],
)
def test_killed_at_every_step_nothing_is_lost_or_doubled(
    wide_field: Field, mortal: Mortal, flow: str, how: str
) -> None:
    field, pushed = wide_field, []
    field.define(x1={"consumer": {"wsize": 4}, **DEFINITIONS[flow]})
    for step in range(1, STEPS + 1):
        new = [str(step * 100 + number) for number in range(24)]
        field.default.push_many("a", new)
        pushed += new
        mortal.dies(how, step)
        field.default.connection.execute(EXPIRE)
    finish(field)
    expected = {"within": ["default/b", "default/c"], "between": ["default/b", "eu/b", "eu/c"]}
    queues = all_queues(field)
    before = "before each statement" if how == "execute" else "after each round trip"
    tell(f"an exchange {flow} databases, {before}", STEPS, pushed, queues)
    assert queues == dict.fromkeys(expected[flow], pushed)


def tell(what: str, kills: int, pushed: list[str], queues: dict[str, list[str]]) -> None:
    """Count what the destinations have of what was pushed."""
    counted(
        FAULT,
        what,
        kills=kills,
        elements=len(pushed),
        lost=sum(len(set(pushed) - set(bodies)) for bodies in queues.values()),
        doubled=sum(len(bodies) - len(set(bodies)) for bodies in queues.values()),
    )


@pytest.mark.parametrize(
    "flow",
    [
        "within",
        pytest.param("between", marks=NIGHTLY),
        pytest.param("between, popped", marks=NIGHTLY),
    ],
)
def test_killed_at_random_under_load_nothing_is_doubled(
    wide_field: Field, mortal: Mortal, flow: str
) -> None:
    field, chance = wide_field, SystemRandom()
    field.define(x1={"consumer": {"parallel": 2, "wsize": 50}, **DEFINITIONS[flow]})
    numbers = [str(number) for number in range(KILLS * 400)]

    def push() -> None:
        for start in range(0, len(numbers), 200):
            field.beds["pusher"].push_many("a", numbers[start : start + 200])

    field.beds["pusher"] = Bed(field.default.server)
    pushing = Thread(target=push)
    pushing.start()
    for _ in range(KILLS):
        mortal.dies("after", round(chance.uniform(0, 0.2), 3))
        field.default.connection.execute(EXPIRE)
    pushing.join()
    left = len(field.default.bodies("a"))
    finish(field)
    field.beds.pop("pusher").close()
    print(f"\n{left} of {len(numbers)} elements left for the end")
    queues = all_queues(field)
    how = flow.replace("between, popped", "that pops (at most once by choice) between")
    tell(f"an exchange {how} databases, at random under load", KILLS, numbers, queues)
    if flow != "between, popped":
        assert queues == dict.fromkeys(queues, numbers)
    assert queues["default/b"] == numbers
    assert queues["eu/b" if "between" in flow else "default/c"] == sorted(
        set(queues["eu/b" if "between" in flow else "default/c"]), key=int
    )


def shares_of_two() -> list[int]:
    """How many elements each of two workers has routed, as far as they have written it."""
    shares = [row.count for row in ExchangeCount.objects.filter(outcome="ok")]
    return shares + [0] * (2 - len(shares))


def test_two_processes_share_the_work(wide_field: Field, server: TestedServer) -> None:
    field = wide_field
    field.define(x1={"consumer": {"parallel": 2, "wsize": 100}, "src": "a", "dst": ["b", "c"]})
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "django", "psqlmessages", "exchange", "run"],
            env=environment_of(server), cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stderr is not None
            assert process.stderr.readline() == "runs x1; Ctrl-C ends it\n"
        pushed = 0
        # One of the two may stand still for a while.
        while pushed < 2_000 or (min(shares_of_two()) <= 200 and pushed < 200_000):
            field.default.push_many("a", [str(pushed + number) for number in range(500)])
            pushed += 500
            field.until_idle()
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    shares = shares_of_two()
    assert all("stopped: " in text for text in said)
    assert sum(shares) == pushed
    assert min(shares) > 200
    for queue in "bc":
        assert sorted(map(int, field.default.bodies(queue))) == list(range(pushed))
