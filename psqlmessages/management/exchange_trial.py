"""exchange test: say where an element would go, and why, and what the copies would be."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from psqlmessages.commands.arguments import natural
from psqlmessages.commands.output import one_line
from psqlmessages.exchanges.messages import Message
from psqlmessages.graph import parsing, stored
from psqlmessages.graph.entries import MalformedExchanges
from psqlmessages.graph.trial import Copy, tried


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", metavar="NAME", help="the exchange")
    parser.add_argument(
        "--headers", type=_headers, default="{}", help="the headers, a JSON object (default: none)"
    )
    parser.add_argument("--body", default="", help="the body: text (default: empty)")
    parser.add_argument("--json-body", action="store_true", help="the body is JSON")
    parser.add_argument(
        "--tries", type=natural, default=0, help="how often it was taken in vain (default: 0)"
    )


def run(arguments: Namespace) -> int:
    """Route an element that is in no queue; print a line per destination, and one per copy."""
    row = stored.rows(arguments.database).get(name=arguments.name)
    try:
        exchange = stored.compiled(row)
    except MalformedExchanges as error:
        for fault in error.faults:
            print(one_line(f"psqlmessages: {fault}"), file=sys.stderr)
        return 1
    source = exchange.source
    message = Message(
        parsing.json_value(arguments.body) if arguments.json_body else arguments.body,
        arguments.headers,
        tries=arguments.tries,
        queue=source.queue,
        ns=source.namespace,
    )
    trial = tried(exchange, message)
    for asked in trial.asked:
        answer = "yes" if asked.verdict.is_taken else "no"
        print(one_line(f"{asked.place}: {answer}, {asked.verdict.error or asked.verdict.why}"))
        if asked.copy is not None:
            _print(asked.copy)
    if trial.stray is not None:
        print(one_line(f"{trial.outcome}: to {trial.stray.place}"))
        _print(trial.stray)
    return 0


def _headers(text: str) -> dict[str, Any]:
    try:
        headers = parsing.json_value(text)
    except parsing.MalformedText as error:
        raise ArgumentTypeError(str(error)) from error
    if not isinstance(headers, dict):
        raise ArgumentTypeError(f"not a JSON object: {text:.100}")
    return headers


def _print(copy: Copy) -> None:
    """Print what would be pushed, in one line that is JSON."""
    document = {"headers": copy.headers, "body": copy.body}
    for option in ("delay", "mature", "tries"):
        if value := getattr(copy, option):
            document[option] = value
    print(f"    {json.dumps(document, ensure_ascii=False, default=_as_text)}")


def _as_text(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
