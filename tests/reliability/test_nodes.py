"""Processes of nodes are killed with -9 or stop reading: who hears of it, and what remains."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from time import monotonic

import pytest

from project.postgres import Server
from psqlmessages import Node
from psqlmessages.exceptions import IdentTaken
from tests.django.processes import start
from tests.reliability.counts import memory_megabytes, report, size
from tests.reliability.deployment import Listeners
from tests.reliability.faults import until
from tests.reliability.node_spawner import HUB_NODES, REPORT, NodeSpawner
from tests.sql.conftest import World

FAULT = "a node's process is killed"
# The docs promise 2 s; a busy machine may take longer.
BOUND_SECONDS = 10.0
RULES = (
    "user1 v* Topic T RW 60", "user2 HEAR.* Rpc v* W 60", "user2 HEAR.* Rpc worker W 60",
    f"{Server.owner} worker Topic ORDERS RW 60", f"{Server.owner} PRICES Rpc worker W 60",
    # STRANGER may receive events of no other node.
    "user3 STRANGER Topic OTHER RW 60", "user1 SENDER Topic T RW 60",
)  # fmt: skip
PROCESSES = [("node", "v0"), ("async", "v1"), ("node", "v2"), ("async", "v3"), ("hub", "v4")]
ALL = {"sync": ["HEAR.NODE"], "asynchronous": ["HEAR.ASYNC"], "web": ["HEAR.HUB1", "HEAR.HUB2"]}
WATCHING = {
    "all": "nodes of all kinds watch", "sync": "only a Node watches",
    "asynchronous": "only an AsyncNode watches", "web": "only a hub watches",
}  # fmt: skip
LISTENERS = {"all": ALL} | {kind: {kind: idents} for kind, idents in ALL.items()}
ALL_GONE = """
    SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name ^@ 'psqlmessages v')
"""
TABLES = """
    SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
    WHERE relkind = 'r' AND (relname ^@ 'psqlmessages_' OR relnamespace = 'messages'::regnamespace)
"""


@contextmanager
def watching(world: World, kinds: str) -> Iterator[Listeners]:
    """Open listeners of some kinds of nodes: only these do housekeeping."""
    listeners = Listeners(world.server.url("user2"), **LISTENERS[kinds])
    try:
        listeners.open()
        yield listeners
    finally:
        listeners.close()


@pytest.fixture
def ruled(own_world: World) -> World:
    own_world.rules(*RULES)
    return own_world


def idents_of(processes: list[tuple[str, str]]) -> set[str]:
    """Return the nodes of these processes; a hub has several."""
    return {
        f"{ident}.{number}" if kind == "hub" else ident
        for kind, ident in processes
        for number in range(HUB_NODES if kind == "hub" else 1)
    }


def count_shown_nodes(world: World) -> int:
    """Count the listeners of T that a call, a call of a node and a view still show."""
    asker = world.program("user1")
    shown = asker.ok("topic_status_as", "v.asker", "T")["Listeners"]
    asker.ok("init", "v.asker")
    shown += asker.ok("topic_status", "T")["Listeners"]
    shown += asker.query("SELECT listeners FROM messages.topics WHERE topic = 'T'")
    asker.ok("deinit", "v.asker")
    return len(shown)


@pytest.mark.parametrize(
    "kinds", [pytest.param(k, marks=[pytest.mark.nightly] * (k != "all")) for k in LISTENERS]
)
def test_a_crash_is_reported_once_to_each_permitted_node(ruled: World, kinds: str):
    rounds, slowest, left = size(1, 10), 0.0, 0
    stranger, idents = ruled.node("user3", "STRANGER"), idents_of(PROCESSES)
    with NodeSpawner(ruled.server.url("user1")) as spawner, watching(ruled, kinds) as listeners:
        for number in range(1, rounds + 1):
            killed = spawner.kill_all(spawner.spawn(*PROCESSES))
            received_at = listeners.wait_for_crashes(number * len(idents) * len(listeners.idents))
            slowest = max(slowest, received_at - killed)
            left += count_shown_nodes(ruled)
        crashes = listeners.crashes()
    report(
        FAULT, f"5 processes at the same time; {WATCHING[kinds]}",
        processes=rounds * len(PROCESSES), nodes=rounds * len(idents), crash_events=crashes.total(),
        duplicate_or_unauthorized_events=len(stranger.events()), stale_nodes=left,
        slowest_seconds=slowest,
    )  # fmt: skip
    assert crashes == {(to, ident): rounds for to in listeners.idents for ident in idents}
    assert left == 0
    assert slowest < BOUND_SECONDS


def test_a_name_is_free_although_the_former_connection_ends_a_moment_later(ruled: World):
    former = ruled.node("user1", "v0")
    with (
        pytest.raises(IdentTaken, match=f"pid {former.pid}"),
        Node("v0", ruled.server.url("user1")),
    ):
        pass
    end = Timer(0.1, former.close)
    end.start()
    with Node("v0", ruled.server.url("user1")):
        end.join()


def test_handler_workers_detect_crashes_and_report_their_own(ruled: World):
    process = start(ruled.server, "psqlmessages", "run", "worker")
    try:
        assert "listens to ORDERS" in process.stderr.readline()
        with NodeSpawner(ruled.server.url("user1")) as spawner:
            # No other node is connected.
            killed = spawner.kill_all(spawner.spawn(("node", "v0")))
            ruled.wait_for("SELECT NOT EXISTS (SELECT FROM psqlmessages_client WHERE ident = 'v0')")
            found = monotonic() - killed
        with watching(ruled, "all") as listeners:
            killed = monotonic()
            process.kill()
            seconds = listeners.wait_for_crashes(len(listeners.idents)) - killed
    finally:
        process.kill()
        process.communicate()
    report(FAULT, "only `run` watches", processes=1, slowest_seconds=found)
    report(
        FAULT, "manage.py psqlmessages run", crash_events=listeners.crashes().total(),
        slowest_seconds=seconds,
    )  # fmt: skip
    assert listeners.crashes() == {(ident, "worker"): 1 for ident in listeners.idents}
    assert max(found, seconds) < BOUND_SECONDS


def test_without_connected_nodes_the_next_one_reports_the_crash(ruled: World):
    number = size(6, 50)
    processes = [(("node", "async")[n % 2], f"v{n}") for n in range(number)]
    with NodeSpawner(ruled.server.url("user1")) as spawner, ruled.owner.connection.transaction():
        living = spawner.spawn(*processes)
        # The lock prevents these nodes from detecting each other's end.
        ruled.owner.connection.execute("SELECT FROM psqlmessages_session FOR SHARE")
        spawner.kill_all(living)
        ruled.wait_for(ALL_GONE)
    began = monotonic()
    with watching(ruled, "sync") as listeners:
        seconds = listeners.wait_for_crashes(number) - began
        left = count_shown_nodes(ruled)
    report(
        FAULT, "all nodes of a machine at the same time: the next node receives the events",
        nodes=number, crash_events=listeners.crashes().total(), stale_nodes=left,
        slowest_seconds=seconds,
    )  # fmt: skip
    assert listeners.crashes() == {("HEAR.NODE", ident): 1 for ident in idents_of(processes)}
    assert left == 0
    assert seconds < BOUND_SECONDS


def test_where_a_listener_stops_reading_the_others_go_on(ruled: World):
    number, url = size(1_200, 20_000), ruled.server.url("user1")
    others = Listeners(
        url, sync=["v0", "v2"], asynchronous=["v1", "v3"], web=["v4.0", "v4.1"], topic="T"
    )

    def send(number: int) -> tuple[int, float]:
        """Send messages; return how many came to all, and the 99th percentile of their ages."""
        others.received.clear()
        for _ in range(number):
            sender.topic_send("T", f"{monotonic():<1000}")
        until(lambda: len(others.received) >= number * len(others.idents))
        ages = sorted(at - float(sent) for _, sent, ident, at in others.received if ident is None)
        return len(ages), ages[len(ages) * 99 // 100]

    with NodeSpawner(url) as spawner, Node("SENDER", url) as sender:
        sender.topic_notify("T")
        others.open()
        try:
            (process,) = spawner.spawn(("node", "v.stopped")).values()
            _, p99_before = send(number // 4)
            memory, tables = memory_megabytes(), ruled.owner.query(TABLES)
            os.kill(process, signal.SIGSTOP)
            got, p99 = send(number)
            usage = ruled.watcher.query("SELECT pg_notification_queue_usage()")
            memory, tables = memory_megabytes() - memory, ruled.owner.query(TABLES) - tables
            os.kill(process, signal.SIGCONT)
            sender.topic_send("T", REPORT)
            late = spawner.wait_for_report() - number // 4
        finally:
            others.close()
    lost = number * len(others.idents) - got
    report(
        "a listener stops reading", "six other listeners, while one is stopped by SIGSTOP",
        messages=number, lost_by_others=lost, p99_ratio=p99 / p99_before, p99_seconds=p99,
        queue_usage=float(usage), memory_growth_megabytes=memory, table_growth_bytes=tables,
        lost_by_the_stopped_listener=number - late,
    )  # fmt: skip
    assert (lost, late) == (0, number)
    assert memory < 100
    assert tables < 10_000_000
