"""Backends and servers die under readers: each message comes once to each that iterates."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from project.postgres import Server
from psqlmessages import AsyncNode, Node, Options, StreamMessage
from psqlmessages.client.stream_calls import NOTHING
from tests.client.nodes import QUICK, end_backend
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.sql.conftest import World
from tests.streams.client.conftest import NewReader

LONG = timedelta(minutes=3)
PATIENT = replace(QUICK, probe_timeout=LONG, stream_poll_interval=timedelta(hours=1))
MESSAGES = 400
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'READER*', 'Topic', 'NEWS', 'R', 5),
        ('psqlmessages', 'WRITER', 'Topic', 'NEWS', 'W', 5)
    ON CONFLICT DO NOTHING
"""


@pytest.mark.usefixtures("no_second_look")
def test_a_new_connection_reads_on(stream: World, writer: Node, new_reader: NewReader) -> None:
    with new_reader(PATIENT) as node, ThreadPoolExecutor() as pool:
        messages = node.subscribe("NEWS", max_rows=4)
        writer.publish_many("NEWS", range(6))
        taken = [message.body for message in islice(messages, 5)]
        end_backend(stream, "READER")
        # The reader learns of it when it asks; nothing wakes it but its own return.
        writer.publish("NEWS", 6)
        waiting = pool.submit(lambda: [message.body for message in islice(messages, 2)])
        assert taken + waiting.result(LONG.total_seconds()) == list(range(7))
        end_backend(stream, "READER")
        writer.publish("NEWS", 7)
        assert next(messages).body == 7
        assert (node.counters.reconnects, node.counters.gaps) == (2, 0)


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_ids_may_come_again(stream: World, writer: Node, reader: Node, is_confirmed: bool) -> None:
    messages = reader.subscribe("NEWS", idle=timedelta(0))
    assert list(messages) == []
    before = [writer.publish("NEWS", number).id for number in range(3)]
    assert before[0] is not None
    taken = [message.body for message in (messages if is_confirmed else islice(messages, 3))]
    assert taken == [0, 1, 2]
    # A standby that never had these commits takes over.
    lost = before[0] - 1
    owner = stream.owner.connection
    owner.execute("DELETE FROM psqlmessages_streammessage WHERE id > %s", [lost])
    owner.execute("UPDATE psqlmessages_subscription SET position = %s", [lost])
    owner.execute("SELECT setval('messages._stream_id', %s)", [lost])
    after = [writer.publish("NEWS", number).id for number in range(10, 15)]
    assert before == after[:3]
    assert [message.body for message in messages] == list(range(10, 15))


class Publisher(threading.Thread):
    """Publishes numbers in their order, each until it knows that it is committed."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.middle = threading.Event()

    def run(self) -> None:
        connection = psycopg.connect(self._url, autocommit=True)
        for number in range(MESSAGES):
            if number == MESSAGES // 2:
                self.middle.set()
            while True:
                try:
                    connection.execute(
                        "SELECT messages.publish('WRITER', 'NEWS', %s)", (str(number),)
                    )
                    break
                except psycopg.OperationalError:
                    connection.close()
                    connection = self._connect()
        connection.close()

    def _connect(self) -> psycopg.Connection:
        while True:
            try:
                return psycopg.connect(self._url, autocommit=True)
            except psycopg.OperationalError:
                continue


def whole(taken: list[StreamMessage]) -> list[int]:
    """What came, in the order of ids, without what the publisher had to publish again."""
    ids = [message.id for message in taken]
    assert ids == sorted(set(ids)), "something came twice, or not in its order"
    return list(dict.fromkeys(int(message.body) for message in taken))


def is_last(message: StreamMessage) -> bool:
    return message.body == str(MESSAGES - 1)


def read_all(node: Node) -> list[StreamMessage]:
    taken = []
    for message in node.subscribe("NEWS", LONG * 5, idle=LONG):
        taken.append(message)
        if is_last(message):
            break
    return taken


async def read_all_async(url: str) -> list[StreamMessage]:
    taken = []
    async with AsyncNode("READER.ASYNC", url, options=Options(probe_timeout=LONG)) as node:
        async for message in node.subscribe("NEWS", LONG * 5, idle=LONG):
            taken.append(message)
            if is_last(message):
                break
    return taken


# One restart for every day.
@pytest.mark.parametrize("how", [pytest.param("fast", marks=pytest.mark.nightly), "immediate"])
def test_readers_go_on_through_a_restart_of_the_server(mortal: Server, how: str) -> None:
    url = mortal.url()
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(RULES)
        for name in ("SYNC", "ASYNC"):
            reader = f"READER.{name}"
            owner.execute("SELECT messages.publish('WRITER', 'NEWS', '-1')")
            owner.execute("SELECT messages.unsubscribe(%s, 'NEWS')", (reader,))
            owner.execute("SELECT * FROM messages.subscribe(%s, 'NEWS', 900)", (reader,))
    publisher, options = Publisher(url), Options(probe_timeout=LONG)
    with ThreadPoolExecutor() as pool, Node("READER.SYNC", url, options=options) as node:
        waits = [pool.submit(read_all, node), pool.submit(asyncio.run, read_all_async(url))]
        publisher.start()
        publisher.middle.wait()
        mortal.stop(how)
        mortal.start()
        for wait in waits:
            assert [each for each in whole(wait.result()) if each >= 0] == list(range(MESSAGES))
        publisher.join()
        assert node.counters.reconnects == 1


@pytest.mark.usefixtures("no_second_look")
def test_a_reading_on_a_stalled_network_is_made_again(server: TestedServer, writer: Node) -> None:
    address = conninfo_to_dict(server.url())
    options = replace(PATIENT, answer_timeout=timedelta(seconds=2))
    with Proxy(str(address["host"]), int(str(address["port"]))).serve() as proxy:
        dsn = make_conninfo(server.url("user2"), host="127.0.0.1", port=proxy.port)
        with Node("READER", dsn, options=options) as node:
            messages = node.subscribe("NEWS", max_rows=2)
            writer.publish_many("NEWS", range(4))
            assert [message.body for message in islice(messages, 2)] == [0, 1]
            proxy.stall()
            # The confirmation gets no answer: whether it was done is not known.
            assert [message.body for message in islice(messages, 2)] == [2, 3]
            # A machine that stands still is taken for such a network.
            assert node.counters.reconnects >= 1


def test_in_the_hour_that_comes_twice_what_is_younger_was_not_handed_out() -> None:
    zone = ZoneInfo("Europe/Berlin")
    last = NOTHING.then(10, datetime(2026, 10, 25, 2, 50, tzinfo=zone))
    assert last.includes(10, datetime(2026, 10, 25, 2, 50, tzinfo=zone))
    # A quarter of an hour later.
    assert not last.includes(8, datetime(2026, 10, 25, 2, 5, tzinfo=zone, fold=1))
