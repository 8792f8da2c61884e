"""Command call: send an RPC to a node and print the answer."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from psqlmessages.cli.output import body_text, seconds
from psqlmessages.client.node import Node
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT

NAME = "call"
HELP = "call a node (RPC) and print its answer"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("ident", metavar="IDENT", help="the node that calls")
    parser.add_argument("node", metavar="NODE", help="the node to call")
    parser.add_argument("body", metavar="BODY", help="the body of the call; - reads standard input")
    parser.add_argument("--json", action="store_true", help="BODY is JSON")
    parser.add_argument(
        "--timeout", type=seconds, default=DEFAULT_CALL_TIMEOUT, help="seconds to wait (default: 5)"
    )


def run(arguments: Namespace) -> int:
    """Call and print the answer; fail if it does not arrive in time."""
    text = sys.stdin.read() if arguments.body == "-" else arguments.body
    body = json.loads(text) if arguments.json else text
    with Node(arguments.ident, arguments.dsn) as node:
        _print(node.call(arguments.node, body, timeout=arguments.timeout))
    return 0


def _print(answer: Any) -> None:
    if isinstance(answer, bytes):
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
    else:
        print(body_text(answer))
