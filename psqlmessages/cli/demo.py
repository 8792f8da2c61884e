"""Command demo: a conversation of two nodes, each step as SQL with its answer."""

from __future__ import annotations

import secrets
import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

from psycopg import errors, sql
from psycopg.conninfo import make_conninfo
from psycopg.types.string import TextLoader

from psqlmessages import wire
from psqlmessages.cli import demo_traffic
from psqlmessages.cli.direct_calls import Connection, connect_as
from psqlmessages.cli.output import CliCommand, one_line
from psqlmessages.client.connection import NotificationBuffer, is_readable
from psqlmessages.exceptions import MessagesError

ROLE1: Final = "psqlmessages_demo1"
ROLE2: Final = "psqlmessages_demo2"

# Role, ident, type, dest, mode, timeout: the columns of messages.auth.
RuleRow = tuple[str, str, str, str, str, int]

CONVERSATION_RULES: Final[tuple[RuleRow, ...]] = (
    (ROLE1, "DEMO1", "Topic", "DEMO.ORDERS", "W", 60),
    (ROLE2, "DEMO2", "Topic", "DEMO.ORDERS", "R", 60),
    (ROLE1, "DEMO1", "Rpc", "DEMO2", "W", 5),
)
TRAFFIC_RULES: Final[tuple[RuleRow, ...]] = (
    (ROLE1, "DEMO.SHOP", "Topic", "DEMO.ORDERS", "W", 60),
    (ROLE1, "DEMO.SHOP", "Rpc", "DEMO.WAREHOUSE", "W", 5),
    (ROLE1, "DEMO.TICKER", "Topic", "DEMO.PRICES", "W", 60),
    (ROLE2, "DEMO.WAREHOUSE", "Topic", "DEMO.ORDERS", "R", 60),
    (ROLE2, "DEMO.WAREHOUSE", "Topic", "DEMO.STOCK", "W", 60),
    (ROLE2, "DEMO.BOARD", "Topic", "DEMO.ORDERS", "R", 60),
    (ROLE2, "DEMO.BOARD", "Topic", "DEMO.PRICES", "R", 60),
    (ROLE2, "DEMO.BOARD", "Topic", "DEMO.STOCK", "R", 60),
)


def prepare_login(admin: Connection, dsn: str, role: str) -> str:
    """Create or alter a login role with a random password; return its connection string."""
    password = secrets.token_urlsafe(24)
    # Only the hash is sent, so the password cannot appear in the server log.
    encrypted = admin.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
    row = admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
    verb = "CREATE" if row is None else "ALTER"
    command = sql.SQL("{} ROLE {} LOGIN PASSWORD {}").format(
        sql.SQL(verb), sql.Identifier(role), sql.Literal(encrypted.decode())
    )
    try:
        admin.execute(command)
    except errors.InsufficientPrivilege as error:
        user = admin.info.user
        fix = (
            f"ALTER ROLE {user} CREATEROLE;"
            if verb == "CREATE"
            else f"DROP ROLE {role};  ({user} then creates it again)"
        )
        raise MessagesError(
            f"role {user} cannot prepare the login role {role} of the demo"
            f" ({error.diag.message_primary}); run as a superuser: {fix}"
        ) from error
    return make_conninfo(dsn, user=role, password=password)


@contextmanager
def rule_cleanup(dsn: str) -> Iterator[None]:
    """Remove the rules of the demo before and after the block; a killed run may have left some."""
    _remove_rules(dsn)
    try:
        yield
    finally:
        _remove_rules(dsn)


def compose_insert(rules: tuple[RuleRow, ...]) -> sql.Composed:
    """Return the statement that adds rules, formatted for people."""
    rows = [sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, rule))) for rule in rules]
    return sql.SQL(
        "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES\n  {}"
    ).format(sql.SQL(",\n  ").join(rows))


def _remove_rules(dsn: str) -> None:
    with connect_as(dsn, "demo", owner_task="write rules") as admin:
        admin.execute("DELETE FROM messages.auth WHERE role IN (%s, %s)", (ROLE1, ROLE2))


_WAIT_SECONDS: Final = 10.0
_MAX_LINE_CHARACTERS: Final = 240


class AnyValue:
    """Equals any value except None. Stands for a random value in an expected answer."""

    def __eq__(self, other: object) -> bool:
        return other is not None

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "…"


ANY: Final = AnyValue()


class OnlyName(list[str]):
    """Equals a list with this name only; ignores patterns, which rules outside the demo add."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and list(self) == [
            name for name in other if not name.endswith("*")
        ]

    __hash__ = None


class DemoScript:
    """Prints and checks the conversation. If ``is_brief``, it prints only titles and the result."""

    def __init__(self, *, is_brief: bool = False) -> None:
        self._is_brief = is_brief
        self._parts = self._steps = self._differences = 0

    def start_part(self, title: str) -> None:
        """Begin a part of the conversation."""
        self._parts += 1
        line = f"{self._parts}. {title}"
        print(line if self._is_brief else f"\n{line}\n", flush=True)

    def show(self, text: str, prompt: str = "   ") -> None:
        """Print a call or an answer; shorten long lines."""
        if self._is_brief:
            return
        lines = []
        for line in map(one_line, text.split("\n")):
            is_long = len(line) > _MAX_LINE_CHARACTERS
            rest = f"… ({len(line):,} characters)" if is_long else ""
            lines.append(line[:_MAX_LINE_CHARACTERS] + rest)
        print(prompt + "\n   ".join(lines), flush=True)

    def compare(self, actual: object, expected: object) -> None:
        """Count a step, and report an unexpected result."""
        self._steps += 1
        if actual != expected:
            self._differences += 1
            print(f"   DIFFERENT: expected {expected!r:.500}", flush=True)

    def report_result(self) -> int:
        """Print the number of differences; return the exit code."""
        if self._differences:
            print(f"\n{self._differences} of {self._steps} steps differ.", file=sys.stderr)
            return 1
        blank = "" if self._is_brief else "\n"
        print(f"{blank}All {self._steps} steps went as expected.", flush=True)
        return 0


class DemoNode:
    """One node of the conversation, with its own connection."""

    def __init__(self, script: DemoScript, ident: str, connection: Connection) -> None:
        self._script = script
        self._ident = ident
        self._connection = connection
        # Answers are JSON: show and parse their text.
        connection.adapters.register_loader("json", TextLoader)
        self._buffer = NotificationBuffer(connection.pgconn)
        self._received: deque[str] = deque()

    def call(self, function: str, *arguments: str, expected: dict[str, Any]) -> None:
        """Call a function of the schema messages and compare its answer."""
        answer = self._call_function(function, *arguments)
        self._script.compare(wire.parse(answer).header, expected)

    def evaluate_until(self, expected: dict[str, Any]) -> None:
        """Call evaluate until an event arrives: the server notices a crash with a delay."""
        query: Final = "SELECT messages.evaluate()"
        self._print_statement(query)
        deadline = monotonic() + _WAIT_SECONDS
        while self._find_notification(expected) is None and monotonic() < deadline:
            self._connection.execute(query)
            self._receive()

    def fetch_body(self, payload: str, header: dict[str, Any], body: str) -> None:
        """Fetch a large body and compare it."""
        parsed = wire.parse(self._call_function("get_data", payload))
        self._script.compare((parsed.header, parsed.text), (header, body))

    def execute(self, statement: sql.Composed, expected: str) -> None:
        """Run a statement and compare its command status."""
        self._print_statement(statement.as_string(self._connection))
        status = self._connection.execute(statement).statusmessage or ""
        self._script.show(status)
        self._script.compare(status, expected)

    def expect(
        self, header: dict[str, Any], body: str | None = None, *, in_any_order: bool = False
    ) -> str:
        """Wait for the next notification, compare it, and return its payload.

        With ``in_any_order``, take the first matching notification. Returns "" after 10 s.
        """
        wanted = header if in_any_order else {}
        deadline = monotonic() + _WAIT_SECONDS
        while (payload := self._find_notification(wanted)) is None and monotonic() < deadline:
            self._receive()
        if payload is not None:
            self._received.remove(payload)
        self._script.show("receives", prompt=f"{self._ident} ")
        self._script.show(payload or "nothing")
        parsed = wire.parse(payload) if payload else wire.Payload({}, None)
        # Compare only the expected fields.
        fields = {name: value for name, value in parsed.header.items() if name in header}
        self._script.compare((fields, parsed.text or None), (header, body))
        return payload or ""

    def crash(self) -> None:
        """Close the connection, as a crash of the program does."""
        self._script.show(f"{self._ident} closes its connection")
        self._connection.close()

    def _call_function(self, function: str, *arguments: str) -> str:
        query = sql.SQL("SELECT messages.{}({})").format(
            sql.SQL(function), sql.SQL(", ").join(map(sql.Literal, arguments))
        )
        self._print_statement(query.as_string(self._connection))
        answer = str(self._connection.execute(query).fetchall()[0][0])
        self._script.show(answer)
        return answer

    def _print_statement(self, text: str) -> None:
        self._script.show(f"{text};", prompt=f"{self._ident}=> ")

    def _find_notification(self, header: dict[str, Any]) -> str | None:
        for payload in self._received:
            received = wire.parse(payload).header
            if all(received.get(name) == value for name, value in header.items()):
                return payload
        return None

    def _receive(self) -> None:
        if is_readable(self._connection.fileno(), 0.1):
            self._buffer.read()
        self._received += [payload for _, payload in self._buffer.take()]


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--traffic", action="store_true", help="afterwards send live traffic, until Ctrl-C"
    )
    parser.add_argument(
        "--brief", action="store_true", help="print only titles and the result, no statistics"
    )


def run(arguments: Namespace) -> int:
    """Run the conversation; fail if an answer is unexpected. With --traffic, then run traffic."""
    dsn, script = arguments.dsn, DemoScript(is_brief=arguments.brief)
    with rule_cleanup(dsn), connect_as(dsn, "demo") as admin:
        dsns = (prepare_login(admin, dsn, ROLE1), prepare_login(admin, dsn, ROLE2))
        _converse(script, admin, *dsns)
    code = script.report_result()
    if code == 0 and arguments.traffic:
        with rule_cleanup(dsn):
            with connect_as(dsn, "demo") as admin:
                admin.execute(compose_insert(TRAFFIC_RULES))
            demo_traffic.run(*dsns, status_dsn=None if arguments.brief else dsn)
    return code


def _converse(script: DemoScript, admin: Connection, dsn1: str, dsn2: str) -> None:
    with connect_as(dsn1, "DEMO1") as connection1, connect_as(dsn2, "DEMO2") as connection2:
        demo1 = DemoNode(script, "DEMO1", connection1)
        demo2 = DemoNode(script, "DEMO2", connection2)
        _add_rules(script, admin)
        steps = (_register, _send, _send_large_body, _call_node, _call_without_rule, _crash)
        for step in steps:
            step(script, demo1, demo2)


def _add_rules(script: DemoScript, admin: Connection) -> None:
    script.start_part(
        "The owner adds rules: DEMO1 may send to a topic and call DEMO2, which may listen"
    )
    owner = DemoNode(script, "owner", admin)
    owner.execute(compose_insert(CONVERSATION_RULES), f"INSERT 0 {len(CONVERSATION_RULES)}")


def _register(script: DemoScript, demo1: DemoNode, demo2: DemoNode) -> None:
    script.start_part("Both nodes register; each receives events about the other")
    demo1.call("init", "DEMO1", expected={"Err": "0", "Channel": ANY})
    demo2.call("init", "DEMO2", expected={"Err": "0", "Channel": ANY})
    demo1.expect({"Type": "Sys", "Evt": "connect", "Ident": "DEMO2"})
    demo1.call(
        "topic_auth",
        "DEMO.ORDERS",
        expected={"Err": "0", "Notifiers": OnlyName(["DEMO1"]), "Listeners": OnlyName(["DEMO2"])},
    )
    demo2.call("topic_listen", "DEMO.ORDERS", expected={"Err": "0"})
    demo1.expect({"Type": "Sys", "Evt": "topic_listen", "Ident": "DEMO2", "Topic": "DEMO.ORDERS"})
    demo1.call("topic_notify", "DEMO.ORDERS", expected={"Err": "0"})
    demo2.expect({"Type": "Sys", "Evt": "topic_notify", "Ident": "DEMO1", "Topic": "DEMO.ORDERS"})
    demo1.call(
        "topic_status",
        "DEMO.ORDERS",
        expected={"Err": "0", "Notifiers": ["DEMO1"], "Listeners": ["DEMO2"]},
    )


def _send(script: DemoScript, demo1: DemoNode, demo2: DemoNode) -> None:
    script.start_part("A short message travels in the notification")
    demo1.call("topic_send", "DEMO.ORDERS", "Order 1: two apples", expected={"Err": "0"})
    demo2.expect(
        {"Type": "Topic", "From": "DEMO1", "To": "DEMO.ORDERS", "Size": 19, "Id": ANY},
        "Order 1: two apples",
    )


def _send_large_body(script: DemoScript, demo1: DemoNode, demo2: DemoNode) -> None:
    script.start_part("A large body is stored, and fetched with get_data")
    body = "Order 2: " + "many apples, " * 2000
    header = {"Type": "Topic", "From": "DEMO1", "To": "DEMO.ORDERS", "Size": len(body), "Id": ANY}
    demo1.call("topic_send", "DEMO.ORDERS", body, expected={"Err": "0"})
    payload = demo2.expect(header | {"Dkey": ANY})
    demo2.fetch_body(payload, {"Err": "0"} | header, body)


def _call_node(script: DemoScript, demo1: DemoNode, demo2: DemoNode) -> None:
    script.start_part("DEMO1 calls DEMO2; only DEMO2 can answer, with the token of the call")
    demo1.call("rpc", "DEMO2", "question-1", "How many apples are left?", expected={"Err": "0"})
    payload = demo2.expect(
        {"Type": "Rpc", "From": "DEMO1", "To": "DEMO2", "Size": 25, "Token": ANY, "Id": ANY},
        "How many apples are left?",
    )
    token = str(wire.parse(payload or "{}").header.get("Token") or "none")
    demo2.call("return", "DEMO1", token, "Seven", expected={"Err": "0"})
    answer = {"Type": "Return", "From": "DEMO2", "To": "DEMO1", "Token": "question-1"}
    demo1.expect(answer | {"Size": 5, "Id": ANY}, "Seven")
    forged = ("1" if token[0] == "0" else "0") + token[1:]
    demo2.call("return", "DEMO1", forged, "Eight", expected={"Err": "20", "Errstr": ANY})


def _call_without_rule(script: DemoScript, demo1: DemoNode, demo2: DemoNode) -> None:
    script.start_part("Calls that no rule allows are refused")
    demo1.call(
        "topic_listen",
        "DEMO.ORDERS",
        expected={"Err": "3", "Errstr": "cannot auth R with Topic DEMO.ORDERS"},
    )
    demo2.call("rpc", "DEMO1", "question-2", "And you?", expected={"Err": "2", "Errstr": ANY})


def _crash(script: DemoScript, demo1: DemoNode, demo2: DemoNode) -> None:
    script.start_part(
        "DEMO2 crashes: its connection ends without deinit, and DEMO1 receives an event"
    )
    demo2.crash()
    demo1.evaluate_until({"Type": "Sys", "Evt": "crash", "Ident": "DEMO2"})
    topic = {"Topic": "DEMO.ORDERS"}
    demo1.expect(
        {"Type": "Sys", "Evt": "topic_unlisten", "Ident": "DEMO2"} | topic, in_any_order=True
    )
    demo1.expect({"Type": "Sys", "Evt": "topic_none_listen"} | topic, in_any_order=True)
    demo1.expect({"Type": "Sys", "Evt": "crash", "Ident": "DEMO2"}, in_any_order=True)
    demo1.call(
        "topic_send",
        "DEMO.ORDERS",
        "Order 3",
        expected={"Err": "10", "Errstr": "cannot listeners for Topic DEMO.ORDERS"},
    )
    demo1.call("deinit", "DEMO1", expected={"Err": "0"})


COMMAND = CliCommand(
    "demo",
    "show a conversation of two nodes, each step as SQL with PostgreSQL's answer",
    _configure,
    run,
)
