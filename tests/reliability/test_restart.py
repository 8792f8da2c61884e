"""PostgreSQL restarts while clients of all kinds use it: all return, and nothing is lost."""

import logging
import re
import threading
from pathlib import Path
from time import monotonic

import psycopg
import pytest

from psqlmessages import Node
from tests.django.processes import run_python
from tests.reliability import faults, workload
from tests.reliability.counts import report, size
from tests.reliability.deployment import (
    DEFAULT,
    LISTENERS,
    CommandProcess,
    run_deployment,
    write_exchange,
)
from tests.sql.conftest import World

FAULT = "PostgreSQL restarts"
# A node logs that the connection is lost, that it cannot reconnect (also every ten seconds), and
# that it has reconnected.
RECORDS_EACH, RECORDS_EACH_TEN_SECONDS = 3, 2
EXCHANGE = {
    "consumer": {"wsize": 50, "parallel": 2}, "src": DEFAULT | {"queue": "a"},
    "dst": [DEFAULT | {"queue": queue} for queue in "bc"],
}  # fmt: skip


@pytest.mark.timeout(590)
@pytest.mark.nightly  # 30 nodes and 5 processes start
def test_each_client_reconnects_once(own_world: World, tmp_path: Path, django_db_blocker, caplog):
    caplog.set_level(logging.INFO, "psqlmessages")
    server = own_world.server.server
    with django_db_blocker.unblock(), run_deployment(own_world.server, tmp_path) as deployment:
        deployment.use_everything("before")
        for how, seconds in (*((how, 0) for how in faults.RESTARTS), (faults.FAST, size(10, 30))):
            caplog.clear()
            before = deployment.listeners.counts("reconnected")
            problems = deployment.count_problems()
            faults.stop_or_kill(server, how)
            if seconds:
                threading.Event().wait(seconds)
                assert deployment.post("refused") == 503
                assert deployment.site.get("/healthz")[0] == 503
            server.start()
            started_at = monotonic()
            deployment.wait_for_registration()
            took = monotonic() - started_at
            deployment.use_everything(f"{how} {seconds}")
            records = len(caplog.records)
            lines = (deployment.count_problems() - problems).total()
            down = f", down for {seconds} s" if seconds else ""
            report(
                FAULT, f"30 nodes and 5 processes, {how}{down}", recovered_after_seconds=took,
                log_records=records, log_lines_of_processes=lines,
            )  # fmt: skip
            reconnects = deployment.listeners.counts("reconnected") - before
            assert reconnects == dict.fromkeys(LISTENERS, 1)
            each = RECORDS_EACH + RECORDS_EACH_TEN_SECONDS * (seconds // 10)
            assert records <= each * len(LISTENERS), caplog.text
            assert lines <= 10 * each, [each.problems for each in deployment.processes.values()]


def numbers(world: World, queue: str) -> list[int]:
    return sorted(map(int, workload.stored_elements(world, queue)))


@pytest.mark.timeout(590)
def test_restarts_neither_lose_nor_duplicate_messages(own_world: World, django_db_blocker):
    server, part = own_world.server.server, size(100, 2_000)
    restarts = faults.RESTARTS * 2 if size(0, 1) else (faults.FAST, faults.POSTMASTER)
    own_world.rules("psqlmessages exchange.* Queue * RW 60")
    with django_db_blocker.unblock():
        write_exchange(own_world.server, "ship", EXCHANGE)
    copies = tuple(
        workload.Reader(name, None, "a", query=lambda queue=queue: numbers(own_world, queue))
        for name, queue in (("exchange", "b"), ("exchange, second copy", "c"))
    )
    worker = CommandProcess(own_world.server, "exchange", "run")
    try:
        with workload.Workload(own_world, *workload.LOSSLESS, more=copies) as work:
            for how in restarts:
                work.wait_for_writes(part)
                faults.restart(server, how)
            work.wait_for_writes(part)
    finally:
        worker.close()
    work.report(
        FAULT, f"streams, queues and an exchange, {len(restarts)} restarts of all kinds in turn",
        log_lines=len(worker.problems),
    )  # fmt: skip
    assert {each.counters.reconnects for each in work.nodes.values()} == {len(restarts)}
    assert workload.stored_elements(own_world, "a") == []
    assert len(worker.problems) <= min(10 * len(restarts), 39), worker.problems


def test_elements_reserved_just_before_a_crash_are_redelivered(own_world: World):
    number = size(500, 2_000)
    own_world.rules("psqlmessages NODE Queue Q RW 5")
    with Node("NODE", own_world.server.url()) as node:
        node.push_many("Q", [str(each) for each in range(number)])
        taken = [element for _ in range(10) for element in node.reserve("Q", number // 20)]
        faults.restart(own_world.server.server, faults.BACKEND)
        assert numbers(own_world, "Q") == list(range(number))
        with psycopg.connect(own_world.server.url(), autocommit=True) as owner:
            forgotten = number // 2 - owner.execute(workload.EXPIRE).rowcount
        faults.until(lambda: workload.has_reconnected(node))
        # A forgotten lease can still be committed if no other consumer has taken the element.
        done = sum(node.commit(*taken[: number // 4]))
        again = {element.body for element in node.pop("Q", number)}
    late = {element.body for element in taken[: number // 4]}
    report(
        FAULT, f"elements reserved just before, {faults.BACKEND}", reserved=number // 2,
        leases_forgotten=forgotten, lost=number - len(again | late),
        redelivered=len(again & {element.body for element in taken}),
    )  # fmt: skip
    assert again | late == {str(each) for each in range(number)}
    assert done == number // 4 - len(again & late)


@pytest.mark.nightly  # a server, a site and ten processes start
def test_a_short_soak_loses_and_duplicates_nothing():
    seconds = size(8, 60)
    done = run_python("-m", "tests.reliability.soak", "--seconds", str(seconds), timeout=240)
    # In such a short time, memory still grows.
    lines = done.stdout.partition("\nERRORS\n")[2].splitlines()
    errors = [line for line in lines if not line.startswith("grew: ")]
    line = done.stdout.partition("\ncounts: ")[2].partition("\n")[0]
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([^,]+)", line)}
    report("soak test", f"{seconds} s", **counts, errors=len(errors))
    assert errors == [], done.stdout
    assert done.returncode in (0, 1), done.stderr
    assert min(counts["messages"], counts["nodes_killed"], counts["rounds"]) > 0
