"""Command stream: publish to a stream, print the messages of a subscription."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from itertools import islice

import psycopg

from psqlmessages.cli.direct_calls import connect_as, run_call
from psqlmessages.cli.messaging import body_fields, format_message
from psqlmessages.cli.output import (
    CliCommand,
    Progress,
    add_bodies,
    add_json,
    duration,
    positive,
    read_bodies,
    run_subcommand,
    subcommands,
)
from psqlmessages.client import stream_calls
from psqlmessages.client.node import Node
from psqlmessages.client.stream_calls import StreamMessage
from psqlmessages.client.subscription import Subscription
from psqlmessages.exceptions import MessagesError


def _configure(parser: ArgumentParser) -> None:
    add = subcommands(parser)
    publish = add(
        "publish",
        _publish,
        "store messages for the subscriptions of a topic, and send them to its listeners",
    )
    _add_node_and_topic(publish, "the node that publishes; it need not be connected")
    add_bodies(publish, "publish")
    subscribe = add(
        "subscribe",
        _subscribe,
        "print the unread messages of a subscription, then new ones, until Ctrl-C",
    )
    _add_node_and_topic(subscribe, "the node that subscribes")
    subscribe.add_argument(
        "timeout",
        metavar="TIMEOUT",
        type=duration,
        help="seconds that the subscription stays alive after this program ends",
    )
    add_json(subscribe, per_line=True)
    subscribe.add_argument("--count", type=positive, help="stop after this number of messages")
    subscribe.add_argument(
        "--idle", type=duration, help="stop after this many seconds without a message"
    )


def _add_node_and_topic(parser: ArgumentParser, help_: str) -> None:
    parser.add_argument("node", metavar="NODE", help=help_)
    parser.add_argument("topic", metavar="TOPIC")


def _publish(arguments: Namespace) -> int:
    bodies = read_bodies(arguments)
    with connect_as(arguments.dsn, arguments.node) as connection, Progress("published") as progress:
        while batch := list(islice(bodies, arguments.batch)):
            run_call(connection, stream_calls.publish_many(arguments.node, arguments.topic, batch))
            progress.add(len(batch))
    return 0


def _subscribe(arguments: Namespace) -> int:
    with (
        Node(arguments.node, arguments.dsn) as node,
        Progress("received", arguments.count) as progress,
    ):
        subscription = node.subscribe(arguments.topic, arguments.timeout, idle=arguments.idle)
        try:
            progress.say(f"{arguments.node} reads {arguments.topic}; press Ctrl-C to stop")
            _print_all(subscription, node, arguments, progress)
        except KeyboardInterrupt:
            # Ctrl-C is the normal end, even before --count messages.
            return 0
    return 1 if progress.count < (arguments.count or 0) else 0


def _print_all(
    subscription: Subscription, node: Node, arguments: Namespace, progress: Progress
) -> None:
    """Print and acknowledge messages. Each request acknowledges the messages before it."""
    last_printed: StreamMessage | None = None
    try:
        for message in subscription:
            progress.add()
            progress.say(_format(message, arguments), sys.stdout)
            last_printed = message
            if progress.count == arguments.count:
                return
    finally:
        # No later request acknowledges the last message, so acknowledge it here.
        if last_printed is not None and not node.is_healthy:
            progress.say("the connection is lost: the last messages will be delivered again")
        elif last_printed is not None:
            try:
                subscription.confirm(last_printed)
            except (MessagesError, psycopg.Error) as error:
                progress.say(f"the last messages will be delivered again: {error}")


def _format(message: StreamMessage, arguments: Namespace) -> str:
    if not arguments.json:
        return format_message(message)
    fields = {
        "id": message.id,
        "topic": message.topic,
        "sender": message.sender,
        "published_at": message.published_at.isoformat(),
    }
    return json.dumps(fields | body_fields(message))


COMMAND = CliCommand(
    "stream",
    "publish to a stream, or print the messages of a subscription",
    _configure,
    run_subcommand,
)
