"""Clocks that are wrong or jump: neither order nor liveness depends on any of them."""

import json
import os
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.parse import quote

import pytest

from project.postgres import Server
from psqlmessages import Node
from tests.conftest import TestedServer, installed
from tests.django.processes import talking
from tests.reliability.counts import report, size
from tests.reliability.faults import django_on, until
from tests.reliability.node_spawner import count_crashes
from tests.reliability.workload import LOSSLESS, Reader, Workload
from tests.rest.callers import Caller, at, bearer
from tests.sql.conftest import Program, World
from tests.web.site import Site

SOURCE = Path(__file__).with_name("false_time.c")


class FalseClock:
    """A clock that some processes use instead of the machine's: it differs by a set time."""

    def __init__(self, folder: Path) -> None:
        compiler = installed("cc")
        folder.chmod(0o755)  # for the server's account too
        library, self._file = folder / "false_time.so", folder / "seconds"
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE], check=True)
        self.environment = {"LD_PRELOAD": str(library), "FALSE_TIME": str(self._file)}
        self._file.write_bytes(struct.pack("q", 0))
        self._file.chmod(0o644)

    def set(self, by: timedelta) -> None:
        """Make all processes of the clock read the machine's time plus this."""
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("q", int(by.total_seconds())))

    def restart(self, server: Server) -> None:
        """Restart a server with this clock."""
        postmaster, account = server.postmaster, server.home.account
        program = Path(f"/proc/{postmaster.pid}/exe").resolve().with_name("pg_ctl")
        with server.home.log.open("ab") as log:
            subprocess.run(
                [program, "restart", "-D", server.home.data, "-m", "fast", "-w", "-s"],
                env={"LC_ALL": "C", **self.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=True,
                start_new_session=True, umask=0o077,
                **({"user": account.uid, "group": account.gid, "extra_groups": []}
                   if account.is_foreign else {}),
            )  # fmt: skip


@contextmanager
def false_clock() -> Iterator[FalseClock]:
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        yield FalseClock(Path(folder))


CLIENT = """
import json, sys
from datetime import timedelta
from itertools import islice
from time import monotonic, time
from psqlmessages import Node
from psqlmessages.exceptions import CallTimeout

def consume(number):
    bodies = []
    while len(bodies) < number:
        elements = node.reserve("Q", 20, timeout=timedelta(seconds=5))
        node.commit(*elements)
        bodies += [element.body for element in elements]
    return bodies

def call_silent():
    began = monotonic()
    try:
        node.call("READER", "?", timeout=timedelta(seconds=1))
    except CallTimeout:
        return monotonic() - began

with Node(*sys.argv[1:]) as node:
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)
"""

FAULT = "a clock jumps"
MESSAGES = size(100, 2_000)
RULES = (
    "user1 WRITER Topic NEWS W 3600", "user2 CLIENT Topic NEWS RW 3600",
    "user1 READER Topic NEWS R 3600", "user1 WRITER Queue Q W 60", "user2 CLIENT Queue Q R 60",
    "user2 CLIENT Rpc CALLEE W 60", "user2 CLIENT Rpc READER W 60", "user1 CALLEE Rpc CLIENT W 60",
    "user2 CLIENT Topic T R 60", "user1 DYING Topic T W 60",
    "user1 WATCHER Topic T W 60", "user2 CLIENT Topic U W 60", "user1 WATCHER Topic U R 60",
)  # fmt: skip
NONE, MINUTES, YEARS = timedelta(), timedelta(minutes=10), timedelta(days=20 * 365)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
# How wrong the client's clock is, from one question to the next.
CLIENTS_JUMPS = (YEARS, -YEARS, HOUR, -HOUR, NONE)
SECONDS = 60


def test_a_client_whose_clock_is_wrong_works_as_any(server: TestedServer, world: World):
    world.rules(*RULES)
    jumps, user1 = cycle(CLIENTS_JUMPS), server.url("user1")

    def ask(expression: str) -> Any:
        """Let the client's process evaluate an expression."""
        process.stdin.write(f"{expression}\n")
        line = process.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    with (
        false_clock() as clock,
        ThreadPoolExecutor() as pool,
        Node("WRITER", user1) as writer,
        Node("READER", user1) as reader,
        Node("CALLEE", user1) as callee,
    ):
        clock.set(next(jumps))
        command = ("-W", "error", "-c", CLIENT, "CLIENT", server.url("user2"))
        process = talking(*command, env=os.environ | clock.environment)
        try:
            callee.on_rpc(lambda message: [message.body])
            pool.submit(callee.run)
            assert abs(ask("time()") - time() - CLIENTS_JUMPS[0].total_seconds()) < 60
            read = reader.subscribe("NEWS")
            subscribed = f"[m.body for m in islice(node.subscribe('NEWS'), {MESSAGES})]"
            reading = pool.submit(ask, subscribed)
            world.wait_for(
                "SELECT EXISTS (SELECT FROM psqlmessages_subscription WHERE ident = 'CLIENT')"
            )
            for first in range(0, MESSAGES, 20):
                clock.set(next(jumps))
                writer.publish_many("NEWS", range(first, first + 20))
            bodies = reading.result(SECONDS)
            list(islice(read, MESSAGES))
            writer.push_many("Q", range(MESSAGES))
            results = []
            for asked in (
                "node.publish_many('NEWS', range(20)) and None", f"consume({MESSAGES})",
                "sum(node.call('CALLEE', n) == [n] for n in range(20))", "call_silent()",
            ):  # fmt: skip
                clock.set(next(jumps))
                results.append(ask(asked))
            own = [message.body for message in islice(read, 20)]
            world.kill(world.node("user1", "DYING", notify="T"))
            received = ask("next(m.ident for m in node.messages() if m.event == 'crash')")
            with Node("WATCHER", user1) as watcher:
                process.kill()
                crashes = count_crashes(watcher, "CLIENT")
        finally:
            callee.stop()
            process.kill()
            process.communicate()
    _, taken, answered, seconds = results
    report(
        FAULT, "a client's clock, by years and hours", messages=2 * MESSAGES,
        lost=2 * MESSAGES - len({*bodies}) - len({*taken}),
        duplicated=len(bodies) + len(taken) - len({*bodies}) - len({*taken}),
        out_of_order=sum(body != place for place, body in enumerate(bodies)),
        calls_answered=answered, timeout_of_1_s_took_seconds=seconds,
        crash_events_received=1, crash_events=crashes,
    )  # fmt: skip
    assert bodies == sorted(taken) == list(range(MESSAGES))
    assert own == list(range(20))
    assert (answered, received, crashes) == (20, "DYING", 1)
    assert 1 <= seconds < SECONDS


# The clock of a server, which is restarted with a preloaded library

SERVER_SETTINGS = {"cluster_name": "wrong-clock"}
JUMPS = (MINUTES, -MINUTES, HOUR, NONE, -HOUR, DAY, HOUR, NONE, -DAY, NONE, DAY, -DAY, NONE)
FEW = (MINUTES, -DAY, DAY, NONE)
OF_SERVER = (
    "user1 WRITER Topic NEWS W 3600", "user2 READER Topic NEWS R 3600",
    "user1 WRITER Queue Q W 3600", "user2 READER Queue Q R 3600", "user1 DYING Topic NEWS W 3600",
)  # fmt: skip
# One second, one until housekeeping runs, and time for a busy machine.
SOON_SECONDS = 20
# Much shorter than the jumps: what the clock says about a lease is wrong. What is stuck waits for
# an hour; after half a minute without anything new, it is.
LIMITS: Any = {"lease": timedelta(seconds=30), "idle_seconds": 30}


@pytest.fixture(scope="module")
def clock(own_server: TestedServer) -> Iterator[FalseClock]:
    with false_clock() as clock:
        clock.restart(own_server.server)
        yield clock
        own_server.server.stop("immediate")


@pytest.fixture
def wrong(clock: FalseClock, own_world: World) -> World:
    """A server whose clock a test may set."""
    clock.set(NONE)
    own_world.rules(*OF_SERVER)
    return own_world


def test_work_continues_and_crashes_are_reported_once(wrong: World, clock: FalseClock):
    jumps, times = JUMPS if size(0, 1) else FEW, 0
    with (
        Workload(wrong, *LOSSLESS, "live messages of Node", **LIMITS) as work,
        Node("READER", wrong.server.url("user2")) as reader,
    ):
        reader.topic_listen("NEWS")
        # A large body expires if the clock is set forward before it is fetched.
        work.large_bodies_percent = 0
        for jump in jumps:
            dying = wrong.node("user1", "DYING")
            dying.ok("topic_notify", "NEWS")
            clock.set(jump)
            wrong.kill(dying)
            times += crashes_until("crash", reader)
            work.wait_for_writes(size(20, 200))
        # A duplicate event would come before this one.
        wrong.node("user1", "DYING").ok("topic_notify", "NEWS")
        times += crashes_until("topic_notify", reader)
        clients = wrong.owner.query("SELECT count(*) FROM psqlmessages_session")
    work.report(
        FAULT, "the server's clock, by minutes, an hour and a day, under load", jumps=len(jumps),
        crash_events=times,
    )  # fmt: skip
    assert times == len(jumps)
    # W, P, READER, DYING and each reader that is a node: no session was ended wrongly.
    assert clients == 4 + len(work.nodes)
    assert all(node.counters.reconnects == 0 for node in work.nodes.values())


@pytest.mark.nightly  # a site is started; the workload above runs at each push
def test_a_rest_reader_loses_nothing(wrong: World, clock: FalseClock, tmp_path, django_db_blocker):
    commits = Counter[int]()

    def reserve(work: Workload, reader: Reader) -> None:
        reader.is_ready.set()
        while not work.must_stop.is_set():
            answer = caller.take("Q", to=2, reserve=True, duration=30)
            if answer.status != 504:
                reader.numbers.append(int(answer.data))
                committed = caller.call("PATCH", at("Q", "commit", quote(answer.lease, safe="")))
                commits[committed.status] += 1

    wrong.rules(f"{Server.owner} web.* Queue * R 3600")
    site = Site(wrong.server, tmp_path, {})
    with django_db_blocker.unblock(), django_on(wrong.server):
        caller = Caller(site, bearer(site, "rita", "web.rest"))
    by_rest = Reader("REST reserve", reserve, "Q", may_repeat=True)
    try:
        site.start()
        with Workload(wrong, "stream of Node", more=(by_rest,), **LIMITS) as work:
            for jump in JUMPS:
                clock.set(jump)
                work.wait_for_writes(size(20, 100))
    finally:
        site.stop()
    work.report(FAULT, "the server's clock, likewise: a reader by REST", jumps=len(JUMPS))
    # Each jump may end the lease of the one element that is reserved at that moment.
    assert commits[404] <= len(JUMPS) < commits[200]
    assert commits.keys() <= {200, 404}


def crashes_until(event: str, node: Node) -> int:
    """Count the events crash of DYING that a node receives up to another event of DYING."""
    received = list[str | None]()
    for message in node.messages(timeout=timedelta(seconds=SECONDS)):
        received += [message.event] * (message.ident == "DYING")
        if received[-1:] == [event]:
            break
    return received.count("crash")


def test_put_forward_it_ends_leases_and_delays_but_no_subscription(wrong: World, clock: FalseClock):
    writer, reader = wrong.program("user1"), wrong.program("user2")
    reader.read("READER", "NEWS", 60)
    writer.ok("push", "WRITER", "Q", "leased")
    writer.ok("push", "WRITER", "Q", "delayed", None, None, None, 3600)
    (leased,) = reader.elements("reserve", "READER", "Q", 1, 3600)
    assert leased.body == "leased"
    assert reader.elements("pop", "READER", "Q", 10) == []
    early: list[str] = []
    jumps = (DAY, 2 * DAY, 2 * DAY + HOUR)
    for ahead in jumps:
        clock.set(ahead)
        writer.ok("publish", "WRITER", "NEWS", str(ahead))
        writer.ok("evaluate")
        early += [row.body for row in reader.elements("pop", "READER", "Q", 10)]
    streamed = reader.got("READER", "NEWS", 60)
    is_committed = reader.ok("commit", "READER", [leased.lease])["Done"]
    report(
        FAULT, "the server's clock, set forward by days while the reader is away", messages=3,
        lost=3 - len(streamed), leases_and_delays_ended_early=len(early),
    )  # fmt: skip
    assert streamed == [str(ahead) for ahead in jumps]
    assert (sorted(early), is_committed) == (["delayed", "leased"], [False])


CAN_BE_TAKEN = """
    SELECT array_agg(body ORDER BY body) FROM psqlmessages_element
    WHERE available_at <= clock_timestamp()
"""
IS_OVER = """
    SELECT NOT EXISTS (SELECT FROM psqlmessages_elementkey WHERE expires_at > clock_timestamp())
        AND NOT EXISTS (SELECT FROM psqlmessages_subscription WHERE pinged_at > clock_timestamp())
"""


def test_put_back_nothing_lasts_longer_than_it_was_to(wrong: World, clock: FalseClock):
    back = size(1, 24) * HOUR
    writer, reader = wrong.program("user1"), wrong.program("user2")

    def reserved(body: str, seconds: float) -> Any:
        push(writer, body)
        (element,) = reader.elements("reserve", "READER", "Q", 1, seconds)
        return element.lease

    clock.set(back)
    reader.read("READER", "NEWS", 60)
    reserved("leased", 1)
    reader.ok("rollback", "READER", 1.0, [reserved("failed", 60)])
    reader.elements("renew", "READER", "Q", 1, [reserved("renewed", 60)])
    push(writer, "delayed", delay=1)
    wrong.owner.connection.execute("UPDATE psqlmessages_queue SET key_timeout = 1")
    first = push(writer, "once", key="k")
    writer.ok("evaluate")
    # This push is committed only after housekeeping has noticed that the clock was set back.
    pending = wrong.program("user1")
    pending.connection.execute("BEGIN")
    push(pending, "pending")
    clock.set(NONE)
    began = monotonic()
    # Each call runs housekeeping.
    until(lambda: reader.ok("evaluate") and len(wrong.owner.query(CAN_BE_TAKEN) or []) == 5)
    waited = monotonic() - began
    assert wrong.owner.query(CAN_BE_TAKEN) == ["delayed", "failed", "leased", "once", "renewed"]
    # Meanwhile housekeeping does not search for it again and again.
    assert wrong.owner.query("SELECT is_clock_back FROM messages._queues") is False
    pending.connection.execute("COMMIT")
    until(lambda: reader.ok("evaluate") and "pending" in wrong.owner.query(CAN_BE_TAKEN))
    assert waited < SOON_SECONDS
    wrong.wait_for(IS_OVER)
    assert push(writer, "twice", key="k") != first
    report(
        FAULT, "the server's clock, set back by a day: leases and delays of 1 s", elements=6,
        all_available_after_seconds=waited,
    )  # fmt: skip


def push(writer: Program, body: str, *, delay: object = None, key: object = None) -> object:
    return writer.ok("push", "WRITER", "Q", body, None, None, None, delay, 0, key)["Id"]
