"""Messages through bad conditions: none is lost, none doubled, none read that was rolled back."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from threading import Event

import psycopg
import pytest

from tests.reliability.counts import report, size
from tests.sql.conftest import World
from tests.sql.simultaneous import together

FAULT = "publishers commit in random order and roll back"
BAD = "lost", "duplicated", "rolled_back_but_read"
PUBLISHERS = 8
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES ('psqlmessages', 'FLOW', 'Topic', 'FLOW', 'RW', 10)
    ON CONFLICT DO NOTHING;
    CREATE TABLE IF NOT EXISTS psqlmessages_effects (n bigserial, id bigint, payload text);
    TRUNCATE psqlmessages_effects
"""
EFFECT = """
    WITH done AS (
        INSERT INTO psqlmessages_effects (id, payload)
        SELECT id, payload FROM messages.subscribe('FLOW', 'FLOW', 600, %s) RETURNING 1
    )
    SELECT count(*) FROM done
"""
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
CALLS = (
    "SELECT messages.publish('FLOW', 'FLOW', %s)",
    "SELECT messages.publish_many('FLOW', 'FLOW', ARRAY[%s])",
    "SELECT messages.topic_send_as('FLOW', 'FLOW', %s)",
)


class Flow:
    """Publishers, a reader and an untiring remover, each in a thread with its own connection."""

    def __init__(self, url: str, messages: int) -> None:
        self.url, self.messages = url, messages
        self.committed: list[str] = []
        self.rolled_back: list[str] = []
        self.busy = {*range(PUBLISHERS)}
        self.reader_kills = self.reader_rollbacks = self.emptied = 0
        self.has_failed = Event()

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(self.url, autocommit=True)

    @property
    def is_wanted(self) -> bool:
        """Whether messages are missing, or a fault has not happened yet."""
        is_complete = len(self.committed) >= self.messages
        return not (is_complete and self.reader_kills and self.reader_rollbacks)

    def run(self) -> dict[str, int]:
        """Let it flow until all is published and read; return the counts."""
        with self.connect() as owner:
            owner.execute(SETUP)
            owner.execute("SELECT messages.unsubscribe('FLOW', 'FLOW')")
            owner.execute("SELECT * FROM messages.subscribe('FLOW', 'FLOW', 600)")
        publishers = [partial(self.publish, name) for name in range(PUBLISHERS)]
        together(*(partial(self.act, act) for act in (*publishers, self.read, self.remove)))
        return self.counts()

    def act(self, act: Callable[[], None]) -> None:
        """Act; a failure ends the acts of the other threads too."""
        try:
            act()
        except BaseException:
            self.has_failed.set()
            raise

    def publish(self, name: int) -> None:
        """Publish batches in transactions of every kind, some of which are rolled back."""
        dice, batch = random.Random(name), 0  # noqa: S311
        with self.connect() as connection:
            while self.is_wanted and not self.has_failed.is_set():
                batch += 1
                payloads = [f"{name}.{batch}.{n}" for n in range(dice.randint(1, 40))]
                is_lost = dice.random() < 0.1
                try:
                    publish_batch(connection, name, payloads, dice, is_lost)
                except psycopg.errors.SerializationFailure:
                    connection.execute("ROLLBACK")
                    is_lost = True
                (self.rolled_back if is_lost else self.committed).extend(payloads)
        self.busy.remove(name)

    def read(self) -> None:
        """Read until nothing comes; some transactions are rolled back, some sessions killed."""
        dice, idle = random.Random(0), 0  # noqa: S311
        connection = self.connect()
        with self.connect() as killer:
            while idle < 3 and not self.has_failed.is_set():
                rows, is_busy = 0, bool(self.busy)
                chance = dice.random() if is_busy else 1
                try:
                    with connection.transaction(force_rollback=chance < 0.15):
                        rows = connection.execute(EFFECT, [dice.randint(1, 500)]).fetchone()[0]
                        if 0.15 < chance < 0.2:
                            pid = connection.info.backend_pid
                            killer.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
                            self.reader_kills += 1
                    self.reader_rollbacks += chance < 0.15
                except psycopg.OperationalError:
                    connection.close()
                    connection = self.connect()
                idle = 0 if rows or is_busy else idle + 1
        connection.close()

    def remove(self) -> None:
        """Switch and empty tables all the time."""
        with self.connect() as connection:
            while self.busy and not self.has_failed.wait(0.02):
                with suppress(psycopg.OperationalError):
                    row = connection.execute("SELECT messages._prune_streams()").fetchone()
                    self.emptied += row[0]

    def counts(self) -> dict[str, int]:
        with self.connect() as owner:
            select = "SELECT id, payload FROM psqlmessages_effects ORDER BY n"
            rows = owner.execute(select).fetchall()
            owner.execute("DROP TABLE psqlmessages_effects")
        effects = Counter(payload for _, payload in rows)
        assert all(former[0] < later[0] for former, later in pairwise(rows)), "not in their order"
        return {
            "committed": len(self.committed), "rolled_back": len(self.rolled_back),
            "reader_kills": self.reader_kills, "reader_rollbacks": self.reader_rollbacks,
            "lost": len({*self.committed} - effects.keys()),
            "duplicated": effects.total() - len(effects),
            "rolled_back_but_read": len(effects.keys() - {*self.committed}),
        }  # fmt: skip


def publish_batch(
    connection: psycopg.Connection, name: int, bodies: list[str], dice: random.Random,
    is_lost: bool,
) -> None:  # fmt: skip
    """Publish in one transaction, by several calls; wait before its end."""
    connection.execute(f"BEGIN ISOLATION LEVEL {dice.choice(LEVELS)}")
    connection.execute(dice.choice(CALLS), bodies[:1])
    if dice.random() < 0.3:
        with connection.transaction(force_rollback=True):
            publish_many(connection, [f"{bodies[0]} given up"])
    publish_many(connection, bodies[1:])
    connection.execute("SELECT pg_sleep(%s)", [dice.random() / 50])
    end = "ROLLBACK" if is_lost else "COMMIT"
    # No more publishers than transactions may be prepared at the same time.
    if name < 5 and dice.random() < 0.2:
        connection.execute(f"PREPARE TRANSACTION 'flow {name}'")
        connection.execute("SELECT pg_sleep(%s)", [dice.random() / 100])
        end += f" PREPARED 'flow {name}'"
    connection.execute(end)


def publish_many(connection: psycopg.Connection, payloads: list[str]) -> None:
    call = "SELECT messages.publish_many('FLOW', 'FLOW', %s)"
    (answer,) = connection.execute(call, [payloads]).fetchone()
    assert answer["Err"] == "0", answer


@pytest.mark.versions
@pytest.mark.timeout(1200)
# The nightly run takes the minutes of the full size.
@pytest.mark.parametrize(
    "messages", [size(3_000, 100_000), pytest.param(100_000, marks=pytest.mark.nightly)]
)
def test_no_message_is_lost_doubled_or_read_if_rolled_back(world: World, messages: int):
    unrelated = world.program("user1")
    unrelated.execute("BEGIN")
    unrelated.execute("CREATE TEMP TABLE unrelated AS SELECT 1")
    flow = Flow(world.server.url(), messages)
    counts = flow.run()
    assert unrelated.query("SELECT count(*) FROM unrelated") == 1
    report(FAULT, "8 publishers, a tenth rolled back; the reader is killed", **counts)
    assert [counts[bad] for bad in BAD] == [0, 0, 0]
    assert counts["committed"] >= messages
    assert counts["rolled_back"] > messages / 100
    assert min(counts["reader_kills"], counts["reader_rollbacks"]) > 0
    assert messages < 100_000 or flow.emptied > 5
