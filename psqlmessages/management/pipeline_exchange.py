"""pipeline exchange: run an exchange on Spark, with all the cores of a cluster."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace

from django.db import DEFAULT_DB_ALIAS

from psqlmessages.commands.arguments import positive
from psqlmessages.commands.output import one_line
from psqlmessages.conf import get_settings
from psqlmessages.databases import dsn
from psqlmessages.management.pipeline import Stage
from psqlmessages.management.pipeline_exchange_clerk import Clerk, exists
from psqlmessages.management.pipeline_exchange_office import Office

NAME = "exchange"
HELP = "run an exchange on Spark; until Ctrl-C"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", metavar="NAME", help="the exchange")
    parser.add_argument(
        "--tasks",
        type=positive,
        help="how many run side by side, each as a process of exchange run (default: all cores)",
    )
    parser.add_argument(
        "--span",
        metavar="SECONDS",
        type=positive,
        default=5,
        help="how long a batch lasts at most, and so how late changes are taken up (default: 5)",
    )
    parser.add_argument(
        "--module",
        metavar="MODULE",
        action="append",
        default=[],
        help="imported on executors, for the selectors in code that it has; as often as needed",
    )
    parser.add_argument("--once", action="store_true", help="end when there is nothing to take")


def run(arguments: Namespace) -> int:
    """Run it until Ctrl-C, with --once until nothing is left, or until it is removed."""
    name = arguments.name
    if not exists(name, arguments.database):
        print(f"psqlmessages: there is no exchange {one_line(name)}", file=sys.stderr)
        return 1
    with Stage(f"exchange {name}", arguments) as stage:
        # Namespaces are aliases of DATABASES, whichever of these holds the definitions.
        os.environ["PSQLMESSAGES_DSN"] = dsn(DEFAULT_DB_ALIAS)
        _follow(stage)
    return 0


def _follow(stage: Stage) -> None:
    from psqlmessages.pipeline import jobs
    from psqlmessages.pipeline.exchange import SparkExchanges

    arguments = stage.arguments
    clerk = Clerk(arguments.name, arguments.database)
    exchanges = SparkExchanges(
        stage.spark,
        clerk.count,
        tasks=arguments.tasks,
        span=arguments.span,
        modules=arguments.module,
    )
    office = Office(arguments.name, clerk, exchanges, stage.say)
    office.look()
    query = exchanges.start(once=arguments.once)
    office.start()
    try:
        jobs.follow(
            query,
            stage.record,
            clerk.lag,
            stage.say,
            rows=lambda batch: clerk.elements(int(batch.batchId)),
            stop_seconds=get_settings().STOP_SECONDS,
        )
    finally:
        office.close()
    stage.say(f"stopped: {clerk.summary()}")
