"""Statistics of exchanges (a worker writes them every two seconds), and sizes of queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from django.db import DEFAULT_DB_ALIAS, transaction
from django.db.models import Q, Sum
from django.db.models.functions import Now

from psqlmessages.exchanges.engine.counters import ExchangeCounters, Histogram
from psqlmessages.models import Exchange, ExchangeCount

# This worker id marks the rows that hold the sums of all former workers.
FORMER_WORKERS: Final = UUID(int=0)
FORMER_AFTER: Final = timedelta(days=1)
# A worker writes every two seconds. It merges a minute after its start or an outage, and then every
# hour. The minute is counted in writes, so that after an outage the others have written before.
_FIRST_MERGE_WRITES: Final = 30
_MERGE_WRITES: Final = 1800
_KEY_FIELDS: Final = ("exchange", "worker", "outcome", "destination")
_VALUE_FIELDS: Final = (
    "count", "seconds", "buckets", "selector_seconds", "seen_at", "missing_rules",
    "failing_since",
)  # fmt: skip


class CounterStore:
    """Counters of a process for each exchange, and the rows that store them in the database."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self._using = using
        self._writes_until_merge = _FIRST_MERGE_WRITES
        self.worker = uuid4()
        # The keys are primary keys of exchanges. Missing rules are texts.
        self.counters: dict[int, ExchangeCounters] = {}
        self._missing_rules: dict[int, list[str]] = {}
        self._failing_since: dict[int, datetime] = {}

    def of(self, exchange_id: int) -> ExchangeCounters:
        """Return the counters of an exchange."""
        return self.counters.setdefault(exchange_id, ExchangeCounters())

    def set_state(self, exchange_id: int, missing_rules: list[str], *, is_failing: bool) -> None:
        """Set the missing rules of an exchange, and whether it fails; remember since when."""
        self._missing_rules[exchange_id] = missing_rules
        if missing_rules or is_failing:
            self._failing_since.setdefault(exchange_id, datetime.now(UTC))
        else:
            self._failing_since.pop(exchange_id, None)

    @property
    def elements(self) -> int:
        """Number of elements that were finished, with any outcome."""
        return sum(counters.elements for counters in self.counters.values())

    def summary(self) -> str:
        """Return the numbers of elements by outcome, and of selector failures, as text."""
        all_counters = self.counters.values()
        outcomes = ", ".join(
            f"{sum(counters.count(outcome) for counters in all_counters):,} {outcome.label}"
            for outcome in ELEMENT_OUTCOMES
        )
        failures = sum(counters.selector_failures for counters in all_counters)
        return f"{outcomes}; {failures:,} selector failures"

    def list_rows(self, running: Collection[int]) -> list[ExchangeCount]:
        """Create rows for changed counters, and for the heartbeat of each running exchange."""
        return [
            ExchangeCount(
                exchange_id=key,
                worker=self.worker,
                outcome=outcome,
                destination=destination,
                count=counter.count,
                seconds=counter.seconds,
                buckets=list(counter.buckets),
                selector_seconds=counter.selector_seconds,
                seen_at=Now(),
                missing_rules=self._missing_rules.get(key, []) if outcome == Outcome.OK else [],
                failing_since=self._failing_since.get(key) if outcome == Outcome.OK else None,
            )
            for key, counters in self.counters.items()
            for outcome, destination, counter in counters.list_unwritten(is_running=key in running)
        ]

    def write(self, rows: list[ExchangeCount]) -> list[ExchangeCount]:
        """Write the rows of existing exchanges, and return them; merge former workers hourly.

        Rows hold totals, so writing a row twice does no harm.
        """
        # If this write fails, the next merge is _FIRST_MERGE_WRITES writes later, as after a start.
        left, self._writes_until_merge = self._writes_until_merge - 1, _FIRST_MERGE_WRITES
        exchanges = Exchange.objects.using(self._using)
        existing = exchanges.in_bulk({row.exchange_id for row in rows})
        rows = [row for row in rows if row.exchange_id in existing]
        ExchangeCount.objects.using(self._using).bulk_create(
            rows, update_conflicts=True, unique_fields=_KEY_FIELDS, update_fields=_VALUE_FIELDS
        )
        self._writes_until_merge = left if left > 0 else _MERGE_WRITES
        if left <= 0:
            self.merge_former_workers()
        return rows

    def mark_written(self, rows: list[ExchangeCount]) -> None:
        """Record which rows have been written."""
        for row in rows:
            if (counters := self.counters.get(row.exchange_id)) is not None:
                counters.mark_written(row.outcome, row.destination, row.count)

    def merge_former_workers(self) -> None:
        """Add the rows of workers that have not written for a day to the rows of FORMER_WORKERS."""
        counts = ExchangeCount.objects.using(self._using)
        # While all exchanges of a worker are stopped, it writes no heartbeats. Another worker must
        # not merge its rows: they hold totals, so its next write would count everything again. So
        # set `seen_at` to half a day ago: the current time would mean that the exchanges run.
        half_a_day_ago = Now() - FORMER_AFTER / 2
        mine = counts.filter(worker=self.worker)
        mine.filter(seen_at__lt=half_a_day_ago).update(seen_at=half_a_day_ago)
        live = counts.filter(seen_at__gte=Now() - FORMER_AFTER).values("worker")
        with transaction.atomic(using=self._using):
            rows = list(
                counts.select_for_update(skip_locked=True, of=("self",))
                .exclude(worker__in=(FORMER_WORKERS, self.worker))
                .exclude(worker__in=live)
                .order_by("pk")
            )
            for row in rows:
                total, _ = counts.select_for_update().get_or_create(
                    exchange_id=row.exchange_id,
                    worker=FORMER_WORKERS,
                    outcome=row.outcome,
                    destination=row.destination,
                    defaults={"count": 0, "seconds": 0, "buckets": [], "selector_seconds": 0},
                )
                total.count += row.count
                total.seconds += row.seconds
                total.selector_seconds += row.selector_seconds
                total.buckets = list(map(sum, zip_longest(total.buckets, row.buckets, fillvalue=0)))
                total.seen_at = max(total.seen_at, row.seen_at)
                total.save(using=self._using)
            counts.filter(pk__in=[row.pk for row in rows]).delete()


# Aggregation: the rows of ExchangeCount, summed over all workers.

Outcome = ExchangeCount.Outcome

# A worker writes every two seconds. After this time without a write it counts as stopped.
WORKER_TIMEOUT_SECONDS: Final = 10


def has_live_worker(prefix: str = "") -> Q:
    """Match the heartbeat row of each worker that runs the exchange now."""
    oldest = Now() - timedelta(seconds=WORKER_TIMEOUT_SECONDS)
    return Q(**{f"{prefix}outcome": Outcome.OK, f"{prefix}seen_at__gt": oldest})


def count_outcomes(exchanges: Collection[Exchange], using: str) -> Counter[tuple[int, str]]:
    """Return the sums over all workers. The keys are primary keys of exchanges, and outcomes."""
    counts = ExchangeCount.objects.using(using).filter(exchange__in=exchanges)
    sums = counts.values_list("exchange", "outcome").annotate(Sum("count"))
    return Counter({(key, outcome): count for key, outcome, count in sums})


def read_missing_rules(using: str = DEFAULT_DB_ALIAS) -> dict[int, list[str]]:
    """Return the rules that live workers of running exchanges lack. The keys are primary keys."""
    counts = ExchangeCount.objects.using(using).filter(has_live_worker(), exchange__is_running=True)
    missing: dict[int, set[str]] = {}
    for key, rules in counts.exclude(missing_rules=[]).values_list("exchange", "missing_rules"):
        missing.setdefault(key, set()).update(rules)
    return {key: sorted(rules) for key, rules in missing.items()}


def format_state(*, is_running: bool, is_blocked: bool) -> str:
    """Return the state of an exchange: ``stopped``, ``blocked`` or ``running``."""
    if not is_running:
        return "stopped"
    return "blocked" if is_blocked else "running"


# Outcomes of an element, in the order of display.
ELEMENT_OUTCOMES: Final[tuple[Outcome, ...]] = (
    Outcome.OK, Outcome.NO_ROUTE, Outcome.DISCARDED, Outcome.TOO_MANY_HOPS, Outcome.FAILED,
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
class AggregatedCounters:
    """Counters of an exchange. The keys are outcomes, or positions of destinations."""

    outcomes: dict[str, Histogram] = field(default_factory=dict)
    copies: Counter[int] = field(default_factory=Counter)
    selector_failures: Counter[int] = field(default_factory=Counter)
    selector_seconds: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[CounterRow]) -> AggregatedCounters:
        """Add up rows."""
        total = cls()
        for row in rows:
            total.selector_seconds += row.selector_seconds
            if row.outcome == Outcome.TO:
                total.copies[row.destination] += row.count
            elif row.outcome == Outcome.BAD_SELECTOR:
                total.selector_failures[row.destination] += row.count
            else:
                total.outcomes.setdefault(row.outcome, Histogram()).add(row)
        return total

    @property
    def elements(self) -> int:
        """Number of elements with any outcome."""
        return sum(histogram.count for histogram in self.outcomes.values())


# Sizes of queues and their counters, for many queues in one query.
#
# The expressions are part of a query over ``psqlmessages_queue``. Elements are counted up to a
# limit, so that the cost does not depend on the length of a queue.

# Elements of each state are counted up to these limits, in lists and in /metrics respectively.
MAX_LISTED: Final = 10_000
MAX_MEASURED: Final = 100_000

_SIZE: Final = """(
    SELECT count(*) FROM (
        SELECT FROM psqlmessages_element AS e
        WHERE e.queue_id = psqlmessages_queue.id AND {} LIMIT %s
    ) AS element
)"""
_AVAILABLE: Final = "e.available_at <= statement_timestamp()"
_SCHEDULED: Final = "e.available_at > statement_timestamp() AND e.lease IS NULL"
_RESERVED: Final = "e.available_at > statement_timestamp() AND e.lease IS NOT NULL"
_SIZE_OF_EACH: Final = ", ".join(map(_SIZE.format, (_AVAILABLE, _SCHEDULED, _RESERVED)))
SIZES: Final = f"ARRAY[{_SIZE_OF_EACH}]"
EXISTS: Final = """(
    NOT psqlmessages_queue.is_removed
    OR EXISTS (SELECT FROM psqlmessages_element AS e WHERE e.queue_id = psqlmessages_queue.id)
)"""


class QueueCounters(NamedTuple):
    """Operations on the elements of a queue since it was created."""

    puts: int
    gets: int
    reserves: int
    commits: int
    rollbacks: int
    dead_letters: int
    removes: int


_SUMS: Final = ", ".join(f"coalesce(sum(c.{name}), 0)" for name in QueueCounters._fields)
COUNTS: Final = f"""(
    SELECT ARRAY[{_SUMS}]::bigint[]
    FROM psqlmessages_queuecount AS c WHERE c.queue_id = psqlmessages_queue.id
)"""  # noqa: S608 - names of fields


class ElementCounts(NamedTuple):
    """Numbers of elements by state, from ``SIZES``; ``limit + 1`` means more than ``limit``."""

    available: int
    scheduled: int
    reserved: int
    limit: int

    def format_count(self, state: str) -> str:
        """Format the number of elements in a state; ``total`` means in all states."""
        states = ("available", "scheduled", "reserved") if state == "total" else (state,)
        numbers = [getattr(self, each) for each in states]
        count = sum(min(number, self.limit) for number in numbers)
        return f"{'over ' if max(numbers) > self.limit else ''}{count:,}"


def size_limits(limit: int) -> list[int]:
    """Return the parameters of ``SIZES``. Counting up to ``limit + 1`` detects larger numbers."""
    return [limit + 1] * 3
