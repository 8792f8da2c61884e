"""The stage of the demonstration: prints each call and answer, and compares with the expected."""

from __future__ import annotations

import sys
from collections import deque
from time import monotonic
from typing import Any, Final

import psycopg
from psycopg import sql

from psqlmessages import wire
from psqlmessages.client.connections import Inlet, is_readable
from psqlmessages.commands.output import one_line

_WAIT_SECONDS: Final = 10.0
_SHOWN_CHARACTERS: Final = 240


class _Any:
    """Equals whatever there is: for what is drawn at random."""

    def __eq__(self, other: object) -> bool:
        return other is not None

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "…"


ANY: Final = _Any()


class Only:
    """Equals a list of this one name; patterns are passed over: rules for all topics have them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and [self._name] == [
            name for name in other if not name.endswith("*")
        ]

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return repr([self._name])


class Stage:
    """Where the conversation is printed and judged; ``is_brief`` prints titles and result only."""

    def __init__(self, *, is_brief: bool = False) -> None:
        self._is_brief = is_brief
        self._chapters = self._steps = self._differences = 0

    def chapter(self, title: str) -> None:
        """Begin a part of the conversation."""
        self._chapters += 1
        line = f"{self._chapters}. {title}"
        print(line if self._is_brief else f"\n{line}\n", flush=True)

    def show(self, text: str, prompt: str = "   ") -> None:
        """Print what was asked or answered, long lines shortened."""
        if self._is_brief:
            return
        lines = (one_line(line) for line in text.split("\n"))
        shown = (
            f"{line[:_SHOWN_CHARACTERS]}… ({len(line):,} characters)"
            if len(line) > _SHOWN_CHARACTERS
            else line
            for line in lines
        )
        print(prompt + "\n   ".join(shown), flush=True)

    def judge(self, found: object, expected: object) -> None:
        """Count a step, and say so where it is not as expected."""
        self._steps += 1
        if found != expected:
            self._differences += 1
            print(f"   DIFFERENT: expected {expected!r:.500}", flush=True)

    def conclude(self) -> int:
        """Print the result; return the exit code."""
        if self._differences:
            print(f"\n{self._differences} of {self._steps} steps differ.", file=sys.stderr)
            return 1
        blank = "" if self._is_brief else "\n"
        print(f"{blank}All {self._steps} steps went as expected.", flush=True)
        return 0


class Party:
    """One of those who converse, with a connection of its own."""

    def __init__(
        self, stage: Stage, ident: str, connection: psycopg.Connection[tuple[Any, ...]]
    ) -> None:
        self._stage = stage
        self._ident = ident
        self._connection = connection
        self._inlet = Inlet(connection.pgconn)
        self._heard: deque[str] = deque()

    def asks(self, function: str, *arguments: str, expected: dict[str, Any]) -> None:
        """Call a function of the schema messages and compare its answer."""
        answer = self._call(function, *arguments)
        self._stage.judge(wire.parse(answer).header, expected)

    def evaluates(self, expected: dict[str, Any]) -> None:
        """Evaluate until an event comes: it takes the server a moment to end a connection."""
        self._say("SELECT messages.evaluate()")
        deadline = monotonic() + _WAIT_SECONDS
        while self._find(expected) is None and monotonic() < deadline:
            self._answer("evaluate")
            self._listen()

    def fetches(self, payload: str, header: dict[str, Any], body: str) -> None:
        """Fetch a kept body and compare it."""
        parsed = wire.parse(self._call("get_data", payload))
        self._stage.judge((parsed.header, parsed.text), (header, body))

    def does(self, statement: sql.Composed, expected: str) -> None:
        """Run a statement and compare what it says it did."""
        self._say(statement.as_string(self._connection))
        status = self._connection.execute(statement).statusmessage or ""
        self._stage.show(status)
        self._stage.judge(status, expected)

    def hears(
        self, header: dict[str, Any], body: str | None = None, *, in_any_order: bool = False
    ) -> str:
        """Wait for the next notification, compare it, and return its payload.

        ``in_any_order`` takes the first that is as expected and leaves the others.
        """
        payload = self._next(header if in_any_order else {})
        self._stage.show("hears", prompt=f"{self._ident} ")
        self._stage.show(payload or "nothing")
        found = wire.parse(payload) if payload else wire.Payload({}, None)
        # Every payload has a number of its own; which it is does not matter.
        given = {name: value for name, value in found.header.items() if name in header}
        text = None if not found.text else found.text
        self._stage.judge((given, text), (header, body))
        return payload

    def token_of(self, payload: str) -> str:
        """Tell the token that a payload carries."""
        return str(wire.parse(payload or "{}").header.get("Token") or "none")

    def crashes(self) -> None:
        """End the connection, as the death of a program does."""
        self._stage.show(f"{self._ident} is gone")
        self._connection.close()

    def _call(self, function: str, *arguments: str) -> str:
        query = sql.SQL("SELECT messages.{}({})").format(
            sql.SQL(function), sql.SQL(", ").join(map(sql.Literal, arguments))
        )
        self._say(query.as_string(self._connection))
        answer = self._answer(function, *arguments)
        self._stage.show(answer)
        return answer

    def _answer(self, function: str, *arguments: str) -> str:
        query = sql.SQL("SELECT messages.{}({})::text").format(
            sql.SQL(function), sql.SQL(", ").join(sql.Placeholder() * len(arguments))
        )
        row = self._connection.execute(query, arguments).fetchone()
        return str(row[0]) if row else ""

    def _say(self, text: str) -> None:
        self._stage.show(f"{text};", prompt=f"{self._ident}=> ")

    def _next(self, header: dict[str, Any]) -> str:
        deadline = monotonic() + _WAIT_SECONDS
        while (payload := self._find(header)) is None and monotonic() < deadline:
            self._listen()
        if payload is None:
            return ""
        self._heard.remove(payload)
        return payload

    def _find(self, header: dict[str, Any]) -> str | None:
        return next((payload for payload in self._heard if _has(payload, header)), None)

    def _listen(self) -> None:
        if is_readable(self._connection.fileno(), 0.1):
            self._inlet.read()
        self._heard += [payload for _, payload in self._inlet.take()]


def _has(payload: str, header: dict[str, Any]) -> bool:
    found = wire.parse(payload).header
    return all(found.get(name) == value for name, value in header.items())
