"""Commands send, receive and call: topics and RPC on the command line."""

from __future__ import annotations

import base64
import json
import sys
from argparse import ArgumentParser, Namespace
from datetime import timedelta
from itertools import islice, repeat
from math import inf
from time import monotonic
from typing import Any

from psqlmessages.cli.output import (
    CliCommand,
    Progress,
    add_batch,
    add_json,
    duration,
    format_body,
    natural,
    one_line,
    parse_body,
    positive,
    read_lines,
)
from psqlmessages.client.messages import RECONNECTED, SYS, Message
from psqlmessages.client.node import Node
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT
from psqlmessages.client.queue_calls import Element
from psqlmessages.client.stream_calls import StreamMessage
from psqlmessages.exceptions import MessagesError


def _configure_send(parser: ArgumentParser) -> None:
    parser.add_argument("ident", metavar="IDENT", help="the node that sends")
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "body",
        metavar="BODY",
        nargs="?",
        help="the text to send; - reads one body per line from standard input",
    )
    parser.add_argument(
        "--count", type=natural, help="number of messages (default: 1, or all lines)"
    )
    parser.add_argument(
        "--size",
        type=natural,
        default=10,
        help="bytes of each body if BODY is missing (default: 10)",
    )
    parser.add_argument(
        "--interval", type=duration, default=timedelta(0), help="seconds between two sends"
    )
    add_batch(parser)


def _send(arguments: Namespace) -> int:
    if arguments.body == "-":
        bodies, total = read_lines(), arguments.count
    else:
        bodies = repeat("x" * arguments.size if arguments.body is None else arguments.body)
        total = 1 if arguments.count is None else arguments.count
    bodies = islice(bodies, total)
    with Node(arguments.ident, arguments.dsn) as node, Progress("sent", total) as progress:
        node.topic_notify(arguments.topic)
        while batch := list(islice(bodies, arguments.batch)):
            if arguments.batch == 1:
                node.topic_send(arguments.topic, batch[0])
            else:
                node.topic_send_many(arguments.topic, batch)
            progress.add(len(batch))
            if arguments.interval and progress.count != total:
                _wait(node, arguments.interval)
    return 0


def _wait(node: Node, interval: timedelta) -> None:
    """Wait for ``interval``; receive messages, because only a receiving node does housekeeping."""
    deadline = monotonic() + interval.total_seconds()
    while (remaining := deadline - monotonic()) > 0:
        next(node.messages(timeout=timedelta(seconds=remaining)), None)


SEND = CliCommand("send", "send to a topic and show the rate", _configure_send, _send)

_REFRESH_SECONDS = 1.0


def _configure_receive(parser: ArgumentParser) -> None:
    parser.add_argument("ident", metavar="IDENT", help="the node that receives")
    parser.add_argument("topic", metavar="TOPIC")
    add_json(parser, per_line=True)
    parser.add_argument("--events", action="store_true", help="also print system events")
    parser.add_argument("--count", type=positive, help="stop after this number of messages")
    parser.add_argument(
        "--timeout", type=duration, help="stop after this many seconds without a message"
    )


def _receive(arguments: Namespace) -> int:
    """Receive until Ctrl-C, --count or --timeout; fail if --timeout comes before --count."""
    with (
        Node(arguments.ident, arguments.dsn) as node,
        Progress("received", arguments.count) as progress,
    ):
        node.topic_listen(arguments.topic)
        try:
            progress.say(f"{arguments.ident} listens to {arguments.topic}; press Ctrl-C to stop")
            _print_messages(node, arguments, progress)
        except KeyboardInterrupt:
            return 0
    return 1 if progress.count < (arguments.count or 0) else 0


def _print_messages(node: Node, arguments: Namespace, progress: Progress) -> None:
    """Print messages until --count or --timeout; also refresh the rate while none arrives."""
    timeout = inf if arguments.timeout is None else arguments.timeout.total_seconds()
    last_received_at = monotonic()
    while (remaining := last_received_at + timeout - monotonic()) > 0:
        for message in node.messages(timeout=min(remaining, _REFRESH_SECONDS)):
            last_received_at = monotonic()
            _print_message(message, arguments, progress)
            if progress.count == arguments.count:
                return
        progress.show()


def _print_message(message: Message, arguments: Namespace, progress: Progress) -> None:
    if message.event == RECONNECTED:
        progress.say(f"reconnected: messages of the last {message.away} (h:m:s) may be missing")
    if message.type != SYS:
        progress.add()
    elif not arguments.events:
        return
    text = json.dumps(_message_fields(message)) if arguments.json else format_message(message)
    progress.say(text, sys.stdout)


def _message_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: value
        for name in ("type", "sender", "to", "topic", "event", "ident", "token", "id", "size")
        if (value := getattr(message, name)) not in ("", None)
    }
    return fields | ({} if message.type == SYS else body_fields(message))


def body_fields(message: Message | StreamMessage | Element) -> dict[str, Any]:
    """Return the JSON field ``body``, or ``error`` if the body cannot be read.

    Bytes are encoded as base64; then there is also the field ``enc``, with the value "b64".
    """
    try:
        body = message.body
    except MessagesError as error:
        return {"error": str(error)}
    if isinstance(body, bytes):
        return {"body": base64.b64encode(body).decode(), "enc": "b64"}
    return {"body": body}


def body_or_error(message: Message | StreamMessage | Element) -> str:
    """Format the body for people, or the error if the body cannot be read."""
    try:
        return format_body(message.body)
    except MessagesError as error:
        return str(error)


def format_message(message: Message | StreamMessage) -> str:
    """Format a message for people, in one line."""
    if isinstance(message, Message) and message.type == SYS:
        return one_line(f"* {message.event} {message.ident} {message.topic}".rstrip())
    return one_line(f"{message.sender}: {body_or_error(message)}")


RECEIVE = CliCommand(
    "receive",
    "print the messages of a topic and their rate, until Ctrl-C",
    _configure_receive,
    _receive,
)


def _configure_call(parser: ArgumentParser) -> None:
    parser.add_argument("ident", metavar="IDENT", help="the node that calls")
    parser.add_argument("node", metavar="NODE", help="the node to call")
    parser.add_argument("body", metavar="BODY", help="the body of the call; - reads standard input")
    parser.add_argument("--json", action="store_true", help="BODY is JSON")
    parser.add_argument(
        "--timeout",
        type=duration,
        default=DEFAULT_CALL_TIMEOUT,
        help="seconds to wait (default: 5)",
    )


def _call(arguments: Namespace) -> int:
    """Call a node and print its answer; fail if no answer arrives in time."""
    text = sys.stdin.read() if arguments.body == "-" else arguments.body
    body = parse_body(text) if arguments.json else text
    with Node(arguments.ident, arguments.dsn) as node:
        answer = node.call(arguments.node, body, timeout=arguments.timeout)
    if isinstance(answer, bytes):
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
    else:
        print(format_body(answer))
    return 0


CALL = CliCommand("call", "call a node (RPC) and print its answer", _configure_call, _call)
