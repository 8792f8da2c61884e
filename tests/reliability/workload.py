"""Workload: numbered messages through streams and queues while a fault happens, and its results."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from inspect import isawaitable
from time import monotonic
from typing import Any, Self

import psycopg

from psqlmessages import AsyncNode, Node, Options
from psqlmessages.client.connection import Connection
from psqlmessages.exceptions import ConnectionLost, MessagesError
from tests.reliability.counts import report
from tests.reliability.faults import until
from tests.sql.conftest import World

Run = Callable[["Workload", "Reader"], None]

# Retry quickly, but allow slow answers of a busy machine.
QUICK = Options(
    backoff_min=timedelta(milliseconds=20), backoff_max=timedelta(milliseconds=200),
    probe_interval=timedelta(seconds=1), probe_timeout=timedelta(seconds=5),
    answer_timeout=timedelta(seconds=10), reconnect_wait=timedelta(seconds=60),
)  # fmt: skip
# The writer waits if a reader is more than MAX_AHEAD numbers behind.
BATCH, MAX_AHEAD = 10, 100
LARGE_BODY_BYTES = 10_000  # over the NOTIFY limit
STREAMS = {"stream of Node": "R.NODE", "stream of AsyncNode": "R.ASYNC", "stream by SQL": "R.SQL"}
RULES = (
    "user1 W Topic NEWS W 3600", "user1 W Topic LIVE W 3600", "user1 P Queue * W 3600",
    "user2 R.* Topic NEWS R 3600", "user2 R.* Topic LIVE R 3600", "user2 R.* Queue * R 3600",
)  # fmt: skip
NUMBERS = """
    DROP TABLE IF EXISTS psqlmessages_numbers;
    CREATE TABLE psqlmessages_numbers (reader text, body int);
    GRANT SELECT, INSERT ON psqlmessages_numbers TO user2
"""
QUERY = "SELECT body FROM psqlmessages_numbers WHERE reader = %s"
INSERT = "INSERT INTO psqlmessages_numbers SELECT '{name}', {column}::int FROM messages.{function}"
ERRORS = (MessagesError, psycopg.Error)
EXPIRE = "UPDATE psqlmessages_element SET available_at = clock_timestamp() WHERE lease IS NOT NULL"
STORED_MESSAGES = """
    SELECT m.payload FROM psqlmessages_streammessage AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = %s
"""
STORED_ELEMENTS = """
    SELECT e.body FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s
"""


@dataclass
class Reader:
    """A reader of the stream, of the live topic, or of a queue that no other reader takes from.

    `may_repeat`: elements are redelivered after a lease. `may_miss`: an answer or a live message
    can be lost with its connection. If `run` does not append to `numbers`, `query` reads them.
    """

    name: str
    run: Run | None
    queue: str | None = None
    is_live: bool = False
    may_repeat: bool = False
    may_miss: bool = False
    query: Callable[[], list[int]] | None = None
    numbers: list[int] = field(default_factory=list)
    is_ready: threading.Event = field(default_factory=threading.Event)

    @property
    def received(self) -> list[int]:
        return self.query() if self.query else self.numbers


class Workload:
    """A writer and readers in threads; at the end of ``with``, readers get all stored messages.

    Each number is published to NEWS, and pushed with a key to the queue of each reader that has
    one. A reader is restarted after errors in `tolerates`; another error fails the test.
    """

    def __init__(
        self, world: World, *names: str, more: tuple[Reader, ...] = (),
        rewrite_dsn: Callable[[str], str] = str, options: Options = QUICK,
        lease: timedelta = timedelta(seconds=5), tolerates: tuple[type[Exception], ...] = (),
        idle_seconds: float = 60,
    ) -> None:  # fmt: skip
        self.world, self.lease, self.options, self.tolerates = world, lease, options, tolerates
        self._writer_url = world.server.url("user1")
        self.url = rewrite_dsn(world.server.url("user2"))
        self._pusher_url = rewrite_dsn(self._writer_url)
        self._idle_seconds = idle_seconds
        self.readers = [*(create_reader(name, self) for name in names or LOSSLESS), *more]
        self.nodes: dict[str, Node | AsyncNode] = {}
        self.written = self.repeated_pushes = 0
        self.longest_seconds = 0.0
        self.published, self.uncertain, self.sent = set[int](), set[int](), set[int]()
        self.refused: Counter[str] = Counter()
        self.large_bodies_percent = 10
        # Whether a subscription reported that messages were lost.
        self.has_reported_gap = False
        self.must_stop_writing, self.must_stop = threading.Event(), threading.Event()
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self.world.rules(*RULES)
        self.world.owner.connection.execute(NUMBERS)
        # No others: a subscription that nobody reads would keep all messages stored.
        for name in STREAMS.keys() & {reader.name for reader in self.readers}:
            self.world.program("user2").read(STREAMS[name], "NEWS", 3600)
        running = [reader for reader in self.readers if reader.run is not None]
        for each in running:
            self._start(partial(self._run_reader, each))
        until(lambda: self.failures or all(each.is_ready.is_set() for each in running))
        self._start(self._write)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.must_stop_writing.set()
            self._threads[-1].join(90)
            if error is None:
                self._wait_for_readers()
        finally:
            self.must_stop.set()
            for node in self.nodes.values():
                node.stop()
            for thread in self._threads:
                thread.join(60)
        if error is None:
            assert not self.failures, self.failures
            assert not any(thread.is_alive() for thread in self._threads)

    def wait_for_writes(self, number: int) -> None:
        goal = self.written + number
        until(lambda: self.failures or self.written >= goal)
        assert not self.failures, self.failures

    def _wait_for_readers(self) -> None:
        """Wait until no reader lacks a number, or none has received any for `idle_seconds`."""
        end, before = 0.0, dict[str, int]()
        while not self.failures:
            missing = {reader.name: len(self.missing(reader)) for reader in self.readers}
            if missing != before:
                end, before = monotonic() + self._idle_seconds, missing
            if all(self._has_all(each, missing[each.name]) for each in self.readers):
                return
            if monotonic() > end:
                return
            self.must_stop.wait(0.05)

    def _has_all(self, reader: Reader, missing: int) -> bool:
        """Return whether a reader has received all that was not lost with an answer."""
        return not missing or (reader.may_miss and not stored_elements(self.world, reader.queue))

    def _start(self, act: Callable[[], object]) -> None:
        def run() -> None:
            try:
                act()
            except BaseException as failure:  # noqa: BLE001 - it fails the test
                if not self.must_stop.is_set():
                    self.failures.append(failure)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def _run_reader(self, reader: Reader) -> None:
        while not self.must_stop.is_set():
            try:
                reader.run(self, reader)
            except self.tolerates as error:
                self._count_refused(error)
            else:
                return

    def _write(self) -> None:
        queues = dict.fromkeys(reader.queue for reader in self.readers if reader.queue)
        is_live = any(reader.is_live for reader in self.readers)
        with (
            Node("W", self._writer_url, options=self.options) as writer,
            Node("P", self._pusher_url, options=self.options) as pusher,
        ):
            if is_live:
                writer.topic_notify("LIVE")
            while not self.must_stop_writing.wait(0.005):
                if self.is_too_far_ahead():
                    continue
                began = monotonic()
                numbers = range(self.written, self.written + BATCH)
                self._publish(writer, numbers)
                for queue in queues:
                    self._push(pusher, queue, numbers)
                if is_live:
                    self._send(writer, numbers)
                self.longest_seconds = max(self.longest_seconds, monotonic() - began)
                self.written += BATCH

    def is_too_far_ahead(self) -> bool:
        counts = [len(r.numbers) for r in self.readers if not r.query and not r.may_miss]
        return self.written - min(counts, default=self.written) > MAX_AHEAD

    def _publish(self, node: Node, numbers: range) -> None:
        try:
            node.publish_many("NEWS", numbers)
        except ConnectionLost:
            self.uncertain |= {*numbers}
        except ERRORS as error:
            self._count_refused(error)
        else:
            self.published |= {*numbers}

    def _push(self, node: Node, queue: str, numbers: range) -> None:
        """Repeat a push until it succeeds; keys prevent duplicates."""
        while True:
            try:
                node.push_many(queue, numbers, keys=[str(each) for each in numbers])
            except ERRORS as error:
                self.repeated_pushes += BATCH
                if not isinstance(error, ConnectionLost):
                    self._count_refused(error)
            else:
                return

    def _send(self, node: Node, numbers: range) -> None:
        sizes = [LARGE_BODY_BYTES * (each % 100 < self.large_bodies_percent) for each in numbers]
        try:
            node.topic_send_many("LIVE", list(map(str.ljust, map(str, numbers), sizes)))
        except ERRORS as error:
            self._count_refused(error)
        else:
            self.sent |= {*numbers}

    def _count_refused(self, error: Exception) -> None:
        self.refused[type(error).__name__] += 1
        self.must_stop.wait(0.05)

    def expected(self, reader: Reader) -> set[int]:
        if reader.queue:
            return set(range(self.written))
        return self.sent if reader.is_live else self.published

    def missing(self, reader: Reader) -> set[int]:
        return self.expected(reader) - {*reader.received}

    def duplicates(self, reader: Reader) -> int:
        return len(reader.received) - len({*reader.received})

    def refused_but_read(self, reader: Reader) -> int:
        if reader.is_live:
            return 0
        return len({*reader.received} - self.expected(reader) - self.uncertain)

    def counts(self) -> dict[str, int]:
        leasing = [reader for reader in self.readers if reader.may_repeat]
        lossy = [reader for reader in self.readers if reader.may_miss]
        counts = {
            "messages": sum(len(self.expected(reader)) for reader in self.readers),
            "lost": sum(len(self.missing(each)) for each in self.readers if not each.may_miss),
            "duplicated": sum(self.duplicates(r) for r in self.readers if not r.may_repeat),
            "refused_but_read": sum(map(self.refused_but_read, self.readers)),
        }
        if self.uncertain:
            counts["with_unknown_result"] = len(self.uncertain)
        if self.repeated_pushes:
            counts["pushes_repeated"] = self.repeated_pushes
        if leasing:
            counts["redelivered_after_a_lease"] = sum(map(self.duplicates, leasing))
        if lossy:
            counts["lost_with_the_answer_of_pop"] = sum(len(self.missing(each)) for each in lossy)
        return counts

    def report(self, fault: str, case: str, **counts: object) -> None:
        """Report the counts, and check: nothing is lost or duplicated, refused calls had no effect.

        Streams keep their order.
        """
        report(fault, case, **counts, **self.counts())
        errors = {
            each.name: (
                0 if each.may_miss else len(self.missing(each)),
                0 if each.may_repeat else self.duplicates(each),
                self.refused_but_read(each),
            )
            for each in self.readers
        }
        assert {name: counts for name, counts in errors.items() if any(counts)} == {}
        for each in self.readers:
            assert each.numbers == sorted(each.numbers) or each.queue or each.is_live, each.name
        assert self.written > 0


def query_column(world: World, query: str, *arguments: str | None) -> list[Any]:
    with psycopg.connect(world.server.url()) as owner:
        return [value for (value, *_) in owner.execute(query, arguments or None)]


def stored_messages(world: World, topic: str = "T") -> list[str]:
    return query_column(world, STORED_MESSAGES, topic)


def stored_elements(world: World, queue: str | None = "Q") -> list[str]:
    return query_column(world, STORED_ELEMENTS, queue)


def has_reconnected(node: Node) -> bool:
    with suppress(ConnectionLost):
        return node.sizes("Q") is not None
    return False


def open_source(source: str, work: Workload, reader: Reader, node: Any) -> Iterator[Any]:
    """Yield the results of a reader's first calls; it iterates over the last result."""
    if source == "stream":
        yield node.subscription("NEWS")
        yield node.subscribe("NEWS", timedelta(hours=1))
    elif source == "queue":
        yield node.consume(reader.queue, batch=5, duration=work.lease)
    else:
        yield node.topic_listen("LIVE")
        yield node.messages()


def record_opened(work: Workload, reader: Reader, results: list[Any]) -> Any:
    work.has_reported_gap |= any(getattr(each, "is_recovered", True) is False for each in results)
    reader.is_ready.set()
    return results[-1]


def record_message(reader: Reader, message: Any) -> None:
    if getattr(message, "type", "Topic") == "Topic":
        reader.numbers.append(int(message.body))


def with_node(ident: str, source: str) -> Run:
    def run(work: Workload, reader: Reader) -> None:
        with Node(ident, work.url, options=work.options) as node:
            work.nodes[reader.name] = node
            results = list(open_source(source, work, reader, node))
            for message in record_opened(work, reader, results):
                record_message(reader, message)

    return run


def with_async_node(ident: str, source: str) -> Run:
    async def read(work: Workload, reader: Reader) -> None:
        async with AsyncNode(ident, work.url, options=work.options) as node:
            work.nodes[reader.name] = node
            results = [
                await each if isawaitable(each) else each
                for each in open_source(source, work, reader, node)
            ]
            async for message in record_opened(work, reader, results):
                record_message(reader, message)

    return lambda work, reader: asyncio.run(read(work, reader))


def pop(work: Workload, reader: Reader) -> None:
    """Pop without a transaction: if an answer is lost, so are its elements."""
    with Node("R.POPPER", work.url, options=work.options) as node:
        work.nodes[reader.name] = node
        reader.is_ready.set()
        while not work.must_stop.is_set():
            with suppress(ConnectionLost):
                for element in node.pop(reader.queue, 5, timeout=timedelta(seconds=0.5)):
                    reader.numbers.append(element.body)


def with_sql(statement: str) -> Run:
    """Read and store the numbers in one statement, so that a lost answer loses no number."""

    def run(work: Workload, reader: Reader) -> None:
        reader.is_ready.set()
        while not work.must_stop.is_set():
            with suppress(psycopg.Error):
                connection = Connection.connect(work.url, autocommit=True, connect_timeout=2)
                connection.answer_seconds = work.options.answer_timeout.total_seconds()
                with closing(connection):
                    while not work.must_stop.wait(0.05):
                        connection.execute(statement)
            work.must_stop.wait(0.05)

    return run


STREAM_BY_SQL = INSERT.format(
    name="stream by SQL", column="payload", function="subscribe('R.SQL', 'NEWS', 3600, 100)"
)
POP_BY_SQL = INSERT.format(
    name="pop by SQL", column="body", function="pop('R.SQL', 'pop by SQL', 100)"
)
RUNS: dict[str, Run] = {
    "stream of Node": with_node("R.NODE", "stream"),
    "stream of AsyncNode": with_async_node("R.ASYNC", "stream"),
    "stream by SQL": with_sql(STREAM_BY_SQL), "pop by SQL": with_sql(POP_BY_SQL),
    "Node.consume": with_node("R.CONSUMER", "queue"),
    "AsyncNode.consume": with_async_node("R.ACONSUMER", "queue"), "Node.pop": pop,
    "live messages of Node": with_node("R.LIVE", "topic"),
    "live messages of AsyncNode": with_async_node("R.ALIVE", "topic"),
}  # fmt: skip
LOSSLESS = tuple(RUNS)[:6]
LIVE = tuple(RUNS)[7:]
BY_CLIENTS = ("stream of Node", "stream of AsyncNode", "Node.consume", "AsyncNode.consume", *LIVE)


def create_reader(name: str, work: Workload) -> Reader:
    is_queue = name.endswith(("consume", "pop", "pop by SQL"))
    return Reader(
        name, RUNS[name], queue=name if is_queue else None, is_live=name in LIVE,
        may_repeat=name.endswith("consume"), may_miss=name == "Node.pop",
        query=partial(query_column, work.world, QUERY, name) if name.endswith("SQL") else None,
    )  # fmt: skip
