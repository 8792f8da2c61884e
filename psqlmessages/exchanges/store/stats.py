"""Statistics of exchanges: written every two seconds, summed up hourly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from time import monotonic
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from django.db import DEFAULT_DB_ALIAS, transaction
from django.db.models import Q
from django.db.models.functions import Now

from psqlmessages.exchanges.engine.counters import BUCKET_SECONDS, ExchangeCounters
from psqlmessages.models import Exchange, ExchangeCount

# The worker id of the rows that hold the sums of former workers.
FORMER: Final = UUID(int=0)
_ADD_UP_SECONDS: Final = 60 * 60
FORGOTTEN_AFTER: Final = timedelta(days=1)
_UNIQUE: Final = ("exchange", "worker", "outcome", "destination")
_COUNTED: Final = ("count", "seconds", "buckets", "selector_seconds", "seen_at")


class CounterStore:
    """Counters of a process by exchange (its primary key), and their rows in the database."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self._using = using
        self._add_up_at = 0.0
        self.worker = uuid4()
        self.counters: dict[int, ExchangeCounters] = {}

    def of(self, exchange: int) -> ExchangeCounters:
        """Return the counters of an exchange."""
        return self.counters.setdefault(exchange, ExchangeCounters())

    @property
    def elements(self) -> int:
        """Number of elements that were finished, with any outcome."""
        return sum(counters.elements for counters in self.counters.values())

    def summary(self) -> str:
        """Return the number of elements by outcome, and of selector failures, as text."""
        found = self.counters.values()
        outcomes = ", ".join(
            f"{sum(counters.count(outcome) for counters in found):,} {outcome.label}"
            for outcome in ELEMENT_OUTCOMES
        )
        failures = sum(counters.selector_failures for counters in found)
        return f"{outcomes}; {failures:,} selector failures"

    def unwritten(self, running: Collection[int]) -> list[ExchangeCount]:
        """Return the changed rows, and a heartbeat row for each running exchange."""
        return [
            ExchangeCount(
                exchange_id=key,
                worker=self.worker,
                outcome=outcome,
                destination=destination,
                count=entry.count,
                seconds=entry.seconds,
                buckets=list(entry.buckets),
                selector_seconds=entry.selector_seconds,
                seen_at=Now(),
            )
            for key, counters in self.counters.items()
            for outcome, destination, entry in counters.unwritten(is_running=key in running)
        ]

    def write(self, rows: list[ExchangeCount]) -> list[ExchangeCount]:
        """Write the rows of existing exchanges, and return them; sum up former workers hourly.

        Rows hold totals, so that writing them twice does no harm.
        """
        counts, exchanges = ExchangeCount.objects.using(self._using), Exchange.objects
        wanted = {row.exchange_id for row in rows}
        there = set(exchanges.using(self._using).filter(pk__in=wanted).values_list("pk", flat=True))
        kept = [row for row in rows if row.exchange_id in there]
        counts.bulk_create(
            kept, update_conflicts=True, unique_fields=_UNIQUE, update_fields=_COUNTED
        )
        if monotonic() >= self._add_up_at:
            self.add_up_former()
            self._add_up_at = monotonic() + _ADD_UP_SECONDS
        return kept

    def wrote(self, rows: list[ExchangeCount]) -> None:
        """Record which rows have been written."""
        for row in rows:
            if (counters := self.counters.get(row.exchange_id)) is not None:
                counters.wrote(row.outcome, row.destination, row.count)

    def add_up_former(self) -> int:
        """Merge the rows of workers that were not seen for a day; return their number."""
        counts = ExchangeCount.objects.using(self._using)
        with transaction.atomic(using=self._using):
            former = list(
                counts.select_for_update(skip_locked=True, of=("self",))
                .filter(~Q(worker=FORMER), seen_at__lt=Now() - FORGOTTEN_AFTER)
                .order_by("pk")
            )
            for row in former:
                total, _ = counts.select_for_update().get_or_create(
                    exchange_id=row.exchange_id,
                    worker=FORMER,
                    outcome=row.outcome,
                    destination=row.destination,
                    defaults={"count": 0, "seconds": 0, "buckets": [], "selector_seconds": 0},
                )
                _add(total, row)
                total.save(using=self._using)
            counts.filter(pk__in=[row.pk for row in former]).delete()
        return len(former)


def _add(total: ExchangeCount, row: ExchangeCount) -> None:
    total.count += row.count
    total.seconds += row.seconds
    total.selector_seconds += row.selector_seconds
    pairs = zip_longest(total.buckets, row.buckets, fillvalue=0)
    total.buckets = [one + other for one, other in pairs]
    total.seen_at = max(total.seen_at, row.seen_at)


# Aggregation: the rows of ExchangeCount, summed over all workers. Pure.

Outcome = ExchangeCount.Outcome

# A worker writes every 2 s. After this time without a write it counts as stopped.
ALIVE_SECONDS: Final = 10
# Outcomes of an element, in the order of display.
ELEMENT_OUTCOMES: Final = (
    *(Outcome.OK, Outcome.NO_ROUTE, Outcome.TOO_MANY_HOPS, Outcome.FAILED),
)  # fmt: skip


class CounterRow(NamedTuple):
    """Counters of one worker, or the sums of several workers."""

    outcome: str
    destination: int
    count: int
    seconds: float
    buckets: Sequence[int]
    selector_seconds: float


@dataclass(slots=True)
class Histogram:
    """Durations of elements: their number, their sum in seconds, and the number per bucket."""

    count: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_SECONDS) + 1))

    def add(self, row: CounterRow) -> None:
        """Add the counters of a worker."""
        self.count += row.count
        self.seconds += row.seconds
        for place, number in enumerate(row.buckets[: len(self.buckets)]):
            self.buckets[place] += number

    def quantile(self, share: float) -> float | None:
        """Return the seconds within which this share of the elements finished, or None.

        Elements are assumed to be evenly distributed within a bucket. In the last bucket they count
        as ``inf``.
        """
        measured = sum(self.buckets)
        wanted, passed, least = share * measured, 0, 0.0
        for number, most in zip(self.buckets, (*BUCKET_SECONDS, float("inf")), strict=True):
            if number and passed + number >= wanted:
                return least + (most - least) * max(wanted - passed, 0) / number
            passed, least = passed + number, most
        return None


@dataclass(slots=True)
class AggregatedCounters:
    """Outcomes of elements, copies and selector failures by destination, and selector time."""

    outcomes: dict[str, Histogram] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    selector_failures: dict[int, int] = field(default_factory=dict)
    selector_seconds: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[CounterRow]) -> AggregatedCounters:
        """Add up rows."""
        counted = cls()
        for row in rows:
            counted.selector_seconds += row.selector_seconds
            if row.outcome in (Outcome.TO, Outcome.BAD_SELECTOR):
                is_copy = row.outcome == Outcome.TO
                counts = counted.copies if is_copy else counted.selector_failures
                counts[row.destination] = counts.get(row.destination, 0) + row.count
            else:
                counted.outcomes.setdefault(row.outcome, Histogram()).add(row)
        return counted

    @property
    def elements(self) -> int:
        """Number of elements with any outcome."""
        return sum(histogram.count for histogram in self.outcomes.values())


# Sizes of queues and their counters, for many queues in one query.
#
# The expressions are part of a query over ``psqlmessages_queue``. Elements are counted up to a
# limit, so that the cost does not depend on the length of a queue.

# Limits of the count for each kind of element, in lists and in /metrics.
MOST_LISTED: Final = 10_000
MOST_MEASURED: Final = 100_000

# The limit is passed three times.
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


class QueueCounters(NamedTuple):
    """Operations on the elements of a queue since it was created."""

    puts: int
    gets: int
    reserves: int
    commits: int
    rollbacks: int
    dead_letters: int


class Sizes(NamedTuple):
    """Number of elements of a queue by state; ``most`` + 1 stands for any larger number."""

    available: int
    scheduled: int
    reserved: int
    most: int

    @classmethod
    def of(cls, numbers: Sequence[int], most: int) -> Sizes:
        """Read the result of ``SIZES``, queried with ``limits(most)``."""
        return cls(*numbers, most)

    def shown(self, kind: str) -> str:
        """Format a number for people: ``available``, ``scheduled``, ``reserved`` or ``total``."""
        kinds = ("available", "scheduled", "reserved") if kind == "total" else (kind,)
        numbers = [getattr(self, each) for each in kinds]
        counted = sum(min(number, self.most) for number in numbers)
        return f"{'over ' if max(numbers) > self.most else ''}{counted:,}"


def limits(most: int) -> list[int]:
    """Return the parameters of ``SIZES``. They exceed ``most`` by one, to detect larger numbers."""
    return [most + 1] * 3
