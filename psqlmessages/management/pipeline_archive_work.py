"""pipeline archive verify, replay, compact: what is done with an archive that is there."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

from psqlmessages.commands.output import one_line
from psqlmessages.management import pipeline

if TYPE_CHECKING:
    from psqlmessages.pipeline.archive import Archive
    from psqlmessages.pipeline.archive_verify import Compared, Sum


class Adding(Protocol):
    """Adds a command."""

    def __call__(self, name: str, act: Callable[[Namespace], int], help_: str) -> ArgumentParser:
        """Return its parser."""


def configure(add: Adding, add_folder: Callable[[ArgumentParser], None]) -> None:
    """Add the commands."""
    add_folder(add("compact", _compact, "merge small files of each topic and day"))
    verify = add("verify", _verify, "compare what is archived with what is still kept")
    add_folder(verify)
    verify.add_argument("--topic", metavar="NAMES", help="separated by commas (default: all)")
    replay = add("replay", _replay, "publish a range of an archived topic again")
    add_folder(replay)
    replay.add_argument("--topic", metavar="NAME", required=True, help="what is published")
    for option, what in (("--from", "first"), ("--until", "last")):
        replay.add_argument(
            option,
            dest=what,
            type=_moment,
            metavar="ID|TIME",
            help=f"the {what} message: id, or time as in 2030-12-31T23:59:59+00:00 (default: all)",
        )
    replay.add_argument("--as-topic", metavar="NAME", help="where to (default: the same topic)")
    replay.add_argument(
        "--as",
        dest="client",
        metavar="IDENT",
        default="pipeline.archive",
        help="the node that publishes (default: pipeline.archive)",
    )
    replay.add_argument(
        "--name", help="what is published under one name comes once (default: a new one)"
    )


def folder(arguments: Namespace) -> str:
    """Return --to; raise ValueError where it is not given."""
    to: str | None = arguments.to
    if not to:
        raise ValueError("say which archive: --to DIR")
    return to


@contextmanager
def _opened(what: str, arguments: Namespace) -> Iterator[tuple[pipeline.Stage, Archive]]:
    from psqlmessages.pipeline import jobs
    from psqlmessages.pipeline.archive import Archive

    root = folder(arguments)
    with pipeline.Stage(f"archive {what}", arguments) as stage:
        yield stage, Archive.opened(stage.spark, root)
        stage.record(jobs.Progress(jobs.STOPPED))


def _compact(arguments: Namespace) -> int:
    from psqlmessages.pipeline import archive_compaction

    gone = 0
    with _opened("compact", arguments) as (stage, archive):
        for small, number in archive_compaction.compact_all(archive):
            gone += number
            stage.say(
                f"{one_line(small[0].topic)} {small[0].date}: "
                + (f"{number} files less" if number else "others have changed it meanwhile")
            )
        stage.say(f"{gone} files less, {len(archive.log.files)} are there")
    return 0


def _verify(arguments: Namespace) -> int:
    from psqlmessages.pipeline import archive_verify

    are_equal = True
    with _opened("verify", arguments) as (_, archive):
        names = arguments.topic.split(",") if arguments.topic else None
        is_any = False
        for compared in archive_verify.verify(archive, names):
            is_any = True
            are_equal = are_equal and compared.is_equal
            print(_line(compared))
        if not is_any:
            print("nothing is both archived and still kept: there is nothing to compare")
    return 0 if are_equal else 1


def _line(compared: Compared) -> str:
    where = f"{one_line(compared.topic)}, ids {compared.low + 1} to {compared.high}"
    if compared.is_equal:
        return f"{where}: equal, {compared.kept.rows:,} messages, {compared.kept.checksum:x}"
    return f"{where}: DIFFERENT, kept {_sum(compared.kept)}, archived {_sum(compared.archived)}"


def _sum(found: Sum) -> str:
    return f"{found.rows:,} ({found.checksum:x})"


def _replay(arguments: Namespace) -> int:
    from psqlmessages.pipeline import archive_replay

    name = arguments.name or uuid4().hex[:12]
    plan = archive_replay.Plan(
        arguments.topic, arguments.as_topic or arguments.topic, arguments.client
    )
    plan = archive_replay.plan_between(plan, arguments.first, arguments.last)
    with _opened("replay", arguments) as (stage, archive):
        stage.say(f"replay {name}: start it again with --name {name} where it is cut off")
        for done, parts in archive_replay.replay(archive, name, plan):
            stage.say(f"{done} of {parts} parts are published in {one_line(plan.as_topic)}")
    return 0


def _moment(text: str) -> int | datetime:
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"neither an id nor a time: {text!r}") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
