"""Replay: publish a range of an archived topic again, in order, once per replay name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as sf

from psqlmessages.pipeline.archive.log import ArchiveError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from psqlmessages.pipeline.archive.store import Archive

# Approximate size of a part, which is published in one transaction.
_ROWS_PER_PART: Final = 200_000
# Messages are counted in this number of id ranges, to find the bounds of the parts.
_COUNT_RANGES: Final = 10_000

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,60}")


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The messages that a replay publishes: ids ``first`` to ``last`` (0: no limit) of a topic.

    The node ``client`` publishes them to the topic ``as_topic``. ``since`` and ``until`` are ISO
    times, if the range was given by time. ``ends`` has the last id of each part. The archive stores
    the plan, so that a resumed replay has the same parts.
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


def replay(archive: Archive, name: str, request: ReplayPlan) -> Iterator[tuple[int, int]]:
    """Publish the requested messages; yield (number of published parts, number of all parts).

    Each part is one transaction. The database records the part and never publishes it twice.
    Raises ArchiveError if the name is invalid or of another replay, or if there are no messages.
    """
    plan = _load_or_create_plan(archive, name, request)
    yield 0, len(plan.ends)
    first = plan.first
    for number, last in enumerate(plan.ends):
        part = replace(plan, first=first, last=last)
        query = f"replay/{archive.log.identity}/{name}/{number}"
        archive.retry_reads(partial(_publish, archive, part, query))
        first = last + 1
        yield number + 1, len(plan.ends)


def limit_plan(
    request: ReplayPlan, begin: int | datetime | None, end: int | datetime | None
) -> ReplayPlan:
    """Add a range of ids or times to a request, both inclusive; None means no limit."""
    limits: dict[str, Any] = {}
    for limit, id_name, time_name in ((begin, "first", "since"), (end, "last", "until")):
        if isinstance(limit, datetime):
            limits[time_name] = limit.isoformat()
        elif limit is not None:
            limits[id_name] = limit
    return replace(request, **limits)


def _publish(archive: Archive, part: ReplayPlan, query: str) -> None:
    (
        _select_rows(archive, part)
        .orderBy("id")
        .select("body", "enc")
        .write.format("psqlmessages")
        .options(topic=part.as_topic, client=part.client, query=query)
        .mode("append")
        .save()
    )


def _load_or_create_plan(archive: Archive, name: str, request: ReplayPlan) -> ReplayPlan:
    """Return the stored plan of a name; if there is none, create it."""
    if not _NAME.fullmatch(name):
        raise ArchiveError(
            f"the name of a replay must be 1 to 60 of A-Z, a-z, 0-9, - and _: {name!r}"
        )
    path = f"_replays/{name}.json"
    folder = archive.log.folder
    request_json = json.dumps(asdict(request), sort_keys=True)
    if not folder.exists(path):
        plan = archive.retry_reads(lambda: _split(archive, request))
        folder.create(path, json.dumps({"asked": request_json, "plan": asdict(plan)}))
    stored = json.loads(folder.read(path))
    if stored["asked"] != request_json:
        raise ArchiveError(
            f"another replay has the name {name}: {stored['asked']}. Choose another name"
        )
    return ReplayPlan(**{**stored["plan"], "ends": tuple(stored["plan"]["ends"])})


def _split(archive: Archive, request: ReplayPlan) -> ReplayPlan:
    """Count the messages by ranges of ids, and split the plan into parts of similar size."""
    rows = _select_rows(archive, request)
    lowest, highest = rows.agg(sf.min("id"), sf.max("id")).collect()[0]
    if lowest is None:
        raise ArchiveError(f"the archive has no messages of {request.topic} in this range")
    first, last = int(lowest), int(highest)
    width = ceil((last - first + 1) / _COUNT_RANGES)
    range_number = sf.floor((sf.col("id") - first) / width)
    counts = sorted(tuple(row) for row in rows.groupBy(range_number).count().collect())
    ends, size = [], 0
    for number, count in counts:
        size += count
        if size >= _ROWS_PER_PART:
            ends.append(min(first + (number + 1) * width - 1, last))
            size = 0
    if size:
        ends.append(last)
    total = sum(count for _, count in counts)
    return replace(request, first=first, last=last, ends=tuple(ends), rows=total)


def _select_rows(archive: Archive, plan: ReplayPlan) -> DataFrame:
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
