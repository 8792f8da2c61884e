"""Command pipeline report: a period as one HTML page."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from psqlmessages.cli.output import one_line
from psqlmessages.management import report_traffic
from psqlmessages.management.pipeline import JobContext
from psqlmessages.pipeline.report import contents, html

if TYPE_CHECKING:
    from psqlmessages.pipeline.report.contents import Period, ReportFigures

NAME = "report"
HELP = "write one HTML page with charts of a period: rates, sizes, latencies, senders, exchanges"

_SIGN_SECONDS: Final = 2.0


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--from",
        dest="begin",
        metavar="TIME",
        default="24h",
        help="2026-11-21T12:00 (UTC without a zone), or how long ago: 30m, 24h, 7d (default: 24h)",
    )
    parser.add_argument(
        "--to", dest="end", metavar="TIME", default="0s", help="same format (default: now)"
    )
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="the file, for example report.html"
    )
    parser.add_argument(
        "--topic",
        metavar="NAMES",
        default="*",
        help="names and patterns, separated by commas (default: *)",
    )
    parser.add_argument(
        "--of",
        choices=("traffic", "messages"),
        help="what to count: the windows of the job traffic (fast, with latencies), or the"
        " messages, with Spark (default: traffic, or messages if there are no windows)",
    )
    parser.add_argument(
        "--archive", metavar="DIR", help="also count the messages in this archive, with Spark"
    )


def run(arguments: Namespace) -> int:
    """Write the page, and print its path."""
    now = datetime.now(UTC)
    period = contents.Period(
        contents.moment(arguments.begin, now), contents.moment(arguments.end, now)
    )
    if period.begin >= period.end:
        raise ValueError(f"--from {arguments.begin} is not before --to {arguments.end}")
    figures = _figures(arguments, period)
    page = html.page(
        contents.Report(
            database=report_traffic.database(arguments.database),
            period=period,
            made_at=now,
            figures=figures,
            flows=report_traffic.flows(arguments.database),
        )
    )
    _write(Path(arguments.out), page)
    count = figures.total.count if figures.total else 0
    print(f"{count:,} messages, {figures.source}", file=sys.stderr)
    print(one_line(arguments.out))
    return 0


def _figures(arguments: Namespace, period: Period) -> ReportFigures:
    if arguments.of != "messages" and not arguments.archive:
        found = report_traffic.figures(period, arguments.topic, arguments.database)
        if found is not None:
            return found
        if arguments.of == "traffic":
            raise ValueError("no traffic windows in this period: the job traffic did not run")
    return _of_messages(arguments, period)


def _of_messages(arguments: Namespace, period: Period) -> ReportFigures:
    from psqlmessages.pipeline import job_runner

    with JobContext(NAME, arguments) as context, ThreadPoolExecutor(1) as executor:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from psqlmessages.pipeline.report import compute

        context.say("reading the messages with Spark")
        computing = executor.submit(
            compute.figures,
            context.spark,
            period,
            topics=arguments.topic,
            archive=arguments.archive,
        )
        while True:
            context.record(job_runner.JobProgress(job_runner.RUNNING))
            try:
                found = computing.result(_SIGN_SECONDS)
            except NotYet:
                continue
            except (Py4JError, PySparkException) as error:
                failed = job_runner.sentence(error)
                context.record(job_runner.JobProgress(job_runner.FAILED, error=failed))
                raise job_runner.JobFailed(failed) from error
            rows = found.total.count if found.total else 0
            context.record(job_runner.JobProgress(job_runner.STOPPED, rows=rows))
            return found


def _write(target: Path, page: str) -> None:
    """Replace the page only when it is complete."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
