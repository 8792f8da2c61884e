"""PostgreSQL restarts under everything that talks to it: all come back, and nothing is lost."""

import logging
import re
import threading
from collections import Counter
from pathlib import Path
from time import monotonic

import psycopg
import pytest
import pytest_django

from psqlmessages import Node
from tests.django.processes import run_python
from tests.reliability.counts import report, size
from tests.reliability.crowd import AT, LISTENERS, Crowd, Process, crowd, write_exchange
from tests.reliability.faults import BACKEND, FAST, WAYS, go_away, restart, until
from tests.reliability.work import EXACT, EXPIRE, Reader, Work, answers, pushed
from tests.sql.conftest import World

FAULT = "PostgreSQL restarts"
# A node says that it is lost, that it cannot return, that it is back; and again each ten seconds.
RECORDS_EACH, RECORDS_EACH_TEN_SECONDS = 3, 2
EXCHANGE = {
    "consumer": {"wsize": 50, "parallel": 2}, "src": AT | {"queue": "a"},
    "dst": [AT | {"queue": queue} for queue in "bc"],
}  # fmt: skip


@pytest.mark.timeout(590)
@pytest.mark.nightly  # 30 nodes and 5 processes start
def test_all_come_back_by_themselves_once_each(
    own_world: World, tmp_path: Path, django_db_blocker: pytest_django.DjangoDbBlocker,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "psqlmessages")
    with django_db_blocker.unblock(), crowd(own_world.server, tmp_path) as made:
        made.exercise("before")
        for way, seconds in (*((way, 0) for way in WAYS), (FAST, size(10, 30))):
            caplog.clear()
            away(made, way, seconds, caplog)


def away(crowd: Crowd, way: str, seconds: int, caplog: pytest.LogCaptureFixture) -> None:
    """Let the server go away and come back; what must hold then."""
    before, lines = crowd.listeners.counts("reconnected"), crowd.lines()
    server = crowd.server.server
    go_away(server, way)
    if seconds:
        threading.Event().wait(seconds)
        assert crowd.post("refused") == 503
        assert crowd.site.get("/healthz")[0] == 503
    server.start()
    came = monotonic()
    crowd.wait_for_registration()
    took = monotonic() - came
    crowd.exercise(f"{way} {seconds}")
    returns = crowd.listeners.counts("reconnected") - before
    loggers = Counter(record.name for record in caplog.records)
    said = crowd.lines() - lines
    what = f"30 nodes and 5 processes, {way}" + (f", down for {seconds} s" if seconds else "")
    report(
        FAULT, what, recovered_after_seconds=took, log_records=loggers.total(),
        log_lines_of_processes=said.total(),
    )  # fmt: skip
    assert returns == dict.fromkeys(LISTENERS, 1)
    each = RECORDS_EACH + RECORDS_EACH_TEN_SECONDS * (seconds // 10)
    assert loggers.total() <= each * len(LISTENERS), caplog.text
    assert said.total() <= 10 * each, [process.said for process in crowd.processes.values()]


def numbers(world: World, queue: str) -> list[int]:
    return sorted(map(int, pushed(world, queue)))


@pytest.mark.timeout(590)
def test_of_what_is_published_and_pushed_amid_restarts_nothing_is_lost_or_doubled(
    own_world: World, django_db_blocker: pytest_django.DjangoDbBlocker
) -> None:
    server, restarts, part = own_world.server.server, WAYS * size(1, 2), size(100, 2_000)
    own_world.rules("psqlmessages exchange.* Queue * RW 60")
    with django_db_blocker.unblock():
        write_exchange(own_world.server, "ship", EXCHANGE)
    copies = tuple(
        Reader(name, None, "a", found=lambda queue=queue: numbers(own_world, queue))
        for name, queue in (("exchange", "b"), ("exchange, second copy", "c"))
    )
    worker = Process(own_world.server, "exchange", "run")
    try:
        with Work(own_world, *EXACT, more=copies) as work:
            for way in restarts:
                work.go_on(part)
                restart(server, way)
            work.go_on(part)
    finally:
        worker.close()
    report(
        FAULT, f"streams, queues and an exchange, {len(restarts)} restarts of all kinds in turn",
        **work.counts(), log_lines=len(worker.said),
    )  # fmt: skip
    work.check()
    assert pushed(own_world, "a") == []
    assert len(worker.said) < 40, worker.said


def test_what_was_reserved_just_before_a_crash_comes_again(own_world: World) -> None:
    number, way = size(500, 2_000), BACKEND
    own_world.rules("psqlmessages NODE Queue Q RW 5")
    with Node("NODE", own_world.server.url()) as node:
        node.push_many("Q", [str(each) for each in range(number)])
        taken = [element for _ in range(10) for element in node.reserve("Q", number // 20)]
        restart(own_world.server.server, way)
        assert numbers(own_world, "Q") == list(range(number))
        with psycopg.connect(own_world.server.url(), autocommit=True) as owner:
            forgotten = number // 2 - owner.execute(EXPIRE).rowcount
        until(lambda: answers(node))
        # Whoever had reserved may still commit, where nobody has taken it since.
        done = sum(node.commit(*taken[: number // 4]))
        again = {element.body for element in node.pop("Q", number)}
    late = {element.body for element in taken[: number // 4]}
    report(
        FAULT, f"elements reserved just before, {way}", reserved=number // 2,
        leases_forgotten=forgotten, lost=number - len(again | late),
        redelivered=len(again & {element.body for element in taken}),
    )  # fmt: skip
    assert again | late == {str(each) for each in range(number)}
    assert done == number // 4 - len(again & late)


@pytest.mark.nightly  # a server, a site and ten processes start
def test_everything_at_once_loses_and_doubles_nothing() -> None:
    seconds = size(8, 60)
    done = run_python("-m", "tests.reliability.soak", "--seconds", str(seconds), timeout=240)
    wrong = done.stdout.partition("\nWRONG\n")[2].splitlines()
    # Memory still grows in so short a time.
    faults = [line for line in wrong if not line.startswith("grew: ")]
    line = done.stdout.partition("\ncounted: ")[2].partition("\n")[0]
    found = {name: int(number) for number, name in re.findall(r"(\d+) ([^,]+)", line)}
    report("soak test", f"{seconds} s", **found, errors=len(faults))
    assert faults == [], done.stdout
    assert done.returncode in (0, 1), done.stderr
    assert min(found["messages"], found["nodes_killed"], found["rounds"]) > 0
