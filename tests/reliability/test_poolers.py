"""Poolers in between: who listens is refused and told why; streams and queues work through all."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from psqlmessages import AsyncNode, AsyncPubSub, Node, Options, PubSub
from psqlmessages.cli.doctor_checks import FindingState, listening, pooler
from psqlmessages.client import queue_listener
from psqlmessages.client.connect import PoolerKind, connect, detect_pooler
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.exceptions import ConnectionShared, ServerUnreachable
from psqlmessages.rest.pool import Pool
from psqlmessages.retry import RateLimitedLogger
from tests.client.programs import finished
from tests.conftest import TestedServer
from tests.django.conftest import finding_of
from tests.django.pgbouncer import pgbouncer
from tests.reliability.counts import report, size
from tests.sql.conftest import World
from tests.web.receivers import opened

FAULT = "a pooler in transaction mode"
IMPATIENT = Options(answer_timeout=timedelta(seconds=2))
CLIENTS, MESSAGES = 8, size(120, 2_000)
RULES = (
    "user1 W* Topic NEWS RW 3600", "user1 W* Queue Q RW 60", "user2 R* Topic NEWS R 3600",
    "user1 NODE* Topic T RW 60", "user1 W* Rpc R* W 60",
)  # fmt: skip
REFUSED = r"the pooler at 127\.0\.0\.1:\d+ shares connections by (transaction|statement)"
PUSH = "SELECT (messages.push('W', 'Q', %s::text) ->> 'Err')::int"
POP = "SELECT body::int FROM messages.pop('W', 'Q')"
FIX = "(in Django: by an alias 'direct' in DATABASES), or set pool_mode = session in pgbouncer.ini"


@pytest.fixture(autouse=True)
def _ruled(world: World) -> None:
    world.rules(*RULES)


def behind(address: str, server: TestedServer, role: str) -> str:
    return make_conninfo(server.url(role), port=conninfo_to_dict(address)["port"])


@pytest.fixture
def by_transaction(request, server: TestedServer) -> Iterator[str]:
    """The address of a pool of two connections, which clients share."""
    with pgbouncer(server, getattr(request, "param", "transaction"), pool_size=2) as address:
        yield behind(address, server, "user1")


LOCKING = "SELECT ARRAY(SELECT pid FROM pg_locks WHERE locktype = 'advisory')"


@pytest.mark.parametrize(
    "by_transaction",
    ["transaction", pytest.param("statement", marks=pytest.mark.nightly)],
    indirect=True,
)
def test_all_that_listen_are_refused_at_the_start_with_a_remedy(by_transaction: str, world: World):
    held = set(world.watcher.query(LOCKING))

    async def open_all() -> None:
        with pytest.raises(ConnectionShared, match=REFUSED) as refused:
            await AsyncNode("NODE1", by_transaction).open()
        assert FIX in str(refused.value)
        with pytest.raises(ConnectionShared, match=REFUSED):
            await Gateway("gateway", by_transaction).open()
        async with opened(by_transaction) as hub:
            assert (await hub.init("NODE1", lambda _: None))["Err"] == "59"
        async with AsyncPubSub(by_transaction) as bus:
            with pytest.raises(ConnectionShared, match=REFUSED):
                await bus.subscribe("channel")

    for _ in range(3):
        with pytest.raises(ConnectionShared, match=REFUSED) as refused:
            Node("NODE1", by_transaction).open()
        assert FIX in str(refused.value)
    with PubSub(by_transaction) as bus, pytest.raises(ConnectionShared, match=REFUSED):
        bus.subscribe("channel")
    asyncio.run(open_all())
    command = finished("receive", "NODE1", "T", dsn=by_transaction)
    report(FAULT, "nodes, hubs and buses", refused=8)
    assert command.returncode != 0
    assert FIX in command.stderr
    assert "Traceback" not in command.stderr
    # They leave no session and no lock on the shared connections.
    assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 0
    assert set(world.watcher.query(LOCKING)) <= held


def test_exchanges_are_refused_and_rest_readers_poll(by_transaction: str, caplog, monkeypatch):
    # The same message is logged once an hour, also over tests.
    monkeypatch.setattr(queue_listener, "log", RateLimitedLogger(queue_listener.logger))

    async def listen() -> None:
        with pytest.raises(ConnectionShared, match=REFUSED):
            await QueueListener(by_transaction, "exchange").listen("W", "Q")
        listener = QueueListener(by_transaction, "rest", may_poll=True)
        for _ in range(2):
            state = await listener.listen("W", "Q")
            assert (state.next_at, state.is_listening) == (None, False)

    asyncio.run(listen())
    assert "polling instead of listening: the pooler at" in caplog.text


def test_it_is_found_while_other_clients_fill_the_pool(by_transaction: str, server: TestedServer):
    stop = False

    def work() -> None:
        with closing(connect(by_transaction)) as connection:
            while not stop:
                connection.execute("SELECT pg_sleep(0.001)")

    with ThreadPoolExecutor(CLIENTS) as pool:
        busy = [pool.submit(work) for _ in range(CLIENTS)]
        try:
            found = [detect_pooler(by_transaction) for _ in range(size(5, 50))]
        finally:
            stop = True
        for each in busy:
            each.result(20)
    report(FAULT, "detection while 8 clients share 2 connections", found=len(found))
    assert set(found) == {PoolerKind.TRANSACTION}
    for mode, size_ in (("transaction", 1), ("statement", 2)):
        with pgbouncer(server, mode, size_) as address:
            assert [detect_pooler(address) for _ in range(3)] == [PoolerKind(mode)] * 3
            findings = [finding_of(check, address) for check in (pooler, listening)]
        assert {finding.state for finding in findings} == {FindingState.WRONG}
        assert findings[0].found == f"a pooler that shares connections by {mode}"
        assert FIX.partition("set ")[2] in findings[0].fix


def test_a_pool_by_session_serves_all_and_a_full_one_says_so(server: TestedServer):
    async def receive(dsn: str) -> None:
        async with AsyncNode("NODE2", dsn) as node, AsyncPubSub(dsn, skip_self=True) as bus:
            came: asyncio.Queue[object] = asyncio.Queue()
            bus.on("channel", came.put_nowait)
            await bus.subscribe("channel")
            await node.topic_listen("T")
            with Node("NODE1", dsn) as sender, PubSub(dsn) as other:
                sender.topic_notify("T")
                sender.topic_send("T", "through it")
                bodies = (message.body async for message in node if message.type == "Topic")
                assert await anext(bodies) == "through it"
                await bus.publish("channel", "its own")
                other.publish("channel", "another's")
                assert (await asyncio.wait_for(came.get(), 90)).payload == "another's"

    with pgbouncer(server, "session", pool_size=6) as address:
        dsn = behind(address, server, "user1")
        assert [detect_pooler(dsn) for _ in range(3)] == [PoolerKind.SESSION] * 3
        for check in (pooler, listening):
            assert finding_of(check, address).state is FindingState.OK
        asyncio.run(receive(dsn))
        with Node("NODE1", dsn) as last:
            assert last.topic_status("T").listeners == ()
    report("a pooler in session mode", "nodes and buses", refused=0)
    # A pool of one connection is enough for one node: its probe closes first.
    with pgbouncer(server, "session", pool_size=1) as address:
        dsn = behind(address, server, "user1")
        with Node("NODE1", dsn) as node:
            assert node.topic_listen("T")
            with pytest.raises(ServerUnreachable, match="no answer from the server"):
                Node("NODE2", dsn, options=IMPATIENT).open()


def test_many_clients_lose_and_double_no_message_or_element(by_transaction: str, world: World):
    share = MESSAGES // CLIENTS

    def work(number: int) -> list[int]:
        """Publish and push a share of the messages; take elements in between."""
        taken: list[int] = []
        ident = f"W{number}"
        with closing(psycopg.connect(by_transaction, autocommit=True)) as connection:
            # docs/how-to/pgbouncer.md: statements prepared on one connection are not on others.
            connection.prepare_threshold = None
            for body in range(number * share, (number + 1) * share):
                connection.execute("SELECT messages.publish(%s, 'NEWS', %s::text)", (ident, body))
                connection.execute("SELECT messages.push(%s, 'Q', %s::text)", (ident, body))
                with connection.transaction():
                    rows = connection.execute(
                        "SELECT body::int, lease FROM messages.reserve(%s, 'Q', 2)", (ident,)
                    ).fetchall()
                for taken_body, lease in rows:
                    connection.execute("SELECT messages.commit(%s, %s)", (ident, lease))
                    taken.append(taken_body)
        return taken

    reader = world.program("user2")
    reader.read("R", "NEWS", 3600)
    with ThreadPoolExecutor(CLIENTS) as pool:
        taken = [body for share_of in pool.map(work, range(CLIENTS)) for body in share_of]
    taken += [int(row.body) for row in world.program("user1").elements("pop", "W", "Q", 100)]
    read: list[int] = []
    while bodies := reader.got("R", "NEWS", 3600):
        read += map(int, bodies)
    wanted = Counter(range(CLIENTS * share))
    report(
        FAULT, "streams and queues, 8 clients on 2 connections", messages=2 * CLIENTS * share,
        lost=(wanted - Counter(read)).total() + (wanted - Counter(taken)).total(),
        duplicated=(Counter(read) - wanted).total() + (Counter(taken) - wanted).total(),
    )  # fmt: skip
    assert Counter(read) == Counter(taken) == wanted


def test_the_rest_api_asks_through_it(by_transaction: str):
    async def ask_all() -> Counter[int]:
        pools, taken = [Pool(by_transaction, f"pool {n}", 4) for n in range(3)], Counter[int]()
        for first in range(0, MESSAGES, 12):
            some = [(pools[n % 3], n) for n in range(first, min(first + 12, MESSAGES))]
            pushed = await asyncio.gather(*(pool.fetch(PUSH, (n,)) for pool, n in some))
            assert pushed == [[(0,)] for _ in some]
            popped = await asyncio.gather(*(pool.fetch(POP) for pool, _ in some))
            taken.update(row[0] for rows in popped for row in rows)
        assert await pools[0].fetch("SHOW statement_timeout") == [("0",)]
        for pool in pools:
            pool._close_idle()
        return taken

    taken = asyncio.run(ask_all())
    wanted = Counter(range(MESSAGES))
    report(
        FAULT, "12 connections of the REST API on 2 connections", messages=MESSAGES,
        lost=(wanted - taken).total(), duplicated=(taken - wanted).total(),
    )  # fmt: skip
    assert taken == wanted
