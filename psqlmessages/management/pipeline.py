"""Command pipeline: the Spark jobs and their common options."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Self

from django.db import InterfaceError, OperationalError, connections
from django.db.models.functions import Now

from psqlmessages.cli.output import CliCommand, fail
from psqlmessages.conf import get_settings
from psqlmessages.models import PipelineJob
from psqlmessages.orm import direct_dsn
from psqlmessages.pipeline.database import DSN_VARIABLE, dsn_variable
from psqlmessages.pipeline.job_runner import JobFailed, JobProgress, JobRunner, cause_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_JOBS: Final = ("traffic", "archive", "exchange", "report")
_INTERVAL: Final = re.compile(r"\d+(\.\d+)? ?(ms|millisecond|second|minute|hour)s?")


def _configure(parser: ArgumentParser) -> None:
    job_parsers = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for job_name in _JOBS:
        # Imported here, because the modules of the jobs import this module.
        job = import_module(f"psqlmessages.management.pipeline_{job_name}").COMMAND
        job_parser = job_parsers.add_parser(job.name, help=job.help, description=job.help)
        job_parser.add_argument(
            "--master", help="master URL of Spark (default: the one of spark-submit, else local[*])"
        )
        job_parser.add_argument(
            "--conf",
            metavar="KEY=VALUE",
            type=_parse_key_and_value,
            action="append",
            default=[],
            help="setting of Spark; repeatable",
        )
        job.configure(job_parser)
        job_parser.set_defaults(job=job.run)


def add_streaming_arguments(
    parser: ArgumentParser, checkpoint: str, trigger: str = "1 second"
) -> None:
    """Add the arguments of a streaming job; ``checkpoint`` and ``trigger`` are default values."""
    parser.add_argument(
        "--trigger",
        type=_parse_interval,
        default=trigger,
        help=f"how often to look for new rows (default: {trigger}; 0 seconds: continuously)",
    )
    parser.add_argument(
        "--once", action="store_true", help="read the messages that exist now, then stop"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        default=checkpoint,
        help=f"folder in which Spark stores the progress of the job (default: {checkpoint})",
    )


def split_names(text: str) -> list[str]:
    """Split a text at commas; strip spaces around the names, and omit empty names."""
    return [name for part in text.split(",") if (name := part.strip())]


def run(arguments: Namespace) -> int:
    """Run the chosen job; raise JobFailed after an error of Spark."""
    if find_spec("pyspark") is None:
        return fail("a pipeline needs Spark: pip install 'psqlmessages[pipeline]'")
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return arguments.job(arguments)
    except (PySparkException, Py4JError) as error:
        raise JobFailed(cause_line(error)) from error


class JobContext:
    """Context manager of a job: its Spark session, and its row in the table of jobs.

    At the end it stops the session, and records the error or the Ctrl-C that ended the job.
    """

    def __init__(self, name: str, arguments: Namespace) -> None:
        self.name = name
        self.arguments = arguments
        self._using: str = arguments.database
        self._last_batch = -1
        self._is_unreachable = False

    def __enter__(self) -> Self:
        # Spark's processes read the addresses of the databases from the environment.
        for alias in connections:
            if connections[alias].vendor == "postgresql":
                os.environ[dsn_variable(alias)] = direct_dsn(alias)
        os.environ[DSN_VARIABLE] = direct_dsn(self._using)
        # Reset all fields of an existing row to their defaults.
        PipelineJob.objects.using(self._using).bulk_create(
            [PipelineJob(name=self.name, state=PipelineJob.State.STARTING)],
            update_conflicts=True,
            unique_fields=["name"],
            update_fields=[
                field.name for field in PipelineJob._meta.fields if field.name not in ("id", "name")
            ],
        )
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # The job runner has recorded a JobFailed already.
        if isinstance(error, Exception) and not isinstance(error, JobFailed):
            self._update(state=PipelineJob.State.FAILED, error=cause_line(error))
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self._update(state=PipelineJob.State.STOPPED)
        if "spark" in self.__dict__:
            from py4j.protocol import Py4JError

            # If the Java process has ended, there is nothing to stop.
            with suppress(Py4JError, OSError):
                self.spark.stop()

    @cached_property
    def spark(self) -> SparkSession:
        """Spark session with the given --master and our data source, started on first access."""
        from psqlmessages.pipeline import register, session

        name, arguments = f"psqlmessages {self.name}", self.arguments
        return register(session(name, arguments.master, **dict(arguments.conf)))

    @property
    def trigger(self) -> dict[str, Any]:
        """Arguments of ``writeStream.trigger``, from --once and --trigger."""
        if self.arguments.once:
            return {"availableNow": True}
        return {"processingTime": self.arguments.trigger}

    def follow(self, query: StreamingQuery, lag: Callable[[], float | None], **others: Any) -> None:
        """Follow a query with a JobRunner until the query ends; ``others``: fields of JobRunner."""
        fields = {"record": self.record, "print_line": self.say, **others}
        JobRunner(query, lag=lag, **fields).run(get_settings().STOP_SECONDS)

    def say(self, text: str) -> None:
        """Print a line to standard error; standard output is for results."""
        print(text, file=sys.stderr, flush=True)

    def record(self, progress: JobProgress) -> None:
        """Write the progress of the job, or print why it cannot be written (once per outage)."""
        fields = asdict(progress)
        batch = fields.pop("batch")
        if batch > self._last_batch:
            self._last_batch = batch
            fields |= {"last_batch": batch, "last_batch_at": Now()}
        self._update(**fields)

    def _update(self, **fields: Any) -> None:
        rows = PipelineJob.objects.using(self._using).filter(name=self.name)
        try:
            rows.update(seen_at=Now(), **fields)
        except (OperationalError, InterfaceError) as error:
            connections[self._using].close()
            if not self._is_unreachable:
                self.say(f"could not write the job's progress: {cause_line(error)}")
            self._is_unreachable = True
        else:
            self._is_unreachable = False


def _parse_key_and_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"not KEY=VALUE: {text!r}")
    return key, value


def _parse_interval(text: str) -> str:
    if not _INTERVAL.fullmatch(text):
        raise ArgumentTypeError(f"not a duration such as '1 second': {text!r}")
    return text


COMMAND = CliCommand(
    "pipeline", "run a job of the data pipeline on Spark, until Ctrl-C", _configure, run
)
