"""A listener stops reading: the others go on, it is named, and what it holds up is bounded."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from pytest_django import Settings

from project.postgres import Server
from psqlmessages import Node
from psqlmessages.client.pooling import connect
from psqlmessages.commands import doctor_queue
from psqlmessages.commands.doctor_findings import Patient, State
from psqlmessages.monitor import health
from tests.client.programs import finished
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.reliability.holders import SMALL_QUEUE, need_small_queue, stopped
from tests.reliability.victims import HUB_NODES, REPORT, Nursery
from tests.sql.conftest import World
from tests.web.receivers import run
from tests.web.test_monitor_observer import Stage

FAULT = "a listener stops reading"
# What is sent while one does not read fills over a tenth of it.
SERVER_SETTINGS, need_server = SMALL_QUEUE, need_small_queue
RULES = (
    "user1 v* Topic T RW 60",
    "user1 v* Topic BIG RW 60",
    "user1 SENDER Topic * RW 60",
    f"{Server.owner} example.monitor.* Topic * O 60",
)
OTHERS = [("node", "v1"), ("node", "v2"), ("async", "v3"), ("async", "v4"), ("hub", "v5")]
NODES = len(OTHERS) - 1 + HUB_NODES
# For good: a system that enlarges the buffers of a socket lets the server write a little more.
IS_STUCK = """
    SELECT count(*) = 1 AND pg_notification_queue_usage() >= 0.1 FROM pg_stat_activity
    WHERE pid = %s AND wait_event = 'ClientWrite'
"""
TABLES = """
    SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
    WHERE relkind = 'r' AND (relname ^@ 'psqlmessages_' OR relnamespace = 'messages'::regnamespace)
"""


@pytest.fixture(scope="module")
def own(own: TestedServer) -> TestedServer:
    """The module's server, whose owner sees who does what."""
    with psycopg.connect(own.superuser_url, autocommit=True) as superuser:
        superuser.execute(f"GRANT pg_read_all_stats TO {Server.owner}")
    return own


def resident(pid: int) -> int:
    """How many bytes of memory a process has."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * 4096


class Field:
    """Nodes in processes that receive, and one that sends to them."""

    def __init__(self, world: World, nursery: Nursery, sender: Node) -> None:
        self.world, self.nursery, self.sender = world, nursery, sender
        self.living = nursery.make(*OTHERS)

    def send(self, number: int, reports: int) -> tuple[int, float]:
        """Send so many; how many came to all, and the worst 99th percentile of their ages."""
        for _ in range(number):
            self.sender.topic_send("T", repr(monotonic()))
        self.sender.topic_send("T", REPORT)
        told = [self.nursery.report() for _ in range(reports)]
        return sum(count for _, count, _ in told), max(p99 for *_, p99 in told)

    def memory(self) -> int:
        """What the processes of nodes have in memory."""
        return sum(map(resident, self.living.values()))


@pytest.fixture
def field(own: TestedServer, own_world: World) -> Iterator[Field]:
    """Five processes that listen to T, and who sends to it."""
    own_world.rules(*RULES)
    with Nursery(own.url("user1")) as nursery, Node("SENDER", own.url("user1")) as sender:
        sender.topic_notify("T")
        yield Field(own_world, nursery, sender)


def named_by_doctor(own: TestedServer, pid: int) -> bool:
    """Whether the doctor, as a program asks it, names a backend."""
    said = finished("doctor", "--json", dsn=own.url())
    found = [f for f in json.loads(said.stdout)["findings"] if f["check"] == "queue"]
    return any(f"held back by pid {pid} " in f["found"] for f in found)


def holders_of_monitor(own: TestedServer) -> list[dict[str, Any]]:
    """Who holds the queue back, as the monitor's page is told."""

    async def look() -> list[dict[str, Any]]:
        stage = Stage(own.url())
        try:
            stage.look()
            await stage.until(lambda: stage.frames and stage.frames[-1].get("health"))
            holders: list[dict[str, Any]] = stage.frames[-1]["health"]["holders"]
            return holders
        finally:
            await stage.end()

    found: list[list[dict[str, Any]]] = []

    async def keep() -> None:
        found.append(await look())

    run(keep())
    return found[0]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("SIGSTOP", marks=pytest.mark.nightly),  # until its socket is full
        "transaction",
    ],
)
def test_the_others_go_on_and_it_is_named(
    own: TestedServer, field: Field, settings: Settings, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    settings.PSQLMESSAGES = {"NODE": "example"}
    world, number = field.world, size(1_200, 20_000)
    _, p99_before = field.send(number // 4, NODES)
    memory, tables = field.memory(), world.owner.query(TABLES)
    with ExitStack() as held:
        if how == "SIGSTOP":
            (process,) = field.nursery.make(("node", "v.held")).values()
            pid = world.watcher.query(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'psqlmessages v.held'"
            )
            held.enter_context(stopped(process))
            fill_socket(world, field.sender, pid)
        else:
            holder = world.node("user1", "v.held")
            holder.ok("topic_listen", "T")
            holder.connection.execute("BEGIN")
            pid = holder.pid
            # Ten seconds, else. Whoever is amid a transaction just then is named too, after it.
            monkeypatch.setattr(doctor_queue, "HELD_SECONDS", 0.0)
            monkeypatch.setattr(health, "HELD_SECONDS", 0.0)
        got, p99 = field.send(number, NODES)
        usage = world.watcher.query("SELECT pg_notification_queue_usage()")
        holders = [row["pid"] for row in holders_of_monitor(own)]
        if how == "SIGSTOP":
            is_named = named_by_doctor(own, pid)
        else:
            with connect(own.url()) as connection:
                finding, *_ = doctor_queue.queue(Patient(own.url(), connection))
            is_named = finding.state is State.WRONG and f"pid {pid} " in finding.found
        memory, tables = field.memory() - memory, world.owner.query(TABLES) - tables
    if how == "SIGSTOP":
        _, late, _ = field.nursery.report()
    else:
        holder.connection.execute("COMMIT")
        late = sum('"To":"T"' in payload for payload in holder.payloads()) - 1
    counted(
        FAULT, f"five others meanwhile, {how}",
        messages=number, lost_by_others=number * NODES - got, ratio_of_p99=p99 / p99_before,
        p99_seconds=p99, queue_full=float(usage), others_grew_bytes=memory,
        tables_grew_bytes=tables, lost_by_itself=number - late,
    )  # fmt: skip
    assert (got, late) == (number * NODES, number)
    assert holders[:1] == [pid]
    assert is_named
    assert 0.1 <= usage < 1
    assert memory < 100_000_000
    assert tables < 10_000_000


def fill_socket(world: World, sender: Node, pid: int) -> None:
    """Send to the one that is stopped, until the server cannot write to it any more."""
    sender.topic_notify("BIG")
    for _ in range(1_000):
        sender.topic_send_many("BIG", ["x" * 7000] * 10)
        if world.watcher.query(IS_STUCK, pid):
            return
    raise AssertionError("the socket never filled")
