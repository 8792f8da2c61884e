"""The notification queue is full: who sends is told so, nothing is half done, and it ends."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, transaction
from psycopg import errors

from project.postgres import Server
from psqlmessages import Node, Options, PubSub
from psqlmessages.cli import doctor_checks
from psqlmessages.cli.doctor_checks import Finding, FindingState
from psqlmessages.django import publish, send, send_many
from psqlmessages.exceptions import NotificationQueueFull
from tests.conftest import TestedServer
from tests.django.conftest import finding_of
from tests.django.waiting import wait_until
from tests.exchanges.field import working
from tests.migrated_cluster import major_version
from tests.reliability.counts import report, size
from tests.reliability.faults import copies, django_on, running_exchange, until
from tests.sql.conftest import Program, World
from tests.web.receivers import Box, err, in_loop, ok, opened

# 4 or 32 MB.
PAGES = size(512, 4096)
SERVER_SETTINGS = {"max_notify_queue_pages": str(PAGES)}
FILLING = """
    SELECT pg_notify('filling', repeat('x', 7900) || n) FROM generate_series(1, %s) AS n
"""
FAULT = "the notification queue is full"
TEXT = "more than PostgreSQL's notification queue can hold: try again later"
RULES = (
    "user1 SENDER Topic T RW 60", "user1 SENDER Queue Q RW 60", "user1 WAITER Queue * RW 60",
    "user2 LISTENER Topic T RW 60", "user1 web.* Topic T RW 60", "user1 GUEST Topic T RW 60",
    f"{Server.owner} SENDER Topic T RW 60",
)  # fmt: skip
QUICK = Options(
    evaluate_interval=timedelta(milliseconds=100), probe_interval=timedelta(milliseconds=300),
    probe_timeout=timedelta(milliseconds=600),
)  # fmt: skip
KEPT = """
    SELECT (SELECT count(*) FROM effect) + (SELECT count(*) FROM psqlmessages_streammessage)
        + (SELECT count(*) FROM psqlmessages_element)
"""
HAS_ROOM = "SELECT pg_notification_queue_usage() < 0.5"
# One second, and time for a busy machine.
SOON_SECONDS = 60


def need_server(binaries: Path) -> None:
    """Skip on versions whose queue always has 8 GB."""
    if major_version(binaries) < 17:
        pytest.skip("max_notify_queue_pages came with PostgreSQL 17")


@contextmanager
def full_queue(server: TestedServer) -> Iterator[int]:
    """Fill the queue while a listener sits in a transaction; yield the pid of that listener."""
    with (
        psycopg.connect(server.superuser_url, application_name="forgetful") as holder,
        psycopg.connect(server.superuser_url, autocommit=True) as filler,
    ):
        holder.execute("LISTEN anything")
        holder.commit()
        # From now on the queue keeps all notifications.
        holder.execute("SELECT 1")
        number = 0
        for batch in (PAGES // 4, 16, 1):
            try:
                for _ in range(2 * PAGES):
                    filler.execute(FILLING, [batch])
                    number += batch
            except errors.ProgramLimitExceeded:
                continue
            raise AssertionError("the notification queue did not fill")
        assert number > PAGES // 2
        yield holder.info.backend_pid
        with suppress(psycopg.OperationalError):
            holder.rollback()


@pytest.fixture
def world(own_world: World) -> World:
    own_world.rules(*RULES)
    own_world.execute("CREATE TABLE IF NOT EXISTS effect (what text)")
    own_world.execute("TRUNCATE effect; GRANT ALL ON effect TO user1")
    own_world.wait_for("SELECT pg_notification_queue_usage() = 0")
    own_world.node("user2", "LISTENER", listen="T").read("LISTENER", "T")
    return own_world


@pytest.fixture
def sender(world: World) -> Program:
    sender = world.node("user1", "SENDER", notify="T")
    sender.read("SENDER", "T")
    return sender


def waits_for(world: World, queue: str) -> None:
    """Let a reader wait for elements, so that each push notifies it."""
    # After removed rules, housekeeping moves the channels of queues.
    world.wait_for("SELECT (messages.evaluate() ->> 'Err') = '0'")
    waiter = world.program("user1")
    channel = waiter.ok("queue_listen", "WAITER", queue)["Channel"]
    waiter.connection.execute(f'LISTEN "{channel}"')


def is_refused(send: Callable[[], object]) -> bool:
    try:
        send()
    except (NotificationQueueFull, errors.ProgramLimitExceeded, OperationalError):
        return True
    return False


def seconds_until(send: Callable[[], object]) -> float:
    """Return the seconds until a send succeeds."""
    began = monotonic()
    wait_until(lambda: not is_refused(send), SOON_SECONDS)
    return monotonic() - began


@pytest.fixture
def examined(own_server: TestedServer, monkeypatch) -> Callable[..., Finding]:
    """Run a check of doctor, which reports even the shortest transaction and wait."""
    monkeypatch.setattr(doctor_checks, "MIN_OPEN_SECONDS", 0.0)
    monkeypatch.setattr(doctor_checks, "MIN_LOCK_SECONDS", 0.0)
    return lambda check, address=own_server.superuser_url: finding_of(check, address)


CALLS = (
    "topic_send('T', 'x')", "topic_send_many('T', ARRAY['x', 'y'])",
    "topic_send_as('SENDER', 'T', 'x')", "publish('SENDER', 'T', 'x')", "push('SENDER', 'Q', 'x')",
)  # fmt: skip


def test_in_sql_the_commit_fails(world: World, sender: Program, examined: Callable[..., Finding]):
    waits_for(world, "Q")

    def alone(call: str) -> None:
        sender.query(f"SELECT messages.{call}")

    def with_a_row(call: str) -> None:
        with sender.connection.transaction():
            sender.connection.execute("INSERT INTO effect VALUES ('of the same transaction')")
            alone(call)

    tries, before, refused = size(2, 50), world.owner.query(KEPT), 0
    with full_queue(world.server) as pid:
        for call, send in tries * [*product(CALLS, (alone, with_a_row))]:
            refused += is_refused(partial(send, call))
        half_done = world.owner.query(KEPT) - before
        found, blind = (
            examined(doctor_checks.notification_queue, address)
            for address in (world.server.superuser_url, world.server.url())
        )
        # The fix that doctor prints ends the session that blocks the queue.
        world.superuser().execute(found.fix)
    assert found.state is FindingState.WRONG
    assert f"perhaps held back by pid {pid} (postgres, forgetful)" in found.found
    assert "has been idle in transaction" in found.found
    assert found.fix.startswith(f"SELECT pg_terminate_backend({pid}); -- ")
    assert blind.fix.startswith("GRANT pg_read_all_stats TO psqlmessages")
    seconds = max(seconds_until(partial(with_a_row, call)) for call in CALLS)
    report(
        FAULT,
        "topic_send, publish and push in SQL, alone and with an INSERT in the same transaction",
        refused=refused, partly_done=half_done, room_after_seconds=seconds,
    )  # fmt: skip
    assert (refused, half_done) == (2 * tries * len(CALLS), 0)
    world.close()
    until(lambda: examined(doctor_checks.notification_queue).state is FindingState.OK)


def test_pushes_and_reads_continue_without_waiting_readers(world: World, sender: Program):
    number = size(20, 500)
    bodies = [str(body) for body in range(number)]
    sender.ok("publish_many", "SENDER", "T", bodies)
    # If it were found dead now, its events would fail the commit of any call.
    dead = world.node("user1", "GUEST", listen="T")
    with full_queue(world.server):
        world.kill(dead)
        for body in bodies:
            sender.ok("push", "SENDER", "Q", body)
        popped = [row.body for row in sender.elements("pop", "SENDER", "Q", number)]
        read = sender.got("SENDER", "T", 60, number)
        status = sender.ok("topic_status", "T")
    report(
        FAULT, "push without waiting readers, pop, subscribe, topic_status after a node has died",
        done=len(popped) + len(read), failed=2 * number - len(popped) - len(read),
    )  # fmt: skip
    assert popped == read == bodies
    assert "GUEST" not in status["Listeners"]
    world.wait_for(HAS_ROOM)
    world.wait_for(
        "SELECT (messages.evaluate() ->> 'Err') = '0' AND NOT EXISTS"
        " (SELECT FROM psqlmessages_client WHERE ident = 'GUEST')"
    )


def test_housekeeping_at_a_commit_fails_no_commit_while_it_is_full(world: World, sender: Program):
    waits_for(world, "DEAD")
    sender.ok("push", "SENDER", "Q", "x")
    world.owner.connection.execute(
        "UPDATE psqlmessages_queue SET max_tries = 1, dead_letter_queue = 'DEAD' WHERE name = 'Q'"
    )
    assert sender.elements("reserve", "SENDER", "Q", 1, 0.01)
    with full_queue(world.server):
        # Housekeeping moves a dead letter, and later evaluates a new group member.
        for change in ("SELECT 1", "GRANT team TO user2"):
            world.superuser().connection.execute(change)
            world.owner.connection.execute("UPDATE messages._queues SET maintained_at = 'epoch'")
            sender.query("SELECT set_config('messages.housekeeping_at', '', false)")
            sender.ok("push", "SENDER", "Q", "y")
    world.superuser().connection.execute("REVOKE team FROM user2")


def test_nodes_and_buses_report_errors_and_stay_connected(world: World):
    sends = size(20, 500)
    with (
        Node("SENDER", world.server.url("user1"), options=QUICK) as node,
        PubSub(world.server.url("user1")) as bus,
    ):
        node.topic_notify("T")
        bus.subscribe("anything")
        with full_queue(world.server):
            number = sum(is_refused(lambda: node.topic_send("T", "x")) for _ in range(sends))
            with pytest.raises(NotificationQueueFull, match="find it with psqlmessages doctor"):
                node.publish("T", "x")
            with pytest.raises(NotificationQueueFull):
                bus.publish("anything", "x")
            # A probe whose notification is refused is not lost.
            while node.counters.evaluation_failures <= 3:
                list(node.messages(timedelta(0)))
            assert node.is_healthy
        seconds = seconds_until(lambda: node.topic_send("T", "x"))
        of_bus = seconds_until(lambda: bus.publish("anything", "x"))
        lost, lost_by_bus = node.counters.lost_connections, bus.counters.lost_connections
    report(FAULT, "Node", refused=number, lost_connections=lost, room_after_seconds=seconds)
    report(FAULT, "PubSub", refused=1, lost_connections=lost_by_bus, room_after_seconds=of_bus)
    assert (number, lost, lost_by_bus) == (sends, 0, 0)


@in_loop
async def test_a_hub_says_so_and_leaves_no_ghost(world: World):
    async with opened(world.server.url("user1"), QUICK) as hub:
        boxes = [Box() for _ in range(size(5, 50))]
        for number, box in enumerate(boxes):
            await ok(hub.init(f"web.{number}", box))
            await ok(hub.run(f"web.{number}", box, "topic_listen", "T"))
        await ok(hub.run("web.0", boxes[0], "topic_notify", "T"))
        with full_queue(world.server):
            answer = await hub.run("web.0", boxes[0], "topic_send", "T", "x")
            for box in boxes[1:]:
                await hub.leave(box)
            assert await err(hub.init("web.1", Box())) == 58
            assert await err(hub.init("web.new", Box())) == 58
        began = monotonic()
        while world.owner.query("SELECT count(*) FROM psqlmessages_client") > 2:
            assert monotonic() - began < SOON_SECONDS
            await asyncio.to_thread(world.watcher.query, "SELECT pg_sleep(0.02)")
        seconds, again = monotonic() - began, Box()
        await ok(hub.init("web.1", again))
        await ok(hub.run("web.0", boxes[0], "topic_send", "T", "y"))
        await boxes[0].message()
        lost = hub.counters.lost_connections
    report(
        FAULT, "a hub: nodes of users who left in the meantime are removed", nodes=len(boxes) - 1,
        stale_nodes=0, lost_connections=lost, ended_after_seconds=seconds,
    )  # fmt: skip
    assert answer == {"Err": "58", "Errstr": TEXT}
    assert (lost, again.bodies) == (0, [])


@pytest.mark.django_db(transaction=True)
def test_an_exchange_delivers_nothing_or_all(world: World):
    bodies = [str(number) for number in range(size(500, 5000))]
    with running_exchange(world, *RULES) as exchanges:
        database = exchanges.default
        waits_for(world, "b")
        database.push_many("a", bodies)
        with full_queue(world.server), working() as running:
            counters = running.worker.counter_store.counters
            until(lambda: any(each.waits for each in counters.values()))
            half_done = len(bodies) - len(database.bodies("a")) + sum(map(len, copies(exchanges)))
        exchanges.run_until_idle()
        assert copies(exchanges) == [sorted(bodies)] * 2
    report(
        FAULT, "an exchange, while a reader waits at a destination", elements=len(bodies),
        partly_done=half_done, lost=0, duplicated=0,
    )  # fmt: skip
    assert half_done == 0


SENDS = {
    "send": lambda: send("T", "x", ident="SENDER"),
    "send_many": lambda: send_many("T", ["x", "y"], ident="SENDER"),
    "publish": lambda: publish("T", "x", ident="SENDER"),
}


@pytest.mark.django_db(transaction=True)
def test_in_django_the_transaction_fails_and_all_that_belongs_to_it(world: World):
    tries, committed = size(2, 50), list[str]()

    def with_a_row(way: str) -> None:
        with transaction.atomic():
            User.objects.create(username=f"of the transaction of {way}")
            transaction.on_commit(lambda: committed.append(way))
            SENDS[way]()

    with django_on(world.server):
        before, rows = world.owner.query(KEPT), User.objects.filter(username__startswith="of the")
        with full_queue(world.server):
            for way, run in tries * [*SENDS.items()]:
                with pytest.raises(OperationalError, match="too many notifications"):
                    with_a_row(way)
                with pytest.raises(NotificationQueueFull):
                    run()
            half_done = world.owner.query(KEPT) - before + len(committed) + rows.count()
        world.wait_for(HAS_ROOM)
        for way in SENDS:
            seconds_until(lambda: with_a_row(way))  # noqa: B023
        assert rows.count() == len(SENDS)
        rows.delete()
    report(
        FAULT,
        "send, send_many, publish of psqlmessages.django, with and without transaction.atomic()",
        refused=2 * tries * len(SENDS), partly_done=half_done, done_after=len(committed),
    )  # fmt: skip
    assert (half_done, committed) == (0, [*SENDS])


WAITS = "SELECT wait_event = %s FROM pg_stat_activity WHERE pid = %s"
IS_FILLED = "SELECT pg_notification_queue_usage() >= 0.2"
STANDBY = "ALTER SYSTEM {} synchronous_standby_names{}"


def test_doctor_names_a_listener_that_does_not_read(world: World, examined: Callable[..., Finding]):
    filler = world.superuser()
    url = world.server.superuser_url
    with psycopg.connect(url, application_name="forgetful", autocommit=True) as it:
        it.execute("LISTEN filling")
        pid = it.info.backend_pid

        def is_stuck() -> bool:
            """Return whether the queue and the buffers to the listener are full."""
            if not filler.query(IS_FILLED):
                filler.execute(FILLING, [PAGES // 8])
            return filler.query(IS_FILLED) and filler.query(WAITS, "ClientWrite", pid)

        wait_until(is_stuck)
        found = examined(doctor_checks.notification_queue)
    assert f"held back by pid {pid} (postgres, forgetful)" in found.found
    assert "has not read its notifications" in found.found


def test_doctor_names_a_commit_that_blocks_senders(world: World, examined: Callable[..., Finding]):
    superuser, pids = world.superuser(), list[int]()

    def commit(statement: str) -> None:
        """Notify in a transaction whose commit waits."""
        with psycopg.connect(world.server.superuser_url) as connection:
            pids.append(connection.info.backend_pid)
            connection.execute(statement)
            connection.execute("NOTIFY news")

    def reload(statement: str) -> None:
        superuser.execute(statement)
        superuser.execute("SELECT pg_reload_conf()")

    reload(STANDBY.format("SET", " = 'nobody'"))
    with ThreadPoolExecutor(2) as pool:
        try:
            world.wait_for("SELECT current_setting('synchronous_standby_names') = 'nobody'")
            # The checkpointer applies the setting.
            superuser.execute("CHECKPOINT")
            for statement, event in (
                ("INSERT INTO effect VALUES ('x')", "SyncRep"), ("SELECT 1", "object"),
            ):  # fmt: skip
                pool.submit(commit, statement)
                wait_until(lambda event=event: pids and superuser.query(WAITS, event, pids[-1]))
            found = examined(doctor_checks.commit_lock)
            superuser.execute(found.fix)
        finally:
            reload(STANDBY.format("RESET", ""))
    assert found.state is FindingState.WRONG
    assert f"for pid {pids[0]} (which waits for SyncRep)" in found.found
    assert examined(doctor_checks.commit_lock).state is FindingState.OK
