"""Command pipeline archive: archive topics to Parquet, verify, replay."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import uuid4

from psqlmessages import archive_marks
from psqlmessages.cli.output import (
    CliCommand,
    one_line,
    run_subcommand,
    subcommands,
    time_with_zone,
)
from psqlmessages.management import pipeline
from psqlmessages.pipeline.job_runner import RUNNING, STOPPED, JobProgress
from psqlmessages.pipeline.offsets import Lag
from psqlmessages.wire import MAX_ID, parse_number

if TYPE_CHECKING:
    from psqlmessages.pipeline.archive.archive_job import ArchiveJob
    from psqlmessages.pipeline.archive.store import Archive
    from psqlmessages.pipeline.archive.verify import Comparison


def _archive_folder(arguments: Namespace) -> str:
    """Return --to; raise ValueError if it is missing."""
    if not arguments.to:
        raise ValueError("the folder of the archive is missing: add --to DIR")
    return arguments.to


@contextmanager
def _open_archive(name: str, arguments: Namespace) -> Iterator[tuple[pipeline.JobContext, Archive]]:
    """Open the archive in a job with the name ``archive NAME``."""
    from psqlmessages.pipeline.archive.store import Archive

    root = _archive_folder(arguments)
    with pipeline.JobContext(f"archive {name}", arguments) as context:
        yield context, Archive.open(context.spark, root)
        context.record(JobProgress(STOPPED))


def _compact(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive import store

    total = 0
    with _open_archive("compact", arguments) as (context, archive):
        for small_files, number in store.compact_all(archive):
            total += number
            conflict = "changed by another process at the same time"
            result = f"{number} fewer files" if number else conflict
            context.say(f"{one_line(small_files[0].topic)} {small_files[0].date}: {result}")
        context.say(f"{total} fewer files, {len(archive.log.files)} left")
    return 0


def _verify(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive import verify as verify_module

    comparisons = []
    with _open_archive("verify", arguments) as (_, archive):
        names = pipeline.split_names(arguments.topics or "") or None
        for comparison in verify_module.verify(archive, names):
            comparisons.append(comparison)
            print(_describe(comparison))
        if not comparisons:
            print("no message is both archived and still in the stream: nothing to compare")
    return 0 if all(each.is_equal for each in comparisons) else 1


def _describe(comparison: Comparison) -> str:
    head = f"{one_line(comparison.topic)}, ids {comparison.low + 1} to {comparison.high}"
    stored, archived = comparison.stored, comparison.archived
    if comparison.is_equal:
        return f"{head}: equal, {stored.rows:,} messages, checksum {stored.checksum:x}"
    return (
        f"{head}: DIFFERENT, {stored.rows:,} messages in the stream (checksum {stored.checksum:x}),"
        f" {archived.rows:,} in the archive ({archived.checksum:x})"
    )


def _replay(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive import replay as replay_module

    name = arguments.name or uuid4().hex[:12]
    plan = replay_module.ReplayPlan(
        arguments.topic, arguments.as_topic or arguments.topic, arguments.node
    )
    plan = replay_module.limit_plan(plan, arguments.first, arguments.last)
    with _open_archive("replay", arguments) as (context, archive):
        context.say(f"replay {name}: if it is interrupted, continue with --name {name}")
        for published, parts in replay_module.replay(archive, name, plan):
            context.say(f"published {published} of {parts} parts to {one_line(plan.as_topic)}")
    return 0


def _parse_id_or_time(text: str) -> int | datetime:
    if not (text.isascii() and text.isdecimal()):
        return time_with_zone(text)
    number = parse_number(text, MAX_ID)
    if number is None:
        raise ArgumentTypeError(f"larger than the largest id {MAX_ID}: {text!r:.100}")
    return number


# Shown in the help, and replaced with the address of this folder when the job starts.
_DEFAULT_CHECKPOINT = "_checkpoint in --to"


def _configure(parser: ArgumentParser) -> None:
    _add_folder(parser, is_required=False)
    parser.add_argument(
        "--topic",
        dest="topics",
        metavar="NAMES",
        help="topics and patterns to mark and archive, separated by commas (default: all marked"
        " topics)",
    )
    parser.add_argument(
        "--allow-gaps",
        action="store_true",
        help="continue if messages were removed before they were archived, instead of failing",
    )
    # Each batch writes files. A long interval keeps their number low.
    pipeline.add_streaming_arguments(parser, _DEFAULT_CHECKPOINT, "10 seconds")
    parser.set_defaults(subcommand=_archive)
    add = subcommands(parser, is_required=False)
    _add_folder(add("compact", _compact, "merge small files of each topic and day"))
    verify = add("verify", _verify, "compare archived messages with those still in the stream")
    _add_folder(verify)
    topics_help = "the topics, separated by commas (default: all)"
    verify.add_argument("--topic", dest="topics", metavar="NAMES", help=topics_help)
    replay = add("replay", _replay, "publish a range of an archived topic again")
    _add_folder(replay)
    replay.add_argument("--topic", metavar="NAME", required=True, help="the archived topic")
    for option, position in (("--from", "first"), ("--until", "last")):
        replay.add_argument(
            option,
            dest=position,
            type=_parse_id_or_time,
            metavar="ID|TIME",
            help=f"the {position} message: id, or time in ISO 8601 (without a zone: local time)",
        )
    replay.add_argument(
        "--as-topic", metavar="NAME", help="the topic to publish to (default: the archived topic)"
    )
    replay.add_argument(
        "--as",
        dest="node",
        metavar="IDENT",
        default="pipeline.archive",
        help="the node that publishes (default: pipeline.archive)",
    )
    replay.add_argument(
        "--name",
        help="name of the replay; needed to continue it after an interruption (default: random)",
    )
    for name, function, help_ in (
        ("mark", _mark, "archive a topic; its messages stay in the stream until they are archived"),
        ("unmark", _unmark, "stop archiving a topic"),
    ):
        add(name, function, help_).add_argument("topic", metavar="TOPIC", help="name of the topic")
    add("marks", _marks, "print the marked topics")


def _add_folder(parser: ArgumentParser, *, is_required: bool = True) -> None:
    # With SUPPRESS, --to may also come before the subcommand.
    parser.add_argument(
        "--to",
        metavar="DIR",
        default=SUPPRESS if is_required else None,
        help="folder of the archive: a path, or an address for Hadoop (hdfs://…, s3a://…)",
    )


def _archive(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive.archive_job import ArchiveJob

    root = _archive_folder(arguments)
    names = tuple(pipeline.split_names(arguments.topics or ""))
    with pipeline.JobContext(COMMAND.name, arguments) as context:
        job = ArchiveJob(context.spark, root, names, allows_gaps=arguments.allow_gaps)
        try:
            while _run_query(context, job):
                context.say("the marked topics have changed")
        finally:
            job.close()
    return 0


def _run_query(context: pipeline.JobContext, job: ArchiveJob) -> bool:
    """Run one query, or wait for a mark. If the marks change, return True: run a new query then."""
    from psqlmessages.pipeline.archive import archive_job

    topics = job.topics()
    if not topics:
        return _wait_for_marks(context, job)
    job.prepare(topics)
    context.say(f"archiving {one_line(', '.join(topics))} to {job.archive.log.folder.root}")
    checkpoint = context.arguments.checkpoint
    if checkpoint == _DEFAULT_CHECKPOINT:
        checkpoint = job.archive.log.folder.address("_checkpoint")
    query = job.start(topics, checkpoint, context.trigger)
    lag = Lag(query, archive_job.READER, topics)
    try:
        with job.stop_on_mark_change(query, topics) as have_marks_changed:
            context.follow(query, lag)
            return have_marks_changed()
    finally:
        lag.close()
        if query.isActive:
            query.stop()


def _wait_for_marks(context: pipeline.JobContext, job: ArchiveJob) -> bool:
    if context.arguments.once:
        context.say(
            "no topic is marked. Mark one with: manage.py psqlmessages pipeline archive mark TOPIC"
        )
        context.record(JobProgress(STOPPED))
        return False
    context.say("no topic is marked: waiting for a mark")
    job.wait_for_marks(lambda: context.record(JobProgress(RUNNING)))
    return True


def _mark(arguments: Namespace) -> int:
    is_new = archive_marks.mark(arguments.topic, arguments.database)
    print(f"{one_line(arguments.topic)} {'is' if is_new else 'was already'} marked")
    return 0


def _unmark(arguments: Namespace) -> int:
    was_marked = archive_marks.unmark(arguments.topic, arguments.database)
    print(f"{one_line(arguments.topic)} is {'no longer' if was_marked else 'not'} marked")
    return 0


def _marks(arguments: Namespace) -> int:
    for topic in archive_marks.list_marked(arguments.database):
        print(one_line(topic))
    return 0


COMMAND = CliCommand(
    "archive",
    "archive topics as Parquet files, exactly once; verify, replay or compact an archive",
    _configure,
    run_subcommand,
)
