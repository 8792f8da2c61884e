"""Command pipeline traffic: counts, sizes and latencies by topic, sender and window."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import closing
from time import monotonic
from typing import Final

from django.db import InterfaceError, OperationalError

from psqlmessages import traffic_windows
from psqlmessages.cli.output import CliCommand, duration, positive
from psqlmessages.management.pipeline import JobContext, add_streaming_arguments, split_names
from psqlmessages.pipeline import offsets
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.job_runner import JobProgress

CHECKPOINT: Final = ".pipeline/traffic"

_PRUNE_SECONDS: Final = 10 * 60


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--topic",
        dest="topics",
        metavar="NAMES",
        default="*",
        help="topics and patterns, separated by commas (default: all topics that may be read)",
    )
    parser.add_argument(
        "--lateness",
        metavar="SECONDS",
        type=duration,
        default="600",
        help="maximum duration of a transaction that publishes (default: 600). Messages of longer"
        " transactions may not be counted; the job then prints a warning",
    )
    parser.add_argument(
        "--rows",
        type=positive,
        default=100_000,
        help="maximum number of rows per batch (default: 100,000)",
    )
    parser.add_argument(
        "--allow-gaps",
        action="store_true",
        help="if messages were removed before they were read, print a warning instead of failing",
    )
    add_streaming_arguments(parser, CHECKPOINT)


def run(arguments: Namespace) -> int:
    """Count until Ctrl-C, or with --once until all messages that exist now are counted."""
    from psqlmessages.pipeline import traffic

    with JobContext(COMMAND.name, arguments) as context:
        _print_topics(context, traffic.IDENT)
        table = traffic.TrafficTable()
        query = traffic.start(
            context.spark,
            table.write,
            topics=arguments.topics,
            checkpoint=arguments.checkpoint,
            trigger=context.trigger,
            lateness=arguments.lateness,
            options={
                "maxRowsPerTrigger": str(arguments.rows),
                "failOnDataLoss": str(not arguments.allow_gaps).lower(),
            },
        )
        lag = offsets.Lag(query, traffic.IDENT, split_names(arguments.topics))
        try:
            context.follow(query, lag, record=_make_recorder(context))
        finally:
            table.close()
            lag.close()
    return 0


def _make_recorder(context: JobContext) -> Callable[[JobProgress], None]:
    """Return a function that records progress and, every 10 minutes, removes old windows."""
    pruned_at = monotonic()

    def record(progress: JobProgress) -> None:
        nonlocal pruned_at
        context.record(progress)
        if monotonic() - pruned_at < _PRUNE_SECONDS:
            return
        pruned_at = monotonic()
        try:
            traffic_windows.prune(context.arguments.database)
        except (OperationalError, InterfaceError) as error:
            context.say(f"could not remove old windows, trying again in 10 minutes: {error}")

    return record


def _print_topics(context: JobContext, ident: str) -> None:
    """Print the number of topics. Fails before Spark starts if a topic may not be read."""
    arguments = context.arguments
    with closing(Database({})) as database:
        names = split_names(arguments.topics)
        topics = offsets.read_watermarks(database, ident, names).topics
    number = f"{len(topics):,} topic{'' if len(topics) == 1 else 's'}"
    context.say(f"reading {number} as {ident}, checkpoint {arguments.checkpoint}")
    if not topics:
        context.say(
            f"there is no topic that {ident} may read. To allow all topics: python"
            f" manage.py psqlmessages --database {arguments.database} allow 'pipeline.*' R Topic"
            " '*'"
        )


COMMAND = CliCommand(
    "traffic",
    "count published messages by topic, sender and time window, until Ctrl-C",
    _configure,
    run,
)
