"""Command receive: print the messages of a topic and their rate."""

from __future__ import annotations

import base64
import json
import sys
from argparse import ArgumentParser, Namespace
from datetime import timedelta
from typing import Any

from psqlmessages.cli.output import Progress, body_text, one_line, positive, seconds
from psqlmessages.client.messages import RECONNECTED, SYS, Message
from psqlmessages.client.node import Node
from psqlmessages.client.queue_calls import Element
from psqlmessages.client.stream_calls import StreamMessage
from psqlmessages.exceptions import MessagesError

NAME = "receive"
HELP = "print the messages of a topic and their rate, until Ctrl-C"

_TICK = timedelta(seconds=1)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("ident", metavar="IDENT", help="the node that receives")
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line, for programs"
    )
    parser.add_argument("--events", action="store_true", help="also print system events")
    parser.add_argument("--count", type=positive, help="stop after this number of messages")
    parser.add_argument(
        "--timeout", type=seconds, help="stop after this many seconds without a message"
    )


def run(arguments: Namespace) -> int:
    """Receive until Ctrl-C, --count or --timeout; fail if fewer than --count messages arrived."""
    with (
        Node(arguments.ident, arguments.dsn) as node,
        Progress("received", arguments.count) as progress,
    ):
        node.topic_listen(arguments.topic)
        try:
            progress.say(f"{arguments.ident} listens to {arguments.topic}; press Ctrl-C to stop")
            _receive(node, arguments, progress)
        except KeyboardInterrupt:
            return 0
    return 1 if progress.count < (arguments.count or 0) else 0


def _receive(node: Node, arguments: Namespace, progress: Progress) -> None:
    tick = _TICK if arguments.timeout is None else min(_TICK, arguments.timeout)
    waited = timedelta(0)
    while arguments.timeout is None or waited <= arguments.timeout:
        waited += tick
        for message in node.messages(timeout=tick):
            waited = timedelta(0)
            _print(message, arguments, progress)
            if progress.count == arguments.count:
                return
        progress.show()


def _print(message: Message, arguments: Namespace, progress: Progress) -> None:
    if message.event == RECONNECTED:
        progress.say(f"reconnected: messages of {message.away} may be missing")
    if message.type != SYS:
        progress.add()
    elif not arguments.events:
        return
    text = json.dumps(as_json(message)) if arguments.json else as_text(message)
    progress.say(text, sys.stdout)


def as_json(message: Message) -> dict[str, Any]:
    """Return a message for programs. A body of bytes is base64, and ``enc`` is then b64."""
    described: dict[str, Any] = {
        name: value
        for name in ("type", "sender", "to", "topic", "event", "ident", "token", "id", "size")
        if (value := getattr(message, name)) not in ("", None)
    }
    return described | ({} if message.type == SYS else body_as_json(message))


def body_as_json(message: Message | StreamMessage | Element) -> dict[str, Any]:
    """Return the body of a message for programs, or the error that prevents reading it."""
    try:
        body = message.body
    except MessagesError as error:
        return {"error": str(error)}
    if isinstance(body, bytes):
        return {"body": base64.b64encode(body).decode(), "enc": "b64"}
    return {"body": body}


def as_text(message: Message | StreamMessage) -> str:
    """Return a message for people, in one line."""
    if isinstance(message, Message) and message.type == SYS:
        return one_line(f"* {message.event} {message.ident} {message.topic}".rstrip())
    try:
        body = message.body
    except MessagesError as error:
        return one_line(f"{message.sender}: {error}")
    return one_line(f"{message.sender}: {body_text(body)}")
