"""Command status: topics, senders, listeners, usage of the notification queue."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import NamedTuple

from psqlmessages.cli.direct_calls import Connection, connect_as
from psqlmessages.cli.doctor_checks import QUEUE_USAGE_QUERY
from psqlmessages.cli.output import CliCommand, add_json, fail, format_table, one_line


class TopicRow(NamedTuple):
    """A topic that the role may use, with its senders and listeners."""

    topic: str
    notifiers: list[str]
    listeners: list[str]


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help="show only this topic")
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Print topics and the usage of the notification queue; fail if TOPIC is not listed."""
    with connect_as(arguments.dsn, "status") as connection:
        topics = read_topics(connection, arguments.topic)
        usage = read_queue_usage(connection)
    if arguments.topic is not None and not topics:
        return fail(f"there is no topic {arguments.topic}, or no rule lets this role use it")
    if arguments.json:
        rows = [row._asdict() for row in topics]
        print(json.dumps({"topics": rows, "queue_usage": usage}, ensure_ascii=False))
    else:
        print(format_status(topics, usage))
    return 0


def read_topics(connection: Connection, topic: str | None = None) -> list[TopicRow]:
    """Read the topics that the role may use, ordered by name."""
    rows = connection.execute(
        "SELECT topic, notifiers, listeners FROM messages.topics"
        " WHERE %(topic)s::text IS NULL OR topic = %(topic)s ORDER BY topic",
        {"topic": topic},
    )
    return [TopicRow._make(row) for row in rows]


def read_queue_usage(connection: Connection) -> float:
    """Return the used fraction of the server's notification queue, from 0 to 1."""
    return float(connection.execute(QUEUE_USAGE_QUERY).fetchall()[0][0])


def format_status(topics: list[TopicRow], usage: float) -> str:
    """Format the status for people."""
    rows = [(one_line(row.topic), _join(row.notifiers), _join(row.listeners)) for row in topics]
    listing = format_table(["topic", "senders", "listeners"], rows) if rows else "no topics"
    return f"{listing}\n\nnotification queue: {usage:.2%} full"


def _join(idents: list[str]) -> str:
    return one_line(", ".join(idents)) or "-"


COMMAND = CliCommand(
    "status",
    "show topics with senders and listeners, and the usage of the notification queue",
    _configure,
    run,
)
