"""A flow of messages under bad conditions, and the count of what was lost, doubled or undead."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import psycopg

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
BROKEN = (psycopg.OperationalError, psycopg.InterfaceError)


@dataclass
class Publisher:
    """Publishes batches in transactions of every kind; waits before each commit, undoes some."""

    flow: "Flow"
    name: int
    messages: int
    committed: list[str] = field(default_factory=list)
    rolled_back: int = 0

    def run(self) -> None:
        dice = random.Random(self.name)  # noqa: S311
        batch = 0
        with self.flow.connection() as connect:
            while self.flow.is_wanted and not self.flow.failure:
                batch += 1
                payloads = [f"{self.name}.{batch}.{n}" for n in range(dice.randint(1, 40))]
                is_lost = dice.random() < 0.1
                try:
                    self.publish(connect(), payloads, dice, is_lost)
                except psycopg.errors.SerializationFailure:
                    connect().execute("ROLLBACK")
                    self.rolled_back += len(payloads)
                else:
                    if is_lost:
                        self.rolled_back += len(payloads)
                    else:
                        self.committed += payloads

    def publish(
        self, connection: psycopg.Connection, bodies: list[str], dice: random.Random, is_lost: bool
    ) -> None:
        connection.execute(f"BEGIN ISOLATION LEVEL {dice.choice(LEVELS)}")
        connection.execute(dice.choice(CALLS), bodies[:1])
        if dice.random() < 0.3:
            with connection.transaction(force_rollback=True):
                publish(connection, [f"{bodies[0]} given up"])
        publish(connection, bodies[1:])
        connection.execute("SELECT pg_sleep(%s)", [dice.random() / 50])
        end = "ROLLBACK" if is_lost else "COMMIT"
        # No more publishers than transactions may be prepared at once.
        if self.name < 5 and dice.random() < 0.2:
            connection.execute(f"PREPARE TRANSACTION 'flow {self.name}'")
            connection.execute("SELECT pg_sleep(%s)", [dice.random() / 100])
            end += f" PREPARED 'flow {self.name}'"
        connection.execute(end)


def publish(connection: psycopg.Connection, payloads: list[str]) -> int:
    call = "SELECT messages.publish_many('FLOW', 'FLOW', %s)"
    (answer,) = connection.execute(call, [payloads]).fetchone()
    assert answer["Err"] == "0", answer
    return answer["Id"] or 0


@dataclass
class Reader:
    flow: "Flow"
    rolled_back: int = 0
    killed: int = 0

    def run(self) -> None:
        dice, idle = random.Random(0), 0  # noqa: S311
        with self.flow.connection() as connect, self.flow.connection() as connect_killer:
            while idle < 3 and not self.flow.failure:
                rows, is_busy = 0, self.flow.is_busy
                chance = dice.random() if is_busy else 1
                with suppress(*BROKEN):
                    connection = connect()
                    with connection.transaction(force_rollback=chance < 0.15):
                        rows = connection.execute(EFFECT, [dice.randint(1, 500)]).fetchone()[0]
                        if 0.15 < chance < 0.2:
                            pid = connection.info.backend_pid
                            connect_killer().execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
                            self.killed += 1
                    self.rolled_back += chance < 0.15
                idle = 0 if rows or is_busy else idle + 1


class Flow:
    """Publishers, a reader and an untiring remover, each in a thread with its own connection."""

    def __init__(self, url: str, messages: int) -> None:
        self.url = url
        self.publishers = [Publisher(self, name, messages // 8) for name in range(8)]
        self.is_busy = True
        self.failure: BaseException | None = None
        self.emptied = 0
        self.reader = Reader(self)

    @property
    def is_wanted(self) -> bool:
        """Whether some share is not committed yet, or a fault has not happened yet."""
        return (
            any(len(each.committed) < each.messages for each in self.publishers)
            or not self.reader.rolled_back
            or not self.reader.killed
        )

    @contextmanager
    def connection(self) -> Iterator[Callable[[], psycopg.Connection]]:
        """Give a connection that is made again if it broke."""
        made: list[psycopg.Connection] = []

        def connect() -> psycopg.Connection:
            if not made or made[-1].closed:
                made.append(psycopg.connect(self.url, autocommit=True))
            return made[-1]

        yield connect
        for connection in made:
            connection.close()

    def run(self) -> dict[str, int]:
        """Let it flow until all is published and read; the counts."""
        with psycopg.connect(self.url, autocommit=True) as owner:
            owner.execute(SETUP)
            owner.execute("SELECT messages.unsubscribe('FLOW', 'FLOW')")
            owner.execute("SELECT * FROM messages.subscribe('FLOW', 'FLOW', 600)")
        publishing = [self.thread(publisher.run) for publisher in self.publishers]
        others = [self.thread(self.reader.run), self.thread(self.remove)]
        for thread in (*publishing, *others):
            thread.start()
        for thread in publishing:
            thread.join()
        self.is_busy = False
        for thread in others:
            thread.join()
        if self.failure:
            raise self.failure
        return self.outcome()

    def thread(self, act: Callable[[], None]) -> threading.Thread:
        """Make a thread whose failure ends the flow."""

        def run() -> None:
            try:
                act()
            except BaseException as failure:  # noqa: BLE001 - raised again by `run`
                self.failure = failure

        return threading.Thread(target=run, daemon=True)

    def remove(self) -> None:
        """Switch and empty tables all the time."""
        with self.connection() as connect:
            while self.is_busy and not self.failure:
                with suppress(*BROKEN):
                    row = connect().execute("SELECT messages._prune_streams()").fetchone()
                    self.emptied += row[0]
                    connect().execute("SELECT pg_sleep(0.02)")

    def outcome(self) -> dict[str, int]:
        select = "SELECT id, payload FROM psqlmessages_effects ORDER BY n"
        with psycopg.connect(self.url) as owner:
            rows = owner.execute(select).fetchall()
            owner.execute("DROP TABLE psqlmessages_effects")
        effects = Counter(payload for _, payload in rows)
        committed = {payload for each in self.publishers for payload in each.committed}
        assert all(former[0] < later[0] for former, later in pairwise(rows)), "not in their order"
        return {
            "committed": len(committed),
            "rolled_back": sum(each.rolled_back for each in self.publishers),
            "reader_kills": self.reader.killed, "reader_rollbacks": self.reader.rolled_back,
            "lost": len(committed - effects.keys()),
            "duplicated": sum(count - 1 for count in effects.values()),
            "rolled_back_but_read": len(effects.keys() - committed),
        }  # fmt: skip
