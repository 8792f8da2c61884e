"""Whatever transactions publishers and readers use: savepoints, isolations, two steps to commit."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from tests.sql.conftest import Row, World
from tests.sql.simultaneous import together
from tests.streams.conftest import Stream

TOPICS = ("ONE", "TWO")
# No more publishers than transactions may be prepared at once.
PUBLISHERS = 5
CALLS = (
    "SELECT messages.publish('ANY', %s, %s)",
    "SELECT messages.publish_many('ANY', %s, ARRAY[%s])",
    "SELECT messages.topic_send_as('ANY', %s, %s)",
)
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
ENDS = ("COMMIT", "COMMIT", "COMMIT", "ROLLBACK", "PREPARE TRANSACTION")


class Publisher:
    """Publishes in transactions of every kind, and knows what of it was committed."""

    def __init__(self, url: str, number: int, transactions: int) -> None:
        self.transactions = transactions
        self.connection = psycopg.connect(url, autocommit=True)
        self.finisher = psycopg.connect(url, autocommit=True)
        self.number = number
        self.dice = random.Random(number)  # noqa: S311
        self.count = 0
        self.committed: set[str] = set()
        self.lost: set[str] = set()

    def run(self) -> None:
        """Publish; what a transaction that could not be serialized published is lost."""
        with closing(self.connection), closing(self.finisher):
            for number in range(self.transactions):
                published: set[str] = set()
                try:
                    is_committed = self.transaction(f"any {self.number}.{number}", published)
                except psycopg.errors.SerializationFailure:
                    self.connection.execute("ROLLBACK")
                    is_committed = False
                (self.committed if is_committed else self.lost).update(published)

    def transaction(self, name: str, published: set[str]) -> bool:
        """Run one; True where it was committed."""
        self.connection.execute(f"BEGIN ISOLATION LEVEL {self.dice.choice(LEVELS)}")
        for _ in range(self.dice.randint(1, 5)):
            self.step(published)
            self.connection.execute("SELECT pg_sleep(%s)", [self.dice.random() / 200])
        end = self.dice.choice(ENDS)
        if end != "PREPARE TRANSACTION":
            self.connection.execute(end)
            return end == "COMMIT"
        self.connection.execute(f"PREPARE TRANSACTION '{name}'")
        self.finisher.execute("SELECT pg_sleep(%s)", [self.dice.random() / 100])
        end = self.dice.choice(("COMMIT", "ROLLBACK"))
        self.finisher.execute(f"{end} PREPARED '{name}'")
        return end == "COMMIT"

    def step(self, published: set[str]) -> None:
        """Publish one by itself, in a savepoint, or after one that was given up."""
        given_up = self.dice.choice((None, False, True))
        if given_up is not None:
            self.connection.execute("SAVEPOINT outer_one; SAVEPOINT inner_one")
            self.lost.add(self.publish())
            self.connection.execute(
                "RELEASE inner_one; ROLLBACK TO outer_one" if given_up else "ROLLBACK TO inner_one"
            )
        published.add(self.publish())
        if given_up is not None:
            self.connection.execute("RELEASE outer_one")

    def publish(self) -> str:
        """Publish one message in one of the ways there are."""
        self.count += 1
        payload = f"{self.number}.{self.count}"
        call, topic = self.dice.choice(CALLS), self.dice.choice(TOPICS)
        row = self.connection.execute(call, [topic, payload]).fetchone()
        assert row is not None
        assert row[0]["Err"] == "0", row
        return payload


class Reader:
    """Reads both topics by turns; gives up transactions, and parts of them."""

    def __init__(self, world: World) -> None:
        self.program = world.program()
        self.dice = random.Random(0)  # noqa: S311
        self.rows: list[Row] = []

    def run(self, busy: threading.Event) -> None:
        """Read until nobody publishes any more, and nothing is left."""
        idle = 0
        while idle < 3:
            was_busy = busy.is_set()
            rows = [row for topic in TOPICS for row in self.transaction(topic, was_busy)]
            self.rows += rows
            idle = 0 if rows or was_busy else idle + 1

    def transaction(self, topic: str, is_busy: bool) -> list[Row]:
        """Run one; the rows that it passed."""
        kept: list[Row] = []
        given_up = is_busy and self.dice.random() < 0.2
        with self.program.connection.transaction(force_rollback=given_up):
            for _ in range(3):
                is_part_given_up = self.dice.random() < 0.3
                with self.program.connection.transaction(force_rollback=is_part_given_up):
                    rows = self.program.read("ANY", topic, 600, self.dice.randint(1, 50))
                kept += [] if is_part_given_up else rows
        return [] if given_up else kept


@pytest.fixture
def busy() -> Iterator[threading.Event]:
    """Set as long as somebody publishes."""
    event = threading.Event()
    event.set()
    yield event
    event.clear()


# The full number makes combinations likely that every day's are too few for.
@pytest.mark.versions
@pytest.mark.parametrize("transactions", [16, pytest.param(96, marks=pytest.mark.nightly)])
def test_what_was_committed_comes_once_and_in_order_and_nothing_else(
    stream: Stream, busy: threading.Event, transactions: int
) -> None:
    world = stream.world
    world.rules(*(f"psqlmessages ANY Topic {topic} RW 10" for topic in TOPICS))
    reader, remover = Reader(world), world.program()
    for topic in TOPICS:
        reader.program.got("ANY", topic, 600)
    url = world.server.url()
    publishers = [Publisher(url, number, transactions) for number in range(PUBLISHERS)]

    def publish() -> None:
        try:
            together(*(publisher.run for publisher in publishers))
        finally:
            busy.clear()

    def remove() -> None:
        while busy.is_set():
            remover.query("SELECT messages._prune_streams()")

    together(publish, lambda: reader.run(busy), remove)
    committed = set().union(*(publisher.committed for publisher in publishers))
    lost = set().union(*(publisher.lost for publisher in publishers))
    found = Counter(row.payload for row in reader.rows)
    assert (set(found) == committed, max(found.values())) == (True, 1)
    assert min(len(committed), len(lost)) > transactions
    for topic in TOPICS:
        ids = [row.id for row in reader.rows if row.topic == topic]
        assert ids == sorted(ids)
