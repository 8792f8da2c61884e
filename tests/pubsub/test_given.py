"""PubSub on a connection of the caller: transactions, other uses, and closing."""

import threading
from queue import Queue
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from psqlmessages.exceptions import ConnectionLost, NodeClosed
from psqlmessages.pubsub import bus_connection
from tests.client.programs import PROMPTLY
from tests.django.waiting import wait_until
from tests.pubsub.conftest import SECONDS, Connect, NewBus, Receiver, end_backend
from tests.sql.conftest import Program


@pytest.fixture
def given(connect: Connect) -> Connection:
    return connect()


@pytest.fixture
def writer(new_bus: NewBus, given: Connection) -> Any:
    return new_bus(given, interval=0.1)


@pytest.fixture
def heard(writer: Any) -> Receiver:
    return Receiver.of(writer)


def listens(connection: Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT pg_listening_channels()")}


def test_a_transaction_sends_at_commit(writer: Any, given: Connection, listener: Program):
    with given.transaction():
        writer.publish("A", 1)
        with given.transaction(force_rollback=True):
            writer.publish("A", 2)
        writer.publish("A", 3)
        assert listener.payloads() == []
    assert listener.payloads() == ["@1", "@3"]
    with given.transaction(force_rollback=True):
        writer.publish("A", "never")
    # Segments are remembered only during the transaction.
    travelled = []
    for _ in range(2):
        with given.transaction():
            writer.publish("A", "x" * 8000)
        travelled.append(listener.payloads())
    assert travelled[0] == travelled[1]
    assert len(travelled[0]) == 2


def test_autocommit_does_not_matter(new_bus: NewBus, connect: Connect, listener: Program):
    connection = connect(autocommit=False)
    writer = new_bus(connection)
    receiver = Receiver.of(writer)
    writer.publish("A", "at once")
    assert listener.payloads() == ["!at once"]
    assert receiver.event() == (connection.info.backend_pid, "A", "at once")
    connection.execute("SELECT 1")
    writer.publish("A", "at commit")
    assert listener.payloads() == []
    connection.commit()
    assert listener.payloads() == ["!at commit"]


def test_equal_short_messages_arrive_as_one(writer: Any, given: Connection, receiver: Receiver):
    sizes = (10, 7_998, 8_000, 100_000, 1_000_000)
    payloads = [character * size for character in ("x", "\0", "я") for size in sizes]
    payloads += ["q" * 50_000] * 5 + ["q" * 50_000 + "z"] * 5 + ["a" + "q" * 50_000] * 5
    with given.transaction():
        for payload in payloads:
            writer.publish("A", payload)
    is_equal = [receiver.payload() for _ in payloads] == payloads
    assert is_equal
    with given.transaction():
        for payload in ("x", "x", None, None, {"a": 1}, {"a": 1}, "é", "é", "last"):
            writer.publish("A", payload)
    assert receiver.payloads("last") == ["x", None, {"a": 1}, "é"]


def test_too_much_alike_is_refused(writer: Any, given: Connection, receiver: Receiver):
    nul = "\0" * 10_000_000
    with given.transaction():
        writer.publish("A", nul)
        writer.publish("A", nul)
        with pytest.raises(ValueError, match="in another transaction"):
            writer.publish("A", nul)
        writer.publish("A", "after")
    assert [len(receiver.payload()) for _ in range(3)] == [10_000_000, 10_000_000, 5]


def test_in_a_failed_transaction_publish_fails(writer: Any, given: Connection, heard: Receiver):
    given.execute("BEGIN")
    with pytest.raises(psycopg.errors.DivisionByZero):
        given.execute("SELECT 1 / 0")
    for use in (writer.publish, writer.unsubscribe):
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            use("A")
    given.execute("ROLLBACK")
    writer.publish("A", "works again")
    assert heard.payload() == "works again"
    assert writer.unsubscribe("A")
    assert listens(given) == set()


def test_a_connection_lost_amid_a_transaction_does_not_publish_outside_of_it(
    writer: Any, given: Connection, superuser: Connection, listener: Program
):
    writer.subscribe("B")
    given.execute("BEGIN")
    end_backend(superuser, given)
    wait_until(lambda: writer.counters.lost_connections == 1)
    with pytest.raises(ConnectionLost, match="during a transaction"):
        writer.publish("A", "x")
    writer.publish("A", "alone")
    assert listener.payloads() == ["!alone"]


def test_the_owner_uses_it_meanwhile(writer: Any, given: Connection, raw: Any, heard: Receiver):
    for number in range(100):
        raw(f"@{number}")
        assert given.execute("SELECT %s::int", (number,)).fetchone() == (number,)
    assert [heard.payload() for _ in range(100)] == list(range(100))
    with given.cursor().copy("COPY (SELECT generate_series(1, 20000)) TO STDOUT") as copy:
        raw("!amid a COPY")
        assert not writer._connection._buffer.can_read
        assert sum(1 for _ in copy.rows()) == 20_000
    assert heard.payload() == "amid a COPY"
    with given.transaction():
        given.execute("SELECT 1")
        raw("!amid a transaction")
    assert heard.payload() == "amid a transaction"


def test_other_channels_are_outside(given: Connection, heard: Receiver, raw: Any, connect: Connect):
    owners: Queue[psycopg.Notify] = Queue()
    given.add_notify_handler(owners.put)
    given.execute("LISTEN mine")
    raw("!ours")
    connect().execute("NOTIFY mine, 'x'")
    assert owners.get(timeout=SECONDS)[:2] == ("mine", "x")
    assert heard.payload() == "ours"
    assert owners.empty()


def test_a_listen_that_was_undone_is_done_again(writer: Any, given: Connection, raw: Any):
    """The keep-alive repeats it after DISCARD ALL and after a rollback."""
    receiver = Receiver()
    # DISCARD ALL forgets prepared statements, and some versions of psycopg 3.2 do not notice.
    given.prepare_threshold = None
    with given.transaction(force_rollback=True):
        writer.subscribe("A")
    writer.on("A", receiver)
    for number in range(2):
        wait_until(lambda: listens(given) == {"A"})
        raw(f"@{number}")
        assert receiver.payload() == number
        given.execute("DISCARD ALL")


def test_close_leaves_it_open(writer: Any, given: Connection, new_bus: NewBus, monkeypatch):
    handler = given.pgconn.notify_handler
    writer.subscribe("A")
    writer.close()
    assert listens(given) == set()
    assert given.pgconn.notify_handler == handler
    assert not given.closed
    # It returns promptly while the owner uses the connection.
    monkeypatch.setattr(bus_connection, "_CLOSING_SECONDS", 0.2)
    bus = new_bus(given)
    bus.subscribe("A")
    with given.lock:
        closing = threading.Thread(target=bus.close)
        closing.start()
        bus._connection.closed_event.wait(PROMPTLY)
        assert bus._connection.closed_event.is_set()
    closing.join()
    assert given.execute("SELECT 1").fetchone() == (1,)


def test_a_connection_that_its_owner_closes_ends_the_bus(writer: Any, given: Connection):
    writer.subscribe("A")
    given.close()
    writer.run()
    with pytest.raises(NodeClosed):
        writer.publish("A")


def test_pipeline_mode_is_refused(writer: Any, given: Connection, listener: Program):
    with given.pipeline(), pytest.raises(psycopg.NotSupportedError, match="pipeline mode"):
        writer.publish("A", "x")
    writer.publish("A", "y")
    assert listener.payloads() == ["!y"]
