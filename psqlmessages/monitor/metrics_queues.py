"""Metrics of queues and exchanges: sizes, what was counted, and how long elements took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from psqlmessages.graph.counted import (
    ALIVE_SECONDS,
    BUCKET_SECONDS,
    ELEMENT_OUTCOMES,
    Counted,
    Histogram,
    Row,
)
from psqlmessages.graph.sizes import COUNTS, MOST_MEASURED, SIZES, Counts, limits

# Who may push may make up names of queues: so many are told, those with the most pushes.
QUEUES: Final = 50
EXCHANGES: Final = 200

_QUEUES: Final = f"""
    SELECT psqlmessages_queue.name, psqlmessages_queue.is_paused, {SIZES}, {COUNTS}
    FROM psqlmessages_queue WHERE psqlmessages_queue.id IN (
        SELECT q.id FROM psqlmessages_queue AS q
        LEFT JOIN psqlmessages_queuecount AS c ON c.queue_id = q.id
        GROUP BY q.id, q.name ORDER BY coalesce(sum(c.puts), 0) DESC, q.name LIMIT %s
    ) ORDER BY psqlmessages_queue.name
"""  # noqa: S608 - put together from our own texts
_EXCHANGES: Final = """
    SELECT x.name, x.is_running,
        (SELECT count(DISTINCT c.worker) FROM psqlmessages_exchangecount AS c
         WHERE c.exchange_id = x.id AND c.outcome = 'ok'
           AND c.seen_at > statement_timestamp() - make_interval(secs => %s)),
        (SELECT coalesce(array_agg(d.namespace || '/' || d.queue ORDER BY d.position), '{}')
         FROM psqlmessages_destination AS d WHERE d.exchange_id = x.id),
        (SELECT coalesce(json_agg(json_build_array(
            c.outcome, c.destination, c.count, c.seconds, c.buckets, c.selector_seconds
         )), '[]') FROM psqlmessages_exchangecount AS c WHERE c.exchange_id = x.id)
    FROM psqlmessages_exchange AS x ORDER BY x.name LIMIT %s
"""
# What is asked, with its values.
QUESTIONS: Final = (
    (_QUEUES, (*limits(MOST_MEASURED), QUEUES)),
    (_EXCHANGES, (ALIVE_SECONDS, EXCHANGES)),
)
_KINDS: Final = ("available", "scheduled", "reserved")
_COUNTED: Final = {
    "puts": "Elements pushed into the queue",
    "gets": "Elements popped or drained from the queue",
    "reserves": "How often elements of the queue were reserved",
    "commits": "Reserved elements that were committed",
    "rollbacks": "Reserved elements that were given back",
    "dead_letters": "Elements that became dead letters",
}


def queue_families(rows: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the families of the queues."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    sizes = GaugeMetricFamily(
        "psqlmessages_queue_elements",
        f"Elements in the queue, counted up to {MOST_MEASURED} of each state",
        labels=("queue", "state"),
    )
    paused = GaugeMetricFamily(
        "psqlmessages_queue_paused", "Whether the queue is paused", labels=("queue",)
    )
    counters = {
        name: CounterMetricFamily(f"psqlmessages_queue_{name}", text, labels=("queue",))
        for name, text in _COUNTED.items()
    }
    for queue, is_paused, numbers, counted in rows:
        for kind, number in zip(_KINDS, numbers, strict=True):
            sizes.add_metric((queue, kind), min(number, MOST_MEASURED))
        paused.add_metric((queue,), float(is_paused))
        for name, number in Counts(*counted)._asdict().items():
            counters[name].add_metric((queue,), number)
    yield from (sizes, paused, *counters.values())


def exchange_families(rows: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the families of the exchanges."""
    running, workers, took, copies, selectors, failures = families = _empty_families()
    for exchange, is_running, number, places, counts in rows:
        counted = Counted.of(Row(*values) for values in counts)
        running.add_metric((exchange,), float(is_running))
        workers.add_metric((exchange,), number)
        selectors.add_metric((exchange,), counted.selector_seconds)
        for outcome in ELEMENT_OUTCOMES:
            histogram = counted.outcomes.get(outcome, Histogram())
            took.add_metric((exchange, outcome.value), _buckets(histogram), histogram.seconds)
        for place, copied in _by_place(places, counted.copies).items():
            copies.add_metric((exchange, place), copied)
        for place, failed in _by_place(places, counted.selector_failures).items():
            failures.add_metric((exchange, place), failed)
    yield from families


def _empty_families() -> tuple[Any, ...]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    exchange = ("exchange",)
    destination = ("exchange", "destination")
    return (
        GaugeMetricFamily(
            "psqlmessages_exchange_running", "Whether the exchange is to run", labels=exchange
        ),
        GaugeMetricFamily(
            "psqlmessages_exchange_workers", "Processes that run the exchange now", labels=exchange
        ),
        HistogramMetricFamily(
            "psqlmessages_exchange_seconds",
            "How long elements took, by outcome; their number is its count",
            labels=("exchange", "outcome"),
        ),
        CounterMetricFamily(
            "psqlmessages_exchange_copies", "Copies delivered to a destination", labels=destination
        ),
        CounterMetricFamily(
            "psqlmessages_exchange_selector_seconds", "Time in selectors", labels=exchange
        ),
        CounterMetricFamily(
            "psqlmessages_exchange_selector_failures",
            "How often the selector of a destination failed, which counts as no",
            labels=destination,
        ),
    )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Add the buckets up, as Prometheus has them: each holds all that took less."""
    passed, found = 0, []
    for most, number in zip((*BUCKET_SECONDS, float("inf")), histogram.buckets, strict=True):
        passed += number
        found.append(("+Inf" if most == float("inf") else repr(most), float(passed)))
    return found


def _by_place(places: list[str], copies: dict[int, int]) -> dict[str, int]:
    """Name destinations; two that are equal are told as one."""
    found: dict[str, int] = defaultdict(int)
    for position, place in enumerate(places):
        found[place] += copies.get(position, 0)
    return found
