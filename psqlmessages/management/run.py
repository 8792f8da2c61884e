"""Command run: call the project's handlers for the messages of a node."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from datetime import timedelta

from psqlmessages.cli.output import CliCommand, Progress, fail, positive
from psqlmessages.conf import get_settings
from psqlmessages.django import node
from psqlmessages.handler_registry import registry
from psqlmessages.handler_worker import HandlerWorker
from psqlmessages.monitor.minute_writer import start_history_writer
from psqlmessages.shutdown import stop_on_signals


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="the node that receives")
    parser.add_argument(
        "--concurrency",
        type=positive,
        help="number of messages handled at the same time; 1 preserves their order (default: the"
        " setting HANDLER_CONCURRENCY, which is 1 by default)",
    )


def run(arguments: Namespace) -> int:
    """Handle messages until SIGINT or SIGTERM, then finish the current messages."""
    ident = arguments.node
    handlers = registry.list_handlers(ident)
    if not handlers:
        return fail(
            f"there is no handler for {ident}: add one with @on_topic or @on_rpc to"
            " message_handlers.py of an app in INSTALLED_APPS"
        )
    with node(ident, using=arguments.database) as receiver, Progress("handled") as progress:
        worker = HandlerWorker(
            receiver,
            registry,
            using=arguments.database,
            concurrency=arguments.concurrency or get_settings().HANDLER_CONCURRENCY,
            stuck_after=timedelta(seconds=get_settings().HANDLER_SECONDS),
        )
        with stop_on_signals(worker.stop, "messages", get_settings().STOP_SECONDS):
            topics = ", ".join(worker.listen()) or "no topic"
            progress.say(
                f"{ident} has {len(handlers)} handlers, listens to {topics}; press Ctrl-C to stop"
            )
            start_history_writer()
            worker.run(lambda: progress.update(worker.counters.handled))
        counters = worker.counters
        progress.count = counters.handled
        progress.say(
            f"stopped. Handler calls: {counters.failures:,} failed, {counters.stuck:,} took too"
            f" long, {counters.dropped:,} dropped because of the stop. Messages:"
            f" {counters.given_up:,} given up, {counters.unhandled:,} without a handler. Answers"
            f" that could not be sent: {counters.unanswered:,}"
        )
    return 0


COMMAND = CliCommand(
    "run", "receive as a node and call the handlers of the project, until Ctrl-C", _configure, run
)
