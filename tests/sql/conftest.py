"""Fixtures of the SQL tests: an empty database, and programs that use it by psycopg."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import namedtuple_row

from tests.conftest import TestedServer

TABLES = (
    "exchangecount", "destination", "exchange", "element", "elementkey", "queuecount", "queue",
    "subscription", "membership", "observation", "client", "session", "topic", "auth",
)  # fmt: skip
# These answer rows that rules let the role see: none, if they let it see nothing.
LISTS = {
    "list_topics", "list_streams", "list_subscriptions", "list_subscribers", "list_stored",
    "list_queues", "list_queued",
}  # fmt: skip
# Those that return rows, and raise what the others answer.
READS = {"subscribe", "pop", "reserve", "take", "renew", "read_stream", "peek"} | LISTS
VARIADIC = {"commit", "rollback", "release", "renew", "unstage"}
# Whether a body or message is left, or a table of streams was analyzed, which changes plans.
KEPT = """
    SELECT sum(pg_relation_size(c.oid)) > 0
        OR bool_or(c.reltuples >= 0 AND i.inhparent = 'psqlmessages_streammessage'::regclass)
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent IN (
        'psqlmessages_body'::regclass, 'psqlmessages_streammessage'::regclass
    )
"""
INSERT_RULE = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES (%s, %s, %s, %s, %s, %s)
"""
FENCE = count(1)
# Long, because a busy machine may be slow.
WAIT_SECONDS = 60


class Program:
    """One connection of a role: it calls functions, and reads what arrives on its channel."""

    def __init__(self, url: str, connection: psycopg.Connection | None = None) -> None:
        self.url = url
        self.connection = connection or psycopg.connect(url, autocommit=True)
        self.is_temporary = False  # its role goes with the test
        self.warnings: list[str] = []
        self.connection.add_notice_handler(self._note)
        self._waiting: list[psycopg.Notify] = []

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        self.warnings.append(f"{notice.severity}: {notice.message_primary}")

    def call(self, function: str, *arguments: Any) -> dict[str, Any]:
        """Call a function of the schema messages; its JSON answer."""
        if function in READS:
            return self._read(function, *arguments)
        row = self.connection.execute(f"SELECT {_call(function, arguments)}", arguments).fetchone()
        assert row is not None
        return row[0] if isinstance(row[0], dict) else json.loads(row[0].partition("\n")[0])

    def _read(self, function: str, *arguments: Any) -> dict[str, Any]:
        read = self.read if function == "subscribe" else partial(self.elements, function)
        try:
            return {"Err": "0", "Rows": read(*arguments)}
        except psycopg.Error as error:
            if error.sqlstate is None or not error.sqlstate.startswith("PM"):
                raise
            return {"Err": error.sqlstate[2:].lstrip("0"), "Errstr": error.diag.message_primary}

    def read(
        self, client_id: str | None, topic: str | None, timeout: Any = 60, max_rows: Any = 1000
    ) -> list[Any]:
        return self.elements("subscribe", client_id, topic, timeout, max_rows)

    def elements(self, function: str, *arguments: Any) -> list[Any]:
        cursor = self.connection.cursor(row_factory=namedtuple_row)
        return cursor.execute(f"SELECT * FROM {_call(function, arguments)}", arguments).fetchall()

    def got(self, client_id: str, topic: str, timeout: int = 60, max_rows: int = 1000) -> list[str]:
        return [row.payload for row in self.read(client_id, topic, timeout, max_rows)]

    def ok(self, function: str, *arguments: Any) -> dict[str, Any]:
        answer = self.call(function, *arguments)
        assert answer["Err"] == "0", answer
        return answer

    def error(self, function: str, *arguments: Any) -> tuple[int, str]:
        """Call a function that must be refused: its number and text."""
        answer = self.call(function, *arguments)
        assert answer["Err"] != "0", answer
        return int(answer["Err"]), answer["Errstr"]

    def data(self, payload: str) -> tuple[dict[str, Any], str | None]:
        """Call get_data: the JSON line, and the body where one follows."""
        line, newline, body = self.query("SELECT messages.get_data(%s)", payload).partition("\n")
        return json.loads(line), body if newline else None

    def query(self, sql: str, *arguments: Any) -> Any:
        row = self.connection.execute(sql, arguments or None).fetchone()
        return row[0] if row else None

    def each(self, idents: Iterable[str], function: str, *arguments: Any) -> None:
        """Call a function that must succeed as each of these nodes of the session."""
        for ident in idents:
            self.ok("use", ident)
            self.ok(function, *arguments)

    @property
    def pid(self) -> int:
        return self.connection.info.backend_pid

    def payloads(self, number: int | None = None) -> list[str]:
        """The payloads that arrive: exactly `number`, or all that were sent before now.

        "All" is found without waiting: a notification of our own comes after them in the queue.
        """
        if number is None:
            return self._until_fence()
        while len(self._waiting) < number:
            arrived = list(self.connection.notifies(timeout=WAIT_SECONDS, stop_after=1))
            assert arrived, f"{len(self._waiting)} of {number} arrived: {self._waiting}"
            self._waiting.extend(arrived)
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        return [notify.payload for notify in taken]

    def _until_fence(self) -> list[str]:
        fence = f"fence_{self.pid}_{next(FENCE)}"
        self.connection.execute(f"LISTEN {fence}")
        self.connection.execute(f"NOTIFY {fence}")
        found: list[str] = []
        while True:
            arrived = list(self.connection.notifies(timeout=WAIT_SECONDS, stop_after=1))
            assert arrived, "nothing arrives within an open transaction"
            self._waiting.extend(arrived)
            while self._waiting:
                notify = self._waiting.pop(0)
                if notify.channel == fence:
                    self.connection.execute(f"UNLISTEN {fence}")
                    return found
                found.append(notify.payload)

    def headers(self, number: int | None = None) -> list[dict[str, Any]]:
        """The headers of what arrives; `Body` added where the payload has one."""
        return [parse(payload) for payload in self.payloads(number)]

    def events(self, number: int | None = None) -> list[str]:
        """What arrives, which must be events, as "evt ident topic"."""
        headers = self.headers(number)
        assert all(header["Type"] == "Sys" for header in headers), headers
        return [event_words(header) for header in headers]

    def bodies(self) -> list[str]:
        return [header["Body"] for header in self.headers() if header["Type"] == "Topic"]

    def execute(self, statement: str, arguments: Sequence[Any] | None = None) -> psycopg.Cursor:
        return self.connection.execute(statement, arguments)

    def close(self) -> None:
        self.connection.close()


Pair = tuple[Program, Program]


def _call(function: str, arguments: Sequence[Any]) -> str:
    places = ", ".join(["%s"] * len(arguments))
    if function in VARIADIC and isinstance(arguments[-1], list):
        places = places.removesuffix("%s") + "VARIADIC %s"
    return f"messages.{function}({places})"


def parse(payload: str) -> dict[str, Any]:
    line, newline, body = payload.partition("\n")
    return {**json.loads(line), **({"Body": body} if newline else {})}


def event_words(header: dict[str, Any]) -> str:
    words = (header.get(field) for field in ("Evt", "Ident", "Topic"))
    return " ".join(word for word in words if word)


class World:
    """The database of the tests, empty at first, and the programs that use it."""

    def __init__(self, server: TestedServer) -> None:
        self.server = server
        self.programs: list[Program] = []
        self.begin()

    def begin(self) -> None:
        """Empty the tables; a test with several cases calls it before each."""
        self.close()
        self.owner = self.program()
        # A program of the test before may still end its nodes: take locks in the same order.
        lock = "LOCK TABLE messages._rules_lock, psqlmessages_session IN EXCLUSIVE MODE;"
        self.execute(lock + ";".join(f"DELETE FROM psqlmessages_{name}" for name in TABLES))
        for name in "last_removed_message", "recheck", "unfinished", "batch":
            self.execute(f"DELETE FROM messages._{name}")
        # The time since the last test is no jump of the clock. Large ids would slow down Spark,
        # which looks through all ids from one message to the next.
        self.owner.connection.execute(
            "DELETE FROM messages._clock_gap;"
            "UPDATE messages._stream SET maintained_at = clock_timestamp();"
            "SELECT setval('messages._stream_id', 1)"
            " WHERE pg_sequence_last_value('messages._stream_id') > 1000000000;"
            "SELECT setval('messages._rechecks_paused_until', 1)"
        )
        # Twenty times as slow as all the deleting above, so only where there is something.
        if self.owner.query(KEPT):
            self.owner.connection.execute("TRUNCATE psqlmessages_body, psqlmessages_streammessage")
        # Apply earlier GRANTs and REVOKEs now, so that they change no channel within the test.
        self.owner.connection.execute("SELECT messages._maintain_sessions_and_rules()")

    def program(self, role: str | None = None, *, is_fresh: bool = False) -> Program:
        """A connection of a role, or of the owner of the tables.

        It may have served an earlier test, and is reset since; `is_fresh`: it has a new backend.
        """
        return self._program(self.server.url(role) if role else self.server.url(), is_fresh)

    def superuser(self) -> Program:
        return self._program(self.server.superuser_url)

    def execute(self, statement: str, arguments: Sequence[Any] | None = None) -> psycopg.Cursor:
        return self.owner.connection.execute(statement, arguments)

    def _program(self, url: str, is_fresh: bool = False) -> Program:
        pool = self.server.pool
        program = Program(url, None if is_fresh or pool is None else pool.take(url))
        self.programs.append(program)
        return program

    def close(self) -> None:
        """Close the connections, or give them back to the pool."""
        for program in self.programs:
            if self.server.pool is None or program.is_temporary:
                program.close()
            else:
                program.connection.remove_notice_handler(program._note)
                self.server.pool.give_back(program.url, program.connection)
        self.programs.clear()
        self._watcher: Program | None = None

    def rules(self, *rules: str) -> None:
        self.owner.connection.cursor().executemany(INSERT_RULE, [rule.split() for rule in rules])

    def rule(self, *fields: object) -> None:
        """Add one rule, whose names may hold blanks: role, ident, type, dest, mode, timeout."""
        self.owner.connection.execute(INSERT_RULE, fields)

    def node(self, role: str, *idents: str, **acts: str) -> Program:
        """A new connection of a role, registered as nodes, of which the last one acts.

        `listen="T U"`: it listens to both topics; `notify` and `observe` likewise.
        """
        program = self.program(role)
        for ident in idents:
            program.ok("init", ident)
        for act, topics in acts.items():
            for topic in topics.split():
                program.ok(f"topic_{act}", topic)
        return program

    def forget(self) -> None:
        for program in self.programs:
            if not program.connection.closed:
                program.payloads()

    @property
    def watcher(self) -> Program:
        """The connection of the superuser that waits and kills."""
        if self._watcher is None:
            self._watcher = self.superuser()
        return self._watcher

    def wait_for(self, condition: str, *arguments: Any) -> None:
        """Wait until a query of the superuser answers true, a minute at most."""
        for _ in range(100 * WAIT_SECONDS):
            if self.watcher.query(condition, *arguments):
                return
            self.watcher.query("SELECT pg_sleep(0.01)")
        raise AssertionError(f"never true: {condition} {arguments}")

    def end_backends(self, condition: str, *arguments: Any) -> int:
        """End the backends of which this is true in pg_stat_activity; return how many ended."""
        ended = "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, 60000))"
        return self.watcher.query(f"{ended} FROM pg_stat_activity WHERE {condition}", *arguments)

    def kill(self, program: Program) -> None:
        self.end_backends("pid = %s", program.pid)
        assert not self.watcher.query("SELECT 1 FROM pg_stat_activity WHERE pid = %s", program.pid)
        program.close()


@pytest.fixture
def world(server: TestedServer) -> Iterator[World]:
    world = World(server)
    yield world
    world.close()


@pytest.fixture
def new_role(world: World) -> Iterator[Callable[[str], Program]]:
    """Make login roles, for this test only: a connection of each."""
    superuser, made = world.superuser(), []

    def make(name: str) -> Program:
        role = sql.Identifier(name)
        superuser.connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(role))
        made.append(role)
        program = Program(make_conninfo(world.server.url("user1"), user=name, password="x"))
        program.is_temporary = True
        world.programs.append(program)
        return program

    yield make
    for role in made:
        superuser.connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(role))


@pytest.fixture
def spec_world(world: World) -> World:
    """The five rules of the documentation's example, with longer timeouts."""
    world.rules(
        "user1 NODE1 Rpc NODE2 W 500", "user2 NODE2 Rpc NODE1 W 500",
        "user1 NODE1 Topic MYTOPIC W 1000", "user2 NODE2 Topic MYTOPIC RW 1000",
        "user3 NODE3 Topic MYTOPIC R 1000",
    )  # fmt: skip
    return world


@pytest.fixture
def pair(world: World) -> Pair:
    """SENDER, that sends to T, and LISTENER, that listens to it; each may ask the other."""
    world.rules(
        "user1 SENDER Topic T W 1000", "user2 LISTENER Topic T R 1000",
        "user1 SENDER Rpc LISTENER W 1000", "user2 LISTENER Rpc SENDER W 1000",
    )  # fmt: skip
    sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER", listen="T")
    sender.ok("topic_notify", "T")
    world.forget()
    return sender, listener
