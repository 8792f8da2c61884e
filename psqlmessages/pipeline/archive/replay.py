"""Replay: publish a range of an archived topic again, in order, once per name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

from psqlmessages.pipeline.archive.log import DATA, ArchiveError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from psqlmessages.pipeline.archive.store import Archive

# Approximate size of a part. Each part is published in one transaction.
_ROWS_AT_ONCE: Final = 200_000
# Number of id ranges in which messages are counted to find the parts.
_PLACES: Final = 10_000

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,60}")


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The messages that a replay publishes: ``first`` to ``last`` of a topic, split at ``ends``.

    The archive stores it by name, so that an interrupted replay continues with the same parts.
    ``since`` and ``until`` are ISO times, if the range was given by time.
    """

    topic: str
    as_topic: str
    client: str
    since: str | None = None
    until: str | None = None
    first: int = 0
    last: int = 0
    ends: tuple[int, ...] = ()
    rows: int = 0


def replay(archive: Archive, name: str, wanted: ReplayPlan) -> Iterator[tuple[int, int]]:
    """Publish the messages of a plan; yield (parts done, parts in all), first with none done.

    Each part is one transaction. The database remembers its name and never publishes it twice.
    Raises ArchiveError if another plan has the name.
    """
    plan = _settled(archive, name, wanted)
    yield 0, len(plan.ends)
    low = plan.first - 1
    for number, high in enumerate(plan.ends):
        part = replace(plan, first=low + 1, last=high)
        query = f"replay/{archive.log.identity}/{name}/{number}"
        archive.retry_reads(partial(_publish, archive, part, query))
        low = high
        yield number + 1, len(plan.ends)


def plan_between(
    wanted: ReplayPlan, begin: int | datetime | None, end: int | datetime | None
) -> ReplayPlan:
    """Add a range of ids or times to a plan, both inclusive; None means no limit."""
    if isinstance(begin, datetime):
        wanted = replace(wanted, since=begin.isoformat())
    elif begin is not None:
        wanted = replace(wanted, first=begin)
    if isinstance(end, datetime):
        wanted = replace(wanted, until=end.isoformat())
    elif end is not None:
        wanted = replace(wanted, last=end)
    return wanted


def _publish(archive: Archive, part: ReplayPlan, query: str) -> None:
    (
        _chosen(archive, part)
        .orderBy("id")
        .select("body", "enc")
        .write.format("psqlmessages")
        .options(topic=part.as_topic, client=part.client, query=query)
        .mode("append")
        .save()
    )


def _settled(archive: Archive, name: str, wanted: ReplayPlan) -> ReplayPlan:
    """Return the stored plan of a name; if there is none, make and store it."""
    if not _NAME.fullmatch(name):
        raise ArchiveError(
            f"the name of a replay must be 1 to 60 of A-Z, a-z, 0-9, - and _: {name!r}"
        )
    path = f"_replays/{name}.json"
    folder = archive.log.folder
    asked = json.dumps(asdict(wanted), sort_keys=True)
    if not folder.exists(path):
        plan = archive.retry_reads(lambda: _cut(archive, wanted))
        folder.create(path, json.dumps({"asked": asked, "plan": asdict(plan)}))
    kept = json.loads(folder.read(path))
    if kept["asked"] != asked:
        raise ArchiveError(f"another replay has the name {name}: {kept['asked']}")
    return ReplayPlan(**{**kept["plan"], "ends": tuple(kept["plan"]["ends"])})


def _cut(archive: Archive, wanted: ReplayPlan) -> ReplayPlan:
    """Count the messages by ranges of ids, and split the plan into parts of similar size."""
    rows = _chosen(archive, wanted)
    found = rows.agg(sf.min("id"), sf.max("id")).collect()[0]
    if found[0] is None:
        raise ArchiveError(f"{DATA} has no messages of topic {wanted.topic} in this range")
    first, last = int(found[0]), int(found[1])
    width = -(-(last - first + 1) // _PLACES)
    place = sf.floor((sf.col("id") - first) / width)
    counts = sorted(tuple(row) for row in rows.groupBy(place).count().collect())
    ends, size = [], 0
    for number, count in counts:
        size += count
        if size >= _ROWS_AT_ONCE:
            ends.append(min(first + (number + 1) * width - 1, last))
            size = 0
    if size:
        ends.append(last)
    total = sum(count for _, count in counts)
    return replace(wanted, first=first, last=last, ends=tuple(ends), rows=total)


def _chosen(archive: Archive, plan: ReplayPlan) -> DataFrame:
    files = (
        file
        for file in archive.log.files.values()
        if file.topic == plan.topic
        and file.last >= plan.first
        and (file.first <= plan.last or not plan.last)
    )
    rows = archive.read(files).where(sf.col("id") >= plan.first)
    if plan.last:
        rows = rows.where(sf.col("id") <= plan.last)
    if plan.since is not None:
        rows = rows.where(sf.col("published_at") >= sf.to_timestamp(sf.lit(plan.since)))
    if plan.until is not None:
        rows = rows.where(sf.col("published_at") <= sf.to_timestamp(sf.lit(plan.until)))
    return rows
