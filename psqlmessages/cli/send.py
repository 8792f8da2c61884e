"""Command send: send to a topic and print the rate."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice, repeat
from time import monotonic

from psqlmessages.cli.output import Progress, add_batch, lines_of_input, natural, seconds
from psqlmessages.client.node import Node

NAME = "send"
HELP = "send to a topic and show the rate"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
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
        "--interval", type=seconds, default=timedelta(0), help="seconds between two sends"
    )
    add_batch(parser)


def run(arguments: Namespace) -> int:
    """Send all bodies; listen during the intervals, so that crashes are noticed."""
    total = 1 if arguments.count is None and arguments.body != "-" else arguments.count
    bodies = islice(_bodies(arguments), total)
    with Node(arguments.ident, arguments.dsn) as node, Progress("sent", total) as progress:
        node.topic_notify(arguments.topic)
        while batch := list(islice(bodies, arguments.batch)):
            if arguments.batch == 1:
                node.topic_send(arguments.topic, batch[0])
            else:
                node.topic_send_many(arguments.topic, batch)
            progress.add(len(batch))
            if arguments.interval and progress.count != total:
                _pause(node, arguments.interval)
    return 0


def _bodies(arguments: Namespace) -> Iterator[str]:
    if arguments.body == "-":
        return lines_of_input()
    return repeat(arguments.body if arguments.body is not None else "x" * arguments.size)


def _pause(node: Node, interval: timedelta) -> None:
    deadline = monotonic() + interval.total_seconds()
    while (left := deadline - monotonic()) > 0:
        next(node.messages(timeout=timedelta(seconds=left)), None)
