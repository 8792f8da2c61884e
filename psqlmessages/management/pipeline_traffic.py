"""Command pipeline traffic: counts, sizes and latencies by topic, sender and window."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING, Final

from django.db import InterfaceError, OperationalError

from psqlmessages.cli.output import positive, seconds
from psqlmessages.conf import get_settings
from psqlmessages.management.pipeline import JobContext, add_streaming
from psqlmessages.traffic_retention import prune

if TYPE_CHECKING:
    from psqlmessages.pipeline.job_runner import JobProgress

NAME = "traffic"
HELP = "count what is published, by topic, sender and window of time; until Ctrl-C"

CHECKPOINT: Final = ".pipeline/traffic"

_PRUNE_SECONDS: Final = 10 * 60
_RULE: Final = (
    "a rule for all topics: INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
    " VALUES (current_user, 'pipeline.*', 'Topic', '*', 'R', 10)"
)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--topic",
        metavar="NAMES",
        default="*",
        help="names and patterns, with commas between (default: all that may be read)",
    )
    parser.add_argument(
        "--lateness",
        metavar="SECONDS",
        type=seconds,
        default="600",
        help="how long a transaction that publishes may last: what is committed later than that"
        " after other messages is left out, which is said (default: 600)",
    )
    parser.add_argument(
        "--rows", type=positive, default=100_000, help="the most of one batch (default: 100,000)"
    )
    parser.add_argument(
        "--allow-gaps",
        action="store_true",
        help="go on where messages were removed before they were read, and say so"
        " (failOnDataLoss=false)",
    )
    add_streaming(parser, CHECKPOINT)


def run(arguments: Namespace) -> int:
    """Count until Ctrl-C, or with --once until all present messages are counted."""
    from psqlmessages.pipeline import job_runner, traffic
    from psqlmessages.pipeline.offsets import Lag
    from psqlmessages.pipeline.traffic import TrafficTable

    with JobContext(NAME, arguments) as context:
        _look(context)
        table = TrafficTable()
        query = traffic.start(
            context.spark,
            table.write,
            topics=arguments.topic,
            checkpoint=arguments.checkpoint,
            trigger=context.trigger,
            lateness=arguments.lateness,
            options={
                "maxRowsPerTrigger": str(arguments.rows),
                "failOnDataLoss": str(not arguments.allow_gaps).lower(),
            },
        )
        lag = Lag(query, traffic.CLIENT, _names(arguments))
        try:
            job_runner.follow(
                query,
                _recorder(context),
                lag,
                context.say,
                stop_seconds=get_settings().STOP_SECONDS,
            )
        finally:
            table.close()
            lag.close()
    return 0


def _recorder(context: JobContext) -> Callable[[JobProgress], None]:
    """Return a function that records progress, and prunes old windows every 10 minutes."""
    pruned_at = monotonic()

    def record(progress: JobProgress) -> None:
        nonlocal pruned_at
        context.record(progress)
        if monotonic() - pruned_at < _PRUNE_SECONDS:
            return
        pruned_at = monotonic()
        try:
            prune(context.arguments.database)
        except (OperationalError, InterfaceError) as error:
            context.say(f"old windows stay for now: {error}")

    return record


def _names(arguments: Namespace) -> list[str]:
    return [name.strip() for name in arguments.topic.split(",")]


def _look(context: JobContext) -> None:
    """Print which topics are read; raise before Spark starts if they may not be read."""
    from psqlmessages.pipeline import offsets, traffic
    from psqlmessages.pipeline.database import Database

    arguments = context.arguments
    with closing(Database({})) as database:
        found = offsets.ask(database, traffic.CLIENT, _names(arguments)).topics
    topics = f"{len(found):,} topic{'s'[: len(found) != 1]}"
    context.say(f"reads {topics} as {traffic.CLIENT}, checkpoint {arguments.checkpoint}")
    if not found:
        context.say(f"none is there that a rule lets {traffic.CLIENT} read; {_RULE}")
