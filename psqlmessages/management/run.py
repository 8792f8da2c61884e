"""run: hand messages to the handlers of the project."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from psqlmessages.commands.arguments import positive
from psqlmessages.commands.output import Progress
from psqlmessages.django import node
from psqlmessages.handlers import registry
from psqlmessages.runner import Runner

NAME = "run"
HELP = "receive as a node, and hand messages to the handlers of the project; until Ctrl-C"

_STOPPING = b"ends after the messages at hand; once more ends it at once\n"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("node", metavar="NODE", help="the node that receives")
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=1,
        help="how many messages are handled at once (default: 1, which keeps their order)",
    )


def run(arguments: Namespace) -> int:
    """Handle until SIGINT or SIGTERM, which are its usual end: the messages at hand are ended."""
    ident = arguments.node
    handlers = registry.of(ident)
    if not handlers:
        print(
            f"psqlmessages: no handler is for {ident}: write some with @on_topic or @on_rpc in"
            " message_handlers.py of an app that is in INSTALLED_APPS",
            file=sys.stderr,
        )
        return 1
    with node(ident, using=arguments.database) as own, Progress("handled") as progress:
        runner = Runner(own, registry, using=arguments.database, concurrency=arguments.concurrency)

        def show() -> None:
            # A process that has nothing to do says nothing.
            if progress.count != runner.tally.handled:
                progress.count = runner.tally.handled
                progress.show()

        with _stopped_by_signals(runner):
            topics = ", ".join(runner.listen()) or "no topic"
            progress.say(
                f"{ident} has {len(handlers)} handlers, listens to {topics}; Ctrl-C ends it"
            )
            runner.run(show)
        progress.count = runner.tally.handled
        progress.say(_summary(runner))
    return 0


@contextmanager
def _stopped_by_signals(runner: Runner) -> Iterator[None]:
    """Stop at the first signal; a second one ends the process, whatever its threads do."""

    def stop(number: int, _: object) -> None:
        if runner.is_stopping:
            os._exit(128 + number)
        runner.stop()
        # Not print: the signal may have come amid another print.
        os.write(sys.stderr.fileno(), _STOPPING)

    previous = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _summary(runner: Runner) -> str:
    tally = runner.tally
    return (
        f"stopped: {tally.failures:,} failures, {tally.given_up:,} given up,"
        f" {tally.unhandled:,} without a handler, {tally.dropped:,} not begun"
    )
