"""Networks that stall amid everything: found within their limits, nothing is lost or doubled."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, ConnectionLost, Node, Options
from psqlmessages.client.connections import Connection
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.sql.conftest import World

FAULT = "the network stalls"
STALLS, MESSAGES = size(2, 5), size(200, 5_000)
# How many are read before each stall, and from the last one on.
PART = MESSAGES // (STALLS + 2)
KINDS = ("stream", "async stream", "queue", "async queue")
QUEUES = ("SYNC", "ASYNC", "TAKEN", "POPPED")
RULES = (
    "user1 WRITER Topic NEWS W 3600", "user2 READER* Topic NEWS R 3600",
    *(f"user1 PUSHER Queue {queue} W 60" for queue in QUEUES),
    *(f"user2 READER* Queue {queue} R 60" for queue in QUEUES),
)  # fmt: skip
QUICK = Options(
    backoff_least=timedelta(milliseconds=20),
    backoff_most=timedelta(milliseconds=200),
    probe_interval=timedelta(seconds=1),
    probe_timeout=timedelta(seconds=2),
    answer_timeout=timedelta(seconds=5),
)
# What was reserved by an answer that never came is free again after so long.
LEASE = timedelta(seconds=10)
SECONDS = 120
POP = "SELECT body::int FROM messages.pop('READER.5', 'TAKEN')"


class Effects:
    """What readers did, each body so many times; the test waits for how far they are."""

    def __init__(self) -> None:
        self.of: dict[str, Counter[int]] = {}
        self._allowed = 0
        self._changed = threading.Condition()

    def allow(self, number: int) -> None:
        """Let so many be sent: nobody has read all while another stall is to come."""
        with self._changed:
            self._allowed = number
            self._changed.notify_all()

    def wait_until_allowed(self, number: int) -> None:
        """Wait until so many may be sent."""
        with self._changed:
            assert self._changed.wait_for(lambda: number <= self._allowed, SECONDS)

    def had(self, reader: str, body: int) -> bool:
        """Write one down; False where it was the last that was missing."""
        with self._changed:
            bodies = self.of.setdefault(reader, Counter())
            bodies[body] += 1
            self._changed.notify_all()
            return len(bodies) < MESSAGES

    def wait_for(self, number: int, *readers: str) -> None:
        """Wait until each of the readers has had so many."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(len(self.of.get(name, ())) >= number for name in readers), SECONDS
            ), {name: len(bodies) for name, bodies in self.of.items()}

    def lost(self, reader: str) -> int:
        return MESSAGES - len(self.of[reader])

    def again(self, reader: str) -> int:
        return self.of[reader].total() - len(self.of[reader])


class Readers:
    """Five readers of one stream and four queues, each with a connection through the proxy."""

    def __init__(self, proxy: Proxy, server: TestedServer, effects: Effects) -> None:
        self._effects = effects
        self._dsn = make_conninfo(server.url("user2"), host="127.0.0.1", port=proxy.port)
        self.has_ended_pushing = threading.Event()
        self.is_over = False
        self.nodes: dict[str, Node | AsyncNode] = {
            "stream": Node("READER.1", self._dsn, options=QUICK),
            "queue": Node("READER.2", self._dsn, options=QUICK),
            "pop": Node("READER.3", self._dsn, options=QUICK),
            "async": AsyncNode("READER.4", self._dsn, options=QUICK),
        }

    def end(self) -> None:
        """End all: nobody waits any more where one has failed."""
        self.is_over = True
        for node in self.nodes.values():
            node.stop()

    def stream(self) -> None:
        with self.nodes["stream"] as node:
            for message in node.subscribe("NEWS"):
                if not self._effects.had("stream", message.body):
                    return

    def queue(self) -> None:
        with self.nodes["queue"] as node:
            for element in node.consume("SYNC", duration=LEASE):
                if not self._effects.had("queue", element.body):
                    return

    def pop(self) -> None:
        """Pop what `pop` gives out at once; what an answer held that never came is gone."""
        with self.nodes["pop"] as node:
            while not self.is_over:
                has_ended = self.has_ended_pushing.is_set()
                with suppress(ConnectionLost):
                    elements = node.pop("POPPED", timeout=timedelta(seconds=0.5))
                    for element in elements:
                        self._effects.had("pop", element.body)
                    if has_ended and not node.sizes("POPPED").total:
                        return

    def asynchronous(self) -> None:
        asyncio.run(self._asynchronous())

    async def _asynchronous(self) -> None:
        async with self.nodes["async"] as node:
            await asyncio.gather(self._stream_of(node), self._queue_of(node))

    async def _stream_of(self, node: AsyncNode) -> None:
        async for message in node.subscribe("NEWS"):
            if not self._effects.had("async stream", message.body):
                return

    async def _queue_of(self, node: AsyncNode) -> None:
        async for element in node.consume("ASYNC", duration=LEASE):
            if not self._effects.had("async queue", element.body):
                return

    def transaction(self) -> None:
        """Pop and do the work in one transaction, without a node."""
        while not self.is_over and len(self._effects.of.get("transaction", ())) < MESSAGES:
            with suppress(psycopg.OperationalError):
                connection = Connection.connect(self._dsn, autocommit=True, connect_timeout=2)
                connection.answer_seconds = 2
                with closing(connection):
                    # A transaction whose client the network has cut off holds what it popped.
                    connection.execute("SET idle_in_transaction_session_timeout = '2s'")
                    while self._work_once(connection):
                        pass

    def _work_once(self, connection: Connection) -> bool:
        """Do the work of one element, if there is one; False where all of it was done."""
        with connection.transaction():
            row = connection.execute(POP).fetchone()
            if row is not None:
                connection.execute("INSERT INTO done VALUES (%s)", row)
        if row is None:
            # Known to be done also where the answer to a COMMIT never came.
            for (body,) in connection.execute("SELECT body FROM done"):
                if body not in self._effects.of.get("transaction", ()):
                    self._effects.had("transaction", body)
            threading.Event().wait(0.05)
            return not self.is_over and len(self._effects.of.get("transaction", ())) < MESSAGES
        return self._effects.had("transaction", row[0])


def publish(server: TestedServer, effects: Effects) -> None:
    """Publish over a network that is sound, not faster than all is read."""
    with Node("WRITER", server.url("user1")) as node:
        for number in range(0, MESSAGES, 10):
            effects.wait_until_allowed(number + 10)
            node.publish_many("NEWS", range(number, number + 10))
            effects.wait_for(number - 50, *KINDS)


def push(dsn: str, effects: Effects) -> None:
    """Push over the network that stalls, each until it is known to be there: it has a key."""
    with Node("PUSHER", dsn, options=QUICK) as node:
        for number in range(0, MESSAGES, 5):
            effects.wait_until_allowed(number + 5)
            some = range(number, number + 5)
            for queue in QUEUES:
                while True:
                    with suppress(ConnectionLost):
                        node.push_many(queue, some, keys=[str(each) for each in some])
                        break


@pytest.fixture
def effects(world: World) -> Iterator[Effects]:
    """What readers did; a table of it too, for the one that works in transactions."""
    world.rules(*RULES)
    world.owner.connection.execute("CREATE TABLE done (body int)")
    world.owner.connection.execute("GRANT SELECT, INSERT ON done TO user2")
    for reader in ("READER.1", "READER.4"):
        with Node(reader, world.server.url("user2")) as node:
            node.subscribe("NEWS")
    yield Effects()
    world.owner.connection.execute("DROP TABLE done")


def test_streams_and_queues_through_stalls(
    server: TestedServer, world: World, proxy: Proxy, effects: Effects
) -> None:
    readers = Readers(proxy, server, effects)
    # Each has a thread: by default there are but four more than processors.
    with ThreadPoolExecutor(8) as pool:
        reading = [
            pool.submit(read)
            for read in (
                readers.stream, readers.queue, readers.pop, readers.asynchronous,
                readers.transaction,
            )
        ]  # fmt: skip
        publishing = pool.submit(publish, server, effects)
        dsn = make_conninfo(server.url("user1"), host="127.0.0.1", port=proxy.port)
        pushing = pool.submit(push, dsn, effects)
        pushing.add_done_callback(lambda _: readers.has_ended_pushing.set())
        try:
            for stall in range(1, STALLS + 1):
                effects.allow(PART * (stall + 1))
                effects.wait_for(PART * stall, *KINDS)
                proxy.stall()
            effects.allow(MESSAGES)
            for each in (publishing, pushing, *reading):
                each.result(SECONDS)
        except AssertionError:
            for each in (publishing, pushing, *reading):
                if each.done():
                    each.result()
            raise
        finally:
            effects.allow(MESSAGES)
            readers.end()
    again = {name: effects.again(name) for name in effects.of}
    effects_in_database = world.owner.connection.execute(
        "SELECT count(*), count(DISTINCT body) FROM done"
    ).fetchone()
    counted(
        FAULT, "one stream and four queues, read and pushed to through stalls",
        stalls=STALLS, messages=MESSAGES,
        lost=sum(effects.lost(name) for name in effects.of if name != "pop"),
        doubled=again["stream"] + again["async stream"] + again["pop"],
        handed_out_again_by_a_lease=again["queue"] + again["async queue"],
        gone_with_the_answer_of_pop=effects.lost("pop"),
        reconnects=sum(node.counters.reconnects for node in readers.nodes.values()),
    )  # fmt: skip
    assert effects_in_database == (MESSAGES, MESSAGES)
    assert [effects.lost(name) for name in effects.of if name != "pop"] == [0] * 5
    assert again["stream"] == again["async stream"] == again["pop"] == 0
    assert effects.lost("pop") <= STALLS
    assert all(node.counters.reconnects >= STALLS for node in readers.nodes.values())
