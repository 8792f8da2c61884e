"""The notification queue is full: who sends is told so, nothing is half done, and it ends."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

import pytest
from psycopg import errors

from psqlmessages import AsyncNode, AsyncPubSub, Node, NotificationQueueFull, Options, PubSub
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.reliability.counts import counted, size
from tests.reliability.holders import SMALL_QUEUE, full_queue, need_small_queue
from tests.sql.conftest import Program, World
from tests.web.receivers import Box, err, ok, opened, run

SERVER_SETTINGS, need_server = SMALL_QUEUE, need_small_queue
FAULT = "the notification queue is full"
RULES = (
    "user1 SENDER Topic T RW 60",
    "user1 SENDER Queue Q RW 60",
    "user1 WAITER Queue Q RW 60",
    "user2 LISTENER Topic T RW 60",
    "user1 web.* Topic T RW 60",
    "user1 GUEST Topic T RW 60",
)
# Each is due several times while a test lasts.
QUICK = Options(
    evaluate_interval=timedelta(milliseconds=100),
    probe_interval=timedelta(milliseconds=300),
    probe_timeout=timedelta(milliseconds=600),
)
INSTANT = timedelta(0)
# A busy machine may need so long for what takes a second.
SOON_SECONDS = 60


@pytest.fixture
def listened(own_world: World) -> World:
    """A node of user2 listens to T."""
    own_world.rules(*RULES)
    own_world.owner.connection.execute("CREATE TABLE IF NOT EXISTS effect (what text)")
    own_world.owner.connection.execute("TRUNCATE effect; GRANT ALL ON effect TO user1")
    own_world.wait_for("SELECT pg_notification_queue_usage() = 0")
    listener = own_world.node("user2", "LISTENER")
    listener.ok("topic_listen", "T")
    return own_world


@pytest.fixture
def sender(listened: World) -> Program:
    """The node SENDER of user1, which sends to T."""
    sender = listened.node("user1", "SENDER")
    sender.ok("topic_notify", "T")
    # A subscription, so that what is published is kept.
    sender.read("SENDER", "T")
    return sender


def is_refused(send: Callable[[], object]) -> bool:
    """Whether the full queue refuses something."""
    try:
        send()
    except (NotificationQueueFull, errors.ProgramLimitExceeded):
        return True
    return False


def seconds_until(send: Callable[[], object]) -> float:
    """Wait until something succeeds that the full queue refused; for how long."""
    began = monotonic()
    wait_until(lambda: not is_refused(send))
    return monotonic() - began


CALLS = {
    "topic_send": "SELECT messages.topic_send('T', 'x')",
    "topic_send_many": "SELECT messages.topic_send_many('T', ARRAY['x', 'y'])",
    "topic_send_as": "SELECT messages.topic_send_as('SENDER', 'T', 'x')",
    "publish": "SELECT messages.publish('SENDER', 'T', 'x')",
    "push": "SELECT messages.push('SENDER', 'Q', 'x')",
}
KEPT = """
    SELECT (SELECT count(*) FROM effect) + (SELECT count(*) FROM psqlmessages_streammessage)
        + (SELECT count(*) FROM psqlmessages_element)
"""


@pytest.mark.parametrize("call", CALLS)
def test_in_sql_the_commit_fails_and_all_that_belongs_to_it(
    own: TestedServer, listened: World, sender: Program, call: str
) -> None:
    # Who waits for elements is notified of each push.
    waiter = listened.program("user1")
    channel = waiter.ok("queue_listen", "WAITER", "Q")["Channel"]
    waiter.connection.execute(f'LISTEN "{channel}"')

    def with_a_row() -> None:
        with sender.connection.transaction():
            sender.connection.execute("INSERT INTO effect VALUES ('of the same transaction')")
            sender.query(CALLS[call])

    tries, before = size(5, 50), listened.owner.query(KEPT)
    with full_queue(own):
        refused = sum(is_refused(with_a_row) for _ in range(tries))
        refused += sum(is_refused(lambda: sender.query(CALLS[call])) for _ in range(tries))
        half_done = listened.owner.query(KEPT) - before
    seconds = seconds_until(with_a_row)
    counted(
        FAULT, f"{call} in SQL, alone and with a row of one's own",
        refused=refused, half_done=half_done, room_again_seconds=seconds,
    )  # fmt: skip
    assert (refused, half_done) == (2 * tries, 0)
    assert seconds < SOON_SECONDS


def test_a_push_that_wakes_nobody_and_reading_go_on(
    own: TestedServer, listened: World, sender: Program
) -> None:
    number = size(20, 500)
    for body in range(number):
        sender.ok("publish", "SENDER", "T", f"before {body}")
    # Its events would fail whatever commits, if it were found dead now.
    dead = listened.node("user1", "GUEST")
    dead.ok("topic_listen", "T")
    with full_queue(own):
        listened.kill(dead)
        for body in range(number):
            sender.ok("push", "SENDER", "Q", str(body))
        popped = [row.body for row in sender.elements("pop", "SENDER", "Q", number)]
        read = sender.got("SENDER", "T", 60, number)
        status = sender.ok("topic_status", "T")
    counted(
        FAULT, "push where nobody waits, pop, subscribe, topic_status while a node has died",
        done=len(popped) + len(read), failed=2 * number - len(popped) - len(read),
    )  # fmt: skip
    assert popped == [str(body) for body in range(number)]
    assert read == [f"before {body}" for body in range(number)]
    assert "GUEST" not in status["Listeners"]
    listened.wait_for("SELECT pg_notification_queue_usage() < 0.5")
    listened.wait_for(
        "SELECT (messages.evaluate() ->> 'Err') = '0' AND NOT EXISTS"
        " (SELECT FROM psqlmessages_client WHERE ident = 'GUEST')"
    )


def test_what_a_commit_looks_after_fails_nobodys_while_there_is_no_room(
    own: TestedServer, listened: World, sender: Program
) -> None:
    listened.rules("user1 WAITER Queue DEAD RW 60")
    listened.program("user1").ok("queue_listen", "WAITER", "DEAD")
    sender.ok("push", "SENDER", "Q", "x")
    listened.owner.connection.execute(
        "UPDATE psqlmessages_queue SET max_tries = 1, dead_letter_queue = 'DEAD' WHERE name = 'Q'"
    )
    assert sender.elements("reserve", "SENDER", "Q", 1, 0.01)
    with full_queue(own):
        # A lease has run out for the last time; then somebody also joins a group.
        for change in ("SELECT 1", "GRANT team TO user2"):
            listened.superuser().connection.execute(change)
            listened.owner.connection.execute("UPDATE messages._queues SET tended_at = 'epoch'")
            sender.query("SELECT set_config('messages.evaluated', '', false)")
            sender.ok("push", "SENDER", "Q", "y")
    listened.superuser().connection.execute("REVOKE team FROM user2")


def test_a_node_says_what_is_wrong_and_stays_connected(own: TestedServer, listened: World) -> None:
    sends = size(20, 500)
    with Node("SENDER", own.url("user1"), options=QUICK) as node:
        node.topic_notify("T")
        with full_queue(own):
            refused = sum(is_refused(lambda: node.topic_send("T", "x")) for _ in range(sends))
            with pytest.raises(NotificationQueueFull, match="psqlmessages doctor names it"):
                node.publish("T", "x")
            # Probes notify too: so long as they are refused, none is lost.
            while node.counters.evaluation_failures <= 3:
                list(node.messages(INSTANT))
            assert node.is_healthy
        seconds = seconds_until(lambda: node.topic_send("T", "x"))
        lost = node.counters.lost_connections
    counted(FAULT, "Node", refused=refused, lost_connections=lost, room_again_seconds=seconds)
    assert (refused, lost) == (sends, 0)
    assert seconds < SOON_SECONDS


def test_an_async_node_says_so_to_each_of_those_that_share_a_round_trip(
    own: TestedServer, listened: World
) -> None:
    sends = size(50, 500)

    async def test() -> None:
        async with AsyncNode("SENDER", own.url("user1"), options=QUICK) as node:
            await node.topic_notify("T")

            async def refused(number: int) -> bool:
                try:
                    await node.topic_send("T", str(number))
                except NotificationQueueFull:
                    return True
                return False

            with full_queue(own):
                number = sum(await asyncio.gather(*map(refused, range(sends))))
                while node.counters.evaluation_failures <= 3:
                    await node.topic_status("T")
                assert node.is_healthy
            began = monotonic()
            while await refused(0):
                assert monotonic() - began < SOON_SECONDS
            seconds, lost = monotonic() - began, node.counters.lost_connections
        counted(
            FAULT, "AsyncNode, all at once",
            refused=number, lost_connections=lost, room_again_seconds=seconds,
        )  # fmt: skip
        assert (number, lost) == (sends, 0)
        assert seconds < SOON_SECONDS

    run(test())


def test_a_hub_says_so_and_leaves_no_ghost(own: TestedServer, listened: World) -> None:
    nodes = size(5, 50)

    async def test() -> None:
        async with opened(own.url("user1"), QUICK) as hub:
            boxes = [Box() for _ in range(nodes)]
            for number, box in enumerate(boxes):
                await ok(hub.init(f"web.{number}", box))
                await ok(hub.run(f"web.{number}", box, "topic_listen", "T"))
            await ok(hub.run("web.0", boxes[0], "topic_notify", "T"))
            with full_queue(own):
                answer = await hub.run("web.0", boxes[0], "topic_send", "T", "x")
                for box in boxes[1:]:
                    await hub.leave(box)
                assert await err(hub.init("web.1", Box())) == 58
                assert await err(hub.init("web.new", Box())) == 58
            began = monotonic()
            while listened.owner.query("SELECT count(*) FROM psqlmessages_client") > 2:
                assert monotonic() - began < SOON_SECONDS
                await asyncio.to_thread(listened.watcher.query, "SELECT pg_sleep(0.02)")
            seconds = monotonic() - began
            again = Box()
            await ok(hub.init("web.1", again))
            await ok(hub.run("web.0", boxes[0], "topic_send", "T", "y"))
            await boxes[0].message()
            counters = hub.counters
        counted(
            FAULT, "hub: nodes whose users left meanwhile are ended",
            nodes=nodes - 1, ghosts=0, lost_connections=counters.lost_connections,
            ended_after_seconds=seconds,
        )  # fmt: skip
        assert answer == {
            "Err": "58",
            "Errstr": "more than PostgreSQL's notification queue holds",
        }
        assert counters.lost_connections == 0
        assert again.bodies == []
        assert seconds < SOON_SECONDS

    run(test())


def test_a_bus_says_so_and_works_again(own: TestedServer, listened: World) -> None:
    with PubSub(own.url("user1")) as bus:
        bus.subscribe("anything")
        with full_queue(own), pytest.raises(NotificationQueueFull):
            bus.publish("anything", "x")
        # No node is there to free the queue: the bus does it as it sees after its connection.
        seconds = seconds_until(lambda: bus.publish("anything", "x"))
        lost = bus.counters.lost_connections
    counted(FAULT, "PubSub", refused=1, lost_connections=lost, room_again_seconds=seconds)
    assert lost == 0
    assert seconds < SOON_SECONDS


def test_an_async_bus_says_so_too(own: TestedServer, listened: World) -> None:
    async def test() -> None:
        async with AsyncPubSub(own.url("user1")) as bus:
            with full_queue(own), pytest.raises(NotificationQueueFull):
                await bus.publish("anything", "x")

    run(test())
