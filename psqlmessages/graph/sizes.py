"""Sizes: how many elements queues hold, and what was counted of them, for many queues at once.

The expressions stand within a query over ``psqlmessages_queue``. Elements are counted up to a
limit, so that a list costs the same however long a queue is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

# What a list counts of each kind of element at most, and what /metrics does.
MOST_LISTED: Final = 10_000
MOST_MEASURED: Final = 100_000

# Takes the limit three times.
SIZES: Final = """ARRAY[
    (SELECT count(*) FROM (
        SELECT FROM psqlmessages_element AS e
        WHERE e.queue_id = psqlmessages_queue.id AND e.available_at <= statement_timestamp()
        LIMIT %s
    ) AS available),
    (SELECT count(*) FROM (
        SELECT FROM psqlmessages_element AS e
        WHERE e.queue_id = psqlmessages_queue.id AND e.available_at > statement_timestamp()
          AND e.lease IS NULL
        LIMIT %s
    ) AS scheduled),
    (SELECT count(*) FROM (
        SELECT FROM psqlmessages_element AS e
        WHERE e.queue_id = psqlmessages_queue.id AND e.available_at > statement_timestamp()
          AND e.lease IS NOT NULL
        LIMIT %s
    ) AS reserved)
]"""
COUNTS: Final = """(
    SELECT ARRAY[
        coalesce(sum(c.puts), 0), coalesce(sum(c.gets), 0), coalesce(sum(c.reserves), 0),
        coalesce(sum(c.commits), 0), coalesce(sum(c.rollbacks), 0),
        coalesce(sum(c.dead_letters), 0)
    ]::bigint[]
    FROM psqlmessages_queuecount AS c WHERE c.queue_id = psqlmessages_queue.id
)"""


class Counts(NamedTuple):
    """What happened to a queue's elements since it was made."""

    puts: int
    gets: int
    reserves: int
    commits: int
    rollbacks: int
    dead_letters: int


class Sizes(NamedTuple):
    """The elements of a queue; each number ends at ``most`` and one more, if it was limited."""

    available: int
    scheduled: int
    reserved: int
    most: int

    @classmethod
    def of(cls, numbers: Sequence[int], most: int) -> Sizes:
        """Read what ``SIZES`` answered, asked with ``limits(most)``."""
        return cls(*numbers, most)

    def shown(self, kind: str) -> str:
        """Write a number for people: ``available``, ``scheduled``, ``reserved`` or ``total``."""
        kinds = ("available", "scheduled", "reserved") if kind == "total" else (kind,)
        numbers = [getattr(self, each) for each in kinds]
        counted = sum(min(number, self.most) for number in numbers)
        return f"{'over ' if max(numbers) > self.most else ''}{counted:,}"


def limits(most: int) -> list[int]:
    """Return what ``SIZES`` takes to count so many of each kind, and to see that there are more."""
    return [most + 1] * 3
