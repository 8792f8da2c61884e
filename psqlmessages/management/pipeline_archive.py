"""Command pipeline archive: archive topics to Parquet, verify, replay."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import uuid4

from psqlmessages import archive_marks
from psqlmessages.cli.output import (
    AddCommand,
    CliCommand,
    one_line,
    run_subcommand,
    subcommands,
    time_with_zone,
)
from psqlmessages.conf import get_settings
from psqlmessages.management import pipeline

if TYPE_CHECKING:
    from psqlmessages.pipeline.archive.archive_job import ArchiveJob
    from psqlmessages.pipeline.archive.store import Archive
    from psqlmessages.pipeline.archive.verify import Comparison


# pipeline archive verify, replay, compact: work on an existing archive.


def configure_maintenance(add: AddCommand) -> None:
    """Add the commands."""
    _add_folder(add("compact", _compact, "merge small files of each topic and day"))
    verify = add("verify", _verify, "compare archived messages with those still in the stream")
    _add_folder(verify)
    verify.add_argument("--topic", metavar="NAMES", help="separated by commas (default: all)")
    replay = add("replay", _replay, "publish a range of an archived topic again")
    _add_folder(replay)
    replay.add_argument("--topic", metavar="NAME", required=True, help="the archived topic")
    for option, what in (("--from", "first"), ("--until", "last")):
        replay.add_argument(
            option,
            dest=what,
            type=_id_or_time,
            metavar="ID|TIME",
            help=f"the {what} message: id, or time in ISO 8601 (without a zone: local time)",
        )
    replay.add_argument(
        "--as-topic", metavar="NAME", help="the topic to publish to (default: the same topic)"
    )
    replay.add_argument(
        "--as",
        dest="client",
        metavar="IDENT",
        default="pipeline.archive",
        help="the node that publishes (default: pipeline.archive)",
    )
    replay.add_argument(
        "--name",
        help="name of the replay: it publishes nothing twice (default: a new name)",
    )


def archive_folder(arguments: Namespace) -> str:
    """Return --to; raise ValueError if it is missing."""
    to: str | None = arguments.to
    if not to:
        raise ValueError("the archive is missing: --to DIR")
    return to


@contextmanager
def _open_archive(what: str, arguments: Namespace) -> Iterator[tuple[pipeline.JobContext, Archive]]:
    from psqlmessages.pipeline import job_runner
    from psqlmessages.pipeline.archive.store import Archive

    root = archive_folder(arguments)
    with pipeline.JobContext(f"archive {what}", arguments) as context:
        yield context, Archive.open(context.spark, root)
        context.record(job_runner.JobProgress(job_runner.STOPPED))


def _compact(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive import store

    removed = 0
    with _open_archive("compact", arguments) as (context, archive):
        for small, number in store.compact_all(archive):
            removed += number
            conflict = "changed by another process at the same time"
            result = f"{number} fewer files" if number else conflict
            context.say(f"{one_line(small[0].topic)} {small[0].date}: {result}")
        context.say(f"{removed} fewer files, {len(archive.log.files)} left")
    return 0


def _verify(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive import verify as verify_module

    are_equal, is_any = True, False
    with _open_archive("verify", arguments) as (_, archive):
        names = arguments.topic.split(",") if arguments.topic else None
        for compared in verify_module.verify(archive, names):
            is_any = True
            are_equal = are_equal and compared.is_equal
            print(_describe(compared))
        if not is_any:
            print("no message is both archived and still in the stream: nothing to compare")
    return 0 if are_equal else 1


def _describe(compared: Comparison) -> str:
    where = f"{one_line(compared.topic)}, ids {compared.low + 1} to {compared.high}"
    kept, archived = compared.stored, compared.archived
    if compared.is_equal:
        return f"{where}: equal, {kept.rows:,} messages, {kept.checksum:x}"
    return (
        f"{where}: DIFFERENT, kept {kept.rows:,} ({kept.checksum:x}),"
        f" archived {archived.rows:,} ({archived.checksum:x})"
    )


def _replay(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive import replay as replay_module

    name = arguments.name or uuid4().hex[:12]
    plan = replay_module.ReplayPlan(
        arguments.topic, arguments.as_topic or arguments.topic, arguments.client
    )
    plan = replay_module.limit_plan(plan, arguments.first, arguments.last)
    with _open_archive("replay", arguments) as (context, archive):
        context.say(f"replay {name}: if it is interrupted, continue with --name {name}")
        for done, parts in replay_module.replay(archive, name, plan):
            context.say(f"published {done} of {parts} parts to {one_line(plan.as_topic)}")
    return 0


def _id_or_time(text: str) -> int | datetime:
    if text.isascii() and text.isdecimal():
        return int(text)
    return time_with_zone(text)


_DEFAULT_CHECKPOINT = "_checkpoint in --to"


def _configure(parser: ArgumentParser) -> None:
    _add_folder(parser, required=False)
    parser.add_argument(
        "--topic",
        metavar="NAMES",
        help="names and patterns to mark and archive, separated by commas (default: marked topics)",
    )
    parser.add_argument(
        "--allow-gaps",
        action="store_true",
        help="continue if messages were removed before they were archived, instead of failing",
    )
    # Each batch writes files: keep their number low.
    pipeline.add_streaming(parser, _DEFAULT_CHECKPOINT, "10 seconds")
    parser.set_defaults(subcommand=_archive)
    add = subcommands(parser, is_required=False)
    configure_maintenance(add)
    for name, function, help_ in (
        ("mark", _mark, "keep a topic's messages until they are archived"),
        ("unmark", _unmark, "stop keeping a topic's messages for the archive"),
    ):
        add(name, function, help_).add_argument("topic", metavar="TOPIC", help="its name")
    add("marks", _marks, "print the marked topics")


def _add_folder(parser: ArgumentParser, *, required: bool = True) -> None:
    # The option may also stand before the name of the command.
    parser.add_argument(
        "--to",
        metavar="DIR",
        default=None if not required else SUPPRESS,
        help="the archive: a folder, or an address for Hadoop (hdfs://…, s3a://…)",
    )


def _archive(arguments: Namespace) -> int:
    from psqlmessages.pipeline.archive.archive_job import ArchiveJob

    root = archive_folder(arguments)
    names = tuple(name for name in (arguments.topic or "").split(",") if name)
    with pipeline.JobContext(COMMAND.name, arguments) as context:
        job = ArchiveJob(context.spark, root, names, allows_gaps=arguments.allow_gaps)
        try:
            while _run_query(context, job):
                context.say("the marked topics have changed")
        finally:
            job.close()
    return 0


def _run_query(context: pipeline.JobContext, job: ArchiveJob) -> bool:
    """Follow one query; return whether it ended because the marked topics changed."""
    from psqlmessages.pipeline import job_runner
    from psqlmessages.pipeline.archive import archive_job
    from psqlmessages.pipeline.offsets import Lag

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
        with job.stop_on_mark_change(query, topics) as is_changed:
            job_runner.follow(
                query, context.record, lag, context.say, stop_seconds=get_settings().STOP_SECONDS
            )
            return is_changed()
    finally:
        lag.close()
        if query.isActive:
            query.stop()


def _wait_for_marks(context: pipeline.JobContext, job: ArchiveJob) -> bool:
    from psqlmessages.pipeline import job_runner

    if context.arguments.once:
        context.say(
            "no topic is marked. Mark one with: manage.py psqlmessages pipeline archive mark TOPIC"
        )
        context.record(job_runner.JobProgress(job_runner.STOPPED))
        return False
    context.say("no topic is marked: waiting until one is")
    job.wait_for_marks(lambda: context.record(job_runner.JobProgress(job_runner.RUNNING)))
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
        sys.stdout.write(f"{one_line(topic)}\n")
    return 0


COMMAND = CliCommand(
    "archive",
    "archive topics as Parquet files, exactly once; verify, replay or compact an archive",
    _configure,
    run_subcommand,
)
