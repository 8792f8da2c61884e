"""Options of the source: names, values, and refusal of invalid ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psqlmessages.pipeline.database import DSN_OPTION
from psqlmessages.pipeline.errors import OptionRefused
from psqlmessages.wire import MAX_ID, parse_number

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

SOURCE_OPTIONS: Final = (
    "topic", "queue", "client", "startingOffsets", "maxRowsPerTrigger", "failOnDataLoss",
    "timeout", "partitions", DSN_OPTION,
)  # fmt: skip

_MAX_COUNT: Final = 2**31 - 1


@dataclass(frozen=True)
class SourceOptions:
    """The validated options of a read. Exactly one of ``topics`` and ``queue`` is set.

    ``topics`` are names and patterns. ``client`` is the node that reads. ``starting`` is
    "earliest", "latest", the first id to read, or a time. After a stream has been stopped for
    ``timeout`` seconds, a topic's unread messages may be removed, and a queue's leases expire.
    ``dsn_options`` are those of :func:`psqlmessages.pipeline.database.dsn`.
    """

    topics: tuple[str, ...]
    queue: str | None
    client: str
    starting: str | int | datetime
    max_rows: int
    fail_on_data_loss: bool
    timeout: int
    partitions: int
    dsn_options: Mapping[str, str]

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse Spark's options; raises OptionRefused."""
        lowered = lower_names(options)
        refuse_unknown(lowered, SOURCE_OPTIONS)
        topic, queue = topic_or_queue(lowered)
        is_queue = queue is not None
        if is_queue and "startingoffsets" in lowered:
            raise OptionRefused("startingOffsets is for topics only: a queue has no offsets")
        return cls(
            topics=_parse_topics(topic) if topic is not None else (),
            queue=queue,
            client=lowered.get("client") or "pipeline",
            starting=_parse_start(lowered.get("startingoffsets", EARLIEST)),
            # The default of a queue is smaller, because an offset lists all leases of its batch,
            # and Spark keeps 100 offsets in memory.
            max_rows=_parse_count(lowered, "maxRowsPerTrigger", 10_000 if is_queue else 100_000),
            fail_on_data_loss=_parse_bool(lowered, "failOnDataLoss"),
            timeout=_parse_count(lowered, "timeout", 10 * 60 if is_queue else 24 * 60 * 60),
            partitions=_parse_count(lowered, "partitions", 2),
            dsn_options={name: lowered[name] for name in lowered if name == DSN_OPTION.lower()},
        )


def lower_names(options: Mapping[str, str]) -> dict[str, str]:
    """Return options with lower-case names: Spark ignores their case."""
    return {name.lower(): value for name, value in options.items()}


def refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise OptionRefused, with the list of known options, if an option is unknown."""
    names = {name.lower(): name for name in known}
    unknown = sorted(name for name in given if name.lower() not in names)
    if unknown:
        raise OptionRefused(
            f"unknown option {', '.join(unknown)}."
            f" Known options: {', '.join(sorted(names.values()))}"
        )


def topic_or_queue(lowered: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the options topic and queue, of which one is None; raises OptionRefused."""
    topic, queue = lowered.get("topic"), lowered.get("queue")
    if bool(topic) == bool(queue):
        raise OptionRefused("set either the option topic or the option queue")
    return topic or None, queue or None


def _parse_topics(topics: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in topics.split(",")))
    if "" in names:
        raise OptionRefused(f"topic {topics!r} contains an empty name")
    return names


def _parse_start(value: str) -> str | int | datetime:
    if value.lower() in (EARLIEST, LATEST):
        return value.lower()
    if (first_id := parse_number(value, MAX_ID)) is not None:
        return first_id
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise OptionRefused(
            f"startingOffsets {value!r:.100} must be {EARLIEST}, {LATEST}, an id up to {MAX_ID},"
            " or a time such as 2030-12-31T23:59:59+00:00"
        ) from None
    if time.utcoffset() is None:
        raise OptionRefused(
            f"startingOffsets {value!r} needs a time zone, for example {value}+00:00"
        )
    return time


def _parse_count(lowered: Mapping[str, str], name: str, default: int) -> int:
    value = lowered.get(name.lower(), str(default))
    count = parse_number(value.strip().replace("_", ""), _MAX_COUNT)
    if not count:
        raise OptionRefused(f"{name} {value!r:.100} must be a number from 1 to {_MAX_COUNT}")
    return count


def _parse_bool(lowered: Mapping[str, str], name: str) -> bool:
    value = lowered.get(name.lower(), "true")
    if value.lower() not in ("true", "false"):
        raise OptionRefused(f"{name} {value!r} must be true or false")
    return value.lower() == "true"
