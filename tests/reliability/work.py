"""Numbered messages through streams and queues while a fault happens, and what came of each."""

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
from tests.reliability.faults import until
from tests.sql.conftest import World

Run = Callable[["Work", "Reader"], None]

LIFE = timedelta(hours=1)
# Found soon, and a busy machine is not taken for a dead connection.
QUICK = Options(
    backoff_min=timedelta(milliseconds=20), backoff_max=timedelta(milliseconds=200),
    probe_interval=timedelta(seconds=1), probe_timeout=timedelta(seconds=5),
    answer_timeout=timedelta(seconds=10), reconnect_wait=timedelta(seconds=60),
)  # fmt: skip
BATCH, MOST_AHEAD = 10, 100
# Over the NOTIFY limit.
LONG = 10_000
RULES = (
    "user1 W Topic NEWS W 3600", "user1 W Topic LIVE W 3600", "user1 P Queue * W 3600",
    "user2 R.* Topic NEWS R 3600", "user2 R.* Topic LIVE R 3600", "user2 R.* Queue * R 3600",
)  # fmt: skip
EFFECTS = """
    DROP TABLE IF EXISTS psqlmessages_numbers;
    CREATE TABLE psqlmessages_numbers (reader text, body int);
    GRANT SELECT, INSERT ON psqlmessages_numbers TO user2
"""
INSERT = "INSERT INTO psqlmessages_numbers SELECT '{name}', {column}::int FROM messages.{function}"
ERRORS = (MessagesError, psycopg.Error)
EXPIRE = "UPDATE psqlmessages_element SET available_at = clock_timestamp() WHERE lease IS NOT NULL"
PUBLISHED = """
    SELECT m.payload FROM psqlmessages_streammessage AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = %s
"""
PUSHED = """
    SELECT e.body FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s
"""


@dataclass
class Reader:
    """A reader of the stream or of a queue of its own; `got` are the numbers it received.

    `may_repeat`: elements come again after a lease. `may_miss`: an answer or a live message may be
    lost with its connection. `found` reads the numbers if `run` does not note them.
    """

    name: str
    run: Run | None
    queue: str | None = None
    is_live: bool = False
    may_repeat: bool = False
    may_miss: bool = False
    found: Callable[[], list[int]] | None = None
    numbers: list[int] = field(default_factory=list)
    is_ready: threading.Event = field(default_factory=threading.Event)

    @property
    def got(self) -> list[int]:
        return self.found() if self.found else self.numbers


class Work:
    """A writer and readers in threads; at the end of ``with`` they receive what is still stored.

    Each number is published to NEWS, and pushed with a key to the queue of each reader that has
    one. `forgives`: the errors after which a reader starts again; by default none may reach it.
    """

    def __init__(
        self, world: World, *names: str, more: tuple[Reader, ...] = (),
        through: Callable[[str], str] = str, options: Options = QUICK,
        lease: timedelta = timedelta(seconds=5), forgives: tuple[type[Exception], ...] = (),
        rest_seconds: float = 60,
    ) -> None:  # fmt: skip
        self.world, self.lease, self.options, self.forgives = world, lease, options, forgives
        self.url, self._writer_url = through(world.server.url("user2")), world.server.url("user1")
        self._pusher_url, self._rest_seconds = through(self._writer_url), rest_seconds
        self.readers = [*(reader(name, self) for name in names or EXACT), *more]
        self.nodes: dict[str, Node | AsyncNode] = {}
        self.written = self.again = 0
        self.longest_seconds = 0.0
        self.published, self.uncertain, self.sent = set[int](), set[int](), set[int]()
        self.refused: Counter[str] = Counter()
        self.sends_long = True
        # Whether a reader of the stream was told that it missed something.
        self.is_told = False
        self.waited: dict[str, float] = {}
        self.is_enough, self.is_over = threading.Event(), threading.Event()
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self.world.rules(*RULES)
        self.world.owner.connection.execute(EFFECTS)
        for ident in ("R.NODE", "R.ASYNC", "R.SQL"):
            self.world.program("user2").read(ident, "NEWS", 3600)
        running = [reader for reader in self.readers if reader.run is not None]
        for each in running:
            self._start(partial(self._insist_on, each))
        until(lambda: self.failures or all(each.is_ready.is_set() for each in running))
        self._start(self._write)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.is_enough.set()
            self._threads[-1].join(90)
            if error is None:
                self._wait_for_the_rest()
        finally:
            self.is_over.set()
            for node in self.nodes.values():
                node.stop()
            for thread in self._threads:
                thread.join(60)
        if error is None:
            assert not self.failures, self.failures
            assert not any(thread.is_alive() for thread in self._threads)

    def go_on(self, number: int) -> None:
        goal = self.written + number
        until(lambda: self.failures or self.written >= goal)
        assert not self.failures, self.failures

    def _wait_for_the_rest(self) -> None:
        """Wait until all have all, or nothing came for so long."""
        began = monotonic()
        end, before = began + self._rest_seconds, dict[str, int]()
        while monotonic() < end and not self.failures:
            missing = {reader.name: len(self.missing(reader)) for reader in self.readers}
            if missing != before:
                end, before = monotonic() + self._rest_seconds, missing
            for name, number in missing.items():
                if not number:
                    self.waited.setdefault(name, monotonic() - began)
            if len(self.waited) == len(missing) or self._only_may_miss(missing):
                return
            self.is_over.wait(0.05)

    def _only_may_miss(self, missing: dict[str, int]) -> bool:
        """Whether nothing is missing but what is lost for good: the queues are empty."""
        return all(
            not missing[each.name] or (each.may_miss and not pushed(self.world, each.queue or ""))
            for each in self.readers
        )

    def _start(self, act: Callable[[], object]) -> None:
        def run() -> None:
            try:
                act()
            except BaseException as failure:  # noqa: BLE001 - the test fails by it
                if not self.is_over.is_set():
                    self.failures.append(failure)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def _insist_on(self, reader: Reader) -> None:
        while not self.is_over.is_set():
            try:
                reader.run(self, reader)
            except self.forgives as error:
                self.refused[type(error).__name__] += 1
                self.is_over.wait(0.05)
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
            while not self.is_enough.wait(0.005):
                if self.is_too_far():
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

    def is_too_far(self) -> bool:
        had = [len(each.numbers) for each in self.readers if not each.found and not each.may_miss]
        return self.written - min(had, default=self.written) > MOST_AHEAD

    def _publish(self, node: Node, numbers: range) -> None:
        try:
            node.publish_many("NEWS", numbers)
        except ConnectionLost:
            # Whether they were published nobody knows.
            self.uncertain |= {*numbers}
        except ERRORS as error:
            self._refuse(error)
        else:
            self.published |= {*numbers}

    def _push(self, node: Node, queue: str, numbers: range) -> None:
        """Push until it is known to be there: each has a key."""
        while True:
            try:
                node.push_many(queue, numbers, keys=[str(each) for each in numbers])
            except ERRORS as error:
                self.again += BATCH
                if not isinstance(error, ConnectionLost):
                    self._refuse(error)
            else:
                return

    def _send(self, node: Node, numbers: range) -> None:
        size = LONG if self.sends_long and numbers[0] % 100 == 0 else 0
        try:
            node.topic_send_many("LIVE", [str(each).ljust(size) for each in numbers])
        except ERRORS as error:
            self._refuse(error)
        else:
            self.sent |= {*numbers}

    def _refuse(self, error: Exception) -> None:
        self.refused[type(error).__name__] += 1
        # What is away is not asked in haste.
        self.is_over.wait(0.05)

    def wanted(self, reader: Reader) -> set[int]:
        if reader.queue:
            return set(range(self.written))
        return self.sent if reader.is_live else self.published

    def missing(self, reader: Reader) -> set[int]:
        return self.wanted(reader) - {*reader.got}

    def doubled(self, reader: Reader) -> int:
        return len(reader.got) - len({*reader.got})

    def refused_but_read(self, reader: Reader) -> int:
        if reader.is_live:
            return 0
        return len({*reader.got} - self.wanted(reader) - self.uncertain)

    def counts(self) -> dict[str, int]:
        leased = [reader for reader in self.readers if reader.may_repeat]
        lossy = [reader for reader in self.readers if reader.may_miss]
        counts = {
            "messages": sum(len(self.wanted(reader)) for reader in self.readers),
            "lost": sum(len(self.missing(each)) for each in self.readers if not each.may_miss),
            "duplicated": sum(self.doubled(each) for each in self.readers if not each.may_repeat),
            "refused_but_read": sum(map(self.refused_but_read, self.readers)),
        }
        if self.uncertain:
            counts["with_unknown_result"] = len(self.uncertain)
        if self.again:
            counts["pushes_repeated"] = self.again
        if leased:
            counts["redelivered_after_a_lease"] = sum(map(self.doubled, leased))
        if lossy:
            counts["lost_with_the_answer_of_pop"] = sum(len(self.missing(each)) for each in lossy)
        return counts

    def check(self) -> None:
        """Nothing is lost or doubled, no refused call was done, and streams are in order."""
        of_each = {
            each.name: (
                0 if each.may_miss else len(self.missing(each)),
                0 if each.may_repeat else self.doubled(each),
                self.refused_but_read(each),
            )
            for each in self.readers
        }
        assert {name: counts for name, counts in of_each.items() if any(counts)} == {}
        for each in self.readers:
            assert each.numbers == sorted(each.numbers) or each.queue or each.is_live, each.name
        assert self.written > 0


def column(world: World, query: str, *arguments: str) -> list[Any]:
    """The first column of a query of the owner, by a connection that no restart has ended."""
    with psycopg.connect(world.server.url()) as owner:
        return [value for (value, *_) in owner.execute(query, arguments or None)]


def published(world: World, topic: str = "T") -> list[str]:
    return column(world, PUBLISHED, topic)


def pushed(world: World, queue: str = "Q") -> list[str]:
    return column(world, PUSHED, queue)


def answers(node: Node) -> bool:
    """Whether calls of a node do not hit the connection that has ended."""
    with suppress(ConnectionLost):
        return node.sizes("Q") is not None
    return False


# Readers


def opening(how: str, work: Work, reader: Reader, node: Any) -> Iterator[Any]:
    """Yield the results of what a reader calls first; the last one is what it iterates over."""
    if how == "stream":
        yield node.subscription("NEWS")
        yield node.subscribe("NEWS", LIFE)
    elif how == "consume":
        yield node.consume(reader.queue, batch=5, duration=work.lease)
    else:
        yield node.topic_listen("LIVE")
        yield node.messages()


def note(work: Work, reader: Reader, opened: list[Any]) -> Any:
    work.is_told |= any(getattr(each, "is_recovered", True) is False for each in opened)
    reader.is_ready.set()
    return opened[-1]


def take(reader: Reader, message: Any) -> None:
    if getattr(message, "type", "Topic") == "Topic":
        reader.numbers.append(int(message.body))


def of_node(ident: str, how: str) -> Run:
    def run(work: Work, reader: Reader) -> None:
        with Node(ident, work.url, options=work.options) as node:
            work.nodes[reader.name] = node
            for message in note(work, reader, [*opening(how, work, reader, node)]):
                take(reader, message)

    return run


def of_async_node(ident: str, how: str) -> Run:
    async def read(work: Work, reader: Reader) -> None:
        async with AsyncNode(ident, work.url, options=work.options) as node:
            work.nodes[reader.name] = node
            opened = [
                await each if isawaitable(each) else each
                for each in opening(how, work, reader, node)
            ]
            async for message in note(work, reader, opened):
                take(reader, message)

    return lambda work, reader: asyncio.run(read(work, reader))


def pop(work: Work, reader: Reader) -> None:
    """Pop without a transaction: an answer that never came takes its elements along."""
    with Node("R.POPPER", work.url, options=work.options) as node:
        work.nodes[reader.name] = node
        reader.is_ready.set()
        while not work.is_over.is_set():
            with suppress(ConnectionLost):
                for element in node.pop(reader.queue, 5, timeout=timedelta(seconds=0.5)):
                    reader.numbers.append(element.body)


def by_sql(statement: str) -> Run:
    """Read, and write the effects, in one statement: known to be done also where no answer came."""

    def run(work: Work, reader: Reader) -> None:
        reader.is_ready.set()
        while not work.is_over.is_set():
            with suppress(psycopg.Error):
                connection = Connection.connect(work.url, autocommit=True, connect_timeout=2)
                connection.answer_seconds = work.options.answer_timeout.total_seconds()
                with closing(connection):
                    while not work.is_over.wait(0.05):
                        connection.execute(statement)
            work.is_over.wait(0.05)

    return run


STREAM_BY_SQL = INSERT.format(
    name="stream by SQL", column="payload", function="subscribe('R.SQL', 'NEWS', 3600, 100)"
)
POP_BY_SQL = INSERT.format(
    name="pop by SQL", column="body", function="pop('R.SQL', 'pop by SQL', 100)"
)
RUNS: dict[str, Run] = {
    "stream of Node": of_node("R.NODE", "stream"),
    "stream of AsyncNode": of_async_node("R.ASYNC", "stream"),
    "stream by SQL": by_sql(STREAM_BY_SQL), "pop by SQL": by_sql(POP_BY_SQL),
    "Node.consume": of_node("R.CONSUMER", "consume"),
    "AsyncNode.consume": of_async_node("R.ACONSUMER", "consume"), "Node.pop": pop,
    "live messages of Node": of_node("R.LIVE", "listen"),
    "live messages of AsyncNode": of_async_node("R.ALIVE", "listen"),
}  # fmt: skip
# Those that lose nothing, whatever happens.
EXACT = tuple(RUNS)[:6]
LIVE = tuple(RUNS)[7:]


def reader(name: str, work: Work) -> Reader:
    def effects() -> list[int]:
        return column(work.world, "SELECT body FROM psqlmessages_numbers WHERE reader = %s", name)

    is_queue = name.endswith(("consume", "pop", "pop by SQL"))
    return Reader(
        name, RUNS[name], queue=name if is_queue else None, is_live=name in LIVE,
        may_repeat=name.endswith("consume"), may_miss=name == "Node.pop",
        found=effects if name.endswith("SQL") else None,
    )  # fmt: skip
