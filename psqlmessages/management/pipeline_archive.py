"""pipeline archive: topics into Parquet files, and back; what is marked; is it all there."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from psqlmessages import archiving
from psqlmessages.commands.output import one_line
from psqlmessages.conf import get_settings
from psqlmessages.management import pipeline, pipeline_archive_work

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from psqlmessages.pipeline.archive_job import ArchiveJob

NAME = "archive"
HELP = "archive topics as Parquet files, exactly once; verify, replay or compact an archive"

_IN_ARCHIVE = "_checkpoint in --to"
_WAIT_SECONDS = 2.0


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    _add_folder(parser, required=False)
    parser.add_argument(
        "--topic",
        metavar="NAMES",
        help="names and patterns with commas between; they are marked (default: what is marked)",
    )
    parser.add_argument(
        "--allow-gaps",
        action="store_true",
        help="go on where messages are gone that were not archived, instead of failing",
    )
    # Each batch makes files, which are to be few.
    pipeline.add_streaming(parser, _IN_ARCHIVE, "10 seconds")
    parser.set_defaults(act=_archive)
    actions = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, act: Callable[[Namespace], int], help_: str) -> ArgumentParser:
        own: ArgumentParser = actions.add_parser(name, help=help_, description=help_)
        own.set_defaults(act=act)
        return own

    pipeline_archive_work.configure(add, _add_folder)
    for name, act, help_ in (
        ("mark", _mark, "keep a topic's messages until they are archived"),
        ("unmark", _unmark, "keep a topic's messages for the archive no more"),
    ):
        add(name, act, help_).add_argument("topic", metavar="TOPIC", help="its name")
    add("marks", _marks, "print the marked topics")


def run(arguments: Namespace) -> int:
    """Do one of them."""
    code: int = arguments.act(arguments)
    return code


def _add_folder(parser: ArgumentParser, *, required: bool = True) -> None:
    # What stands before the command's name counts for it as well.
    parser.add_argument(
        "--to",
        metavar="DIR",
        default=None if not required else SUPPRESS,
        help="the archive: a folder, or an address that Hadoop knows (hdfs://…, s3a://…)",
    )


def _archive(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive_job import ArchiveJob

    root = pipeline_archive_work.folder(arguments)
    names = tuple(name for name in (arguments.topic or "").split(",") if name)
    with pipeline.Stage(NAME, arguments) as stage:
        job = ArchiveJob(stage.spark, root, names, allows_gaps=arguments.allow_gaps)
        try:
            while _followed(stage, job):
                stage.say("other topics are marked now")
        finally:
            job.close()
    return 0


def _followed(stage: pipeline.Stage, job: ArchiveJob) -> bool:
    """Follow one query; whether it ended because other topics are marked."""
    from psqlmessages.pipeline import archive_job, jobs
    from psqlmessages.pipeline.lag import Lag

    topics = job.topics()
    if not topics:
        return _waited(stage, job)
    job.prepare(topics)
    stage.say(f"archives {one_line(', '.join(topics))} to {job.archive.log.folder.root}")
    query = job.started(topics, _checkpoint(stage, job), stage.trigger)
    lag = Lag(query, archive_job.READER, topics)
    try:
        with job.ended_by_change(query, topics) as is_changed:
            jobs.follow(
                query, stage.record, lag, stage.say, stop_seconds=get_settings().STOP_SECONDS
            )
            return is_changed()
    finally:
        lag.close()
        _stop(query)


def _stop(query: StreamingQuery) -> None:
    if query.isActive:
        query.stop()


def _waited(stage: pipeline.Stage, job: ArchiveJob) -> bool:
    from psqlmessages.pipeline import jobs

    if stage.arguments.once:
        stage.say("no topic is marked: manage.py psqlmessages pipeline archive mark TOPIC")
        stage.record(jobs.Progress(jobs.STOPPED))
        return False
    stage.say("no topic is marked: waits until one is")
    job.wait_for_marks(lambda: stage.record(jobs.Progress(jobs.RUNNING)))
    return True


def _checkpoint(stage: pipeline.Stage, job: ArchiveJob) -> str:
    if stage.arguments.checkpoint == _IN_ARCHIVE:
        return job.archive.log.folder.address("_checkpoint")
    checkpoint: str = stage.arguments.checkpoint
    return checkpoint


def _mark(arguments: Namespace) -> int:
    is_new = archiving.mark(arguments.topic, arguments.database)
    print(f"{one_line(arguments.topic)} is marked{'' if is_new else ', as it was'}")
    return 0


def _unmark(arguments: Namespace) -> int:
    was = archiving.unmark(arguments.topic, arguments.database)
    print(f"{one_line(arguments.topic)} is not marked{'' if not was else ' any more'}")
    return 0


def _marks(arguments: Namespace) -> int:
    for topic in archiving.marked(arguments.database):
        sys.stdout.write(f"{one_line(topic)}\n")
    return 0
