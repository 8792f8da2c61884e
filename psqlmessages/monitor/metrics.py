"""/metrics: metrics of the database, hub, queues, exchanges and jobs for Prometheus."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from heapq import nlargest
from itertools import accumulate
from typing import Any, Final

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages import silent_connections
from psqlmessages.client.refused_calls import refused_calls
from psqlmessages.conf import get_settings
from psqlmessages.exchanges.engine.counters import BUCKET_SECONDS, Histogram
from psqlmessages.exchanges.store.definitions import namespaces
from psqlmessages.exchanges.store.stats import (
    COUNTS,
    ELEMENT_OUTCOMES,
    EXISTS,
    MAX_MEASURED,
    SIZES,
    WORKER_TIMEOUT_SECONDS,
    AggregatedCounters,
    CounterRow,
    QueueCounters,
    size_limits,
)
from psqlmessages.monitor.now import current_problems_async
from psqlmessages.monitor.observer import running_observer
from psqlmessages.monitor.problem_checks import CHECK_NAMES, CHECKS
from psqlmessages.monitor.problems import Problem, Severity
from psqlmessages.monitor.queries import (
    BODIES_DISK_SIZE,
    IS_HEARTBEAT,
    QUEUES_DISK_SIZE,
    STREAMS_DISK_SIZE,
    Rows,
    read_once,
)
from psqlmessages.orm import direct_alias, resolve_alias
from psqlmessages.relay.hub import get_hub

# Metrics of queues and exchanges: sizes, counters, processing times

# Pushes can create any number of queues: export the queues with the most pushes.
MAX_QUEUES: Final = 50
MAX_EXCHANGES: Final = 200

_QUEUES_SQL: Final = f"""
    SELECT psqlmessages_queue.name, psqlmessages_queue.is_paused, {SIZES}, {COUNTS}
    FROM psqlmessages_queue WHERE {EXISTS} AND psqlmessages_queue.id IN (
        SELECT q.id FROM psqlmessages_queue AS q
        LEFT JOIN psqlmessages_queuecount AS c ON c.queue_id = q.id
        GROUP BY q.id, q.name ORDER BY coalesce(sum(c.puts), 0) DESC, q.name LIMIT %s
    ) ORDER BY psqlmessages_queue.name
"""  # noqa: S608 - built from constants
_EXCHANGES_SQL: Final = f"""
    SELECT x.name, x.is_running,
        (SELECT count(DISTINCT c.worker) FROM psqlmessages_exchangecount AS c WHERE {IS_HEARTBEAT}),
        x.is_running AND EXISTS (SELECT FROM psqlmessages_exchangecount AS c
         WHERE {IS_HEARTBEAT} AND c.missing_rules <> '{{}}'),
        (SELECT coalesce(array_agg(d.namespace || '/' || d.queue ORDER BY d.position), '{{}}')
         FROM psqlmessages_destination AS d WHERE d.exchange_id = x.id),
        (SELECT coalesce(json_agg(json_build_array(
            c.outcome, c.destination, c.count, c.seconds, c.buckets, c.selector_seconds
         )), '[]') FROM psqlmessages_exchangecount AS c WHERE c.exchange_id = x.id)
    FROM psqlmessages_exchange AS x ORDER BY x.name LIMIT %s
"""  # noqa: S608
_QUEUES_QUERY: Final = (_QUEUES_SQL, (*size_limits(MAX_MEASURED), MAX_QUEUES))
_EXCHANGES_QUERY: Final = (_EXCHANGES_SQL, (MAX_EXCHANGES,))
_ELEMENT_STATES: Final = ("available", "scheduled", "reserved")
_QUEUE_COUNTERS: Final = {
    "puts": "Elements pushed into the queue",
    "gets": "Elements popped from the queue",
    "reserves": "How often elements of the queue were reserved",
    "commits": "Reserved elements that were committed",
    "rollbacks": "Reserved elements that were rolled back",
    "dead_letters": "Elements that became dead letters",
    "removes": "Elements removed or drained from the queue",
}


def _family(kind: str, name: str, text: str, *labels: str) -> Any:
    """Create a metric family without values; the kind is Gauge, Counter or Histogram."""
    from prometheus_client import core

    return getattr(core, f"{kind}MetricFamily")(f"psqlmessages_{name}", text, labels=labels)


# These functions get the rows of all namespaces. Each row begins with its namespace.


def queue_families(rows: Rows) -> Iterator[Any]:
    """Yield the metric families of queues."""
    text = f"Elements in the queue, counted up to {MAX_MEASURED} of each state"
    sizes = _family("Gauge", "queue_elements", text, "namespace", "queue", "state")
    paused = _family("Gauge", "queue_paused", "Whether the queue is paused", "namespace", "queue")
    counters = {
        name: _family("Counter", f"queue_{name}", text, "namespace", "queue")
        for name, text in _QUEUE_COUNTERS.items()
    }
    for namespace, queue, is_paused, counts, values in rows:
        for state, count in zip(_ELEMENT_STATES, counts, strict=True):
            sizes.add_metric((namespace, queue, state), min(count, MAX_MEASURED))
        paused.add_metric((namespace, queue), float(is_paused))
        for name, value in QueueCounters(*values)._asdict().items():
            counters[name].add_metric((namespace, queue), value)
    yield from (sizes, paused, *counters.values())


def exchange_families(rows: Rows) -> Iterator[Any]:
    """Yield the metric families of exchanges."""

    def family(kind: str, name: str, text: str, *labels: str) -> Any:
        return _family(kind, f"exchange_{name}", text, "namespace", "exchange", *labels)

    running = family("Gauge", "running", "Whether the exchange should run")
    workers = family("Gauge", "workers", "Processes that run the exchange now")
    blocked = family("Gauge", "blocked", "Whether the exchange should run, but lacks rules")
    text = "Processing time by outcome; the count is the number of elements"
    durations = family("Histogram", "seconds", text, "outcome")
    copies = family("Counter", "copies", "Copies delivered to a destination", "destination")
    selectors = family("Counter", "selector_seconds", "Time in selectors")
    text = "How often the selector of a destination failed, which means no match"
    failures = family("Counter", "selector_failures", text, "destination")
    for namespace, name, is_running, worker_count, is_blocked, destinations, counter_rows in rows:
        exchange = (namespace, name)
        counters = AggregatedCounters.of(CounterRow(*row) for row in counter_rows)
        running.add_metric(exchange, float(is_running))
        workers.add_metric(exchange, worker_count)
        blocked.add_metric(exchange, float(is_blocked))
        selectors.add_metric(exchange, counters.selector_seconds)
        for outcome in ELEMENT_OUTCOMES:
            histogram = counters.outcomes.get(outcome, Histogram())
            durations.add_metric((*exchange, outcome.value), _buckets(histogram), histogram.seconds)
        for destination, count in _sum_by_destination(destinations, counters.copies):
            copies.add_metric((*exchange, destination), count)
        for destination, count in _sum_by_destination(destinations, counters.selector_failures):
            failures.add_metric((*exchange, destination), count)
    yield from (running, workers, blocked, durations, copies, selectors, failures)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return upper bounds and cumulative counts, as Prometheus expects."""
    upper_bounds = (*map(repr, BUCKET_SECONDS), "+Inf")
    return list(zip(upper_bounds, map(float, accumulate(histogram.buckets)), strict=True))


def _sum_by_destination(
    destinations: list[str], counts: dict[int, int]
) -> Iterable[tuple[str, int]]:
    """Add up the counts of destinations with the same queue; ``counts`` is by position."""
    sums: dict[str, int] = defaultdict(int)
    for position, destination in enumerate(destinations):
        sums[destination] += counts.get(position, 0)
    return sums.items()


def problem_family(problems: Iterable[Problem]) -> Any:
    """Count problems by check and severity. A check that could not run has no count, not even 0."""
    text = "Problems on the first page of the monitor, by check"
    family = _family("Gauge", "problems", text, "check", "severity")
    numbers = Counter((problem.check, problem.severity) for problem in problems)
    unknown = {problem.name for problem in problems if problem.check == "unchecked"}
    if any(problem.check == "database" for problem in problems):
        unknown.update(check.name for check in CHECKS)
    for check in CHECK_NAMES:
        for severity in Severity if check not in unknown else ():
            family.add_metric((check, severity.value), numbers[check, severity])
    return family


# Metrics of pipeline jobs

MAX_JOBS: Final = 200

_JOBS_SQL: Final = """
    SELECT name,
        state NOT IN ('stopped', 'failed')
            AND seen_at > statement_timestamp() - make_interval(secs => %s),
        state = 'failed', lag_seconds, rows, rows_per_second, last_batch,
        extract(epoch FROM seen_at)::float8
    FROM psqlmessages_pipelinejob ORDER BY name LIMIT %s
"""
_JOBS_QUERY: Final = (_JOBS_SQL, (WORKER_TIMEOUT_SECONDS, MAX_JOBS))
_JOB_GAUGES: Final = {
    "alive": "Whether the job sent a heartbeat in the last 10 s and has not ended",
    "failed": "Whether the job ended with an error",
    "lag_seconds": "Age of the oldest message that the job has not read yet",
    "rows": "Rows read since the job was started",
    "rows_per_second": "Rows read per second",
    "last_batch": "Number of the job's last batch; -1: none yet",
    "seen_timestamp_seconds": "Unix time of the job's last heartbeat",
}


def job_families(rows: Rows) -> Iterator[Any]:
    """Yield the metric families of jobs, without lags and rates that are unknown or outdated."""
    gauges = {
        name: _family("Gauge", f"pipeline_{name}", text, "namespace", "job")
        for name, text in _JOB_GAUGES.items()
    }
    for namespace, job, is_alive, *values in rows:
        for name, value in zip(_JOB_GAUGES, (is_alive, *values), strict=True):
            is_current = name not in ("lag_seconds", "rows_per_second") or is_alive
            if value is not None and is_current:
                gauges[name].add_metric((namespace, job), float(value))
    yield from gauges.values()


_TIMEOUT_SECONDS: Final = 5.0
_QUERY_TIMEOUT_SECONDS: Final = 2
# The number of topics is unlimited: export the topics with the most messages.
MAX_TOPICS: Final = 50

# The columns of _DATABASE, in this order.
_DATABASE_GAUGES: Final = {
    "notification_queue_usage_ratio": "How full PostgreSQL's notification queue is, 0 to 1",
    "sessions": "Sessions of nodes in the database",
    "nodes": "Nodes registered in the database",
    "topics": "Topics in the database",
    "listeners": "Pairs of a node and a topic it listens to",
    "notifiers": "Pairs of a node and a topic it sends to",
    "rules": "Rules in the database",
    "queues_disk_bytes": "Size of all queues on disk, with indexes",
    "streams_disk_bytes": "Size of all streams on disk, with indexes",
    "bodies_disk_bytes": "Size of all large bodies on disk, with indexes",
}
_INSTALLED_QUERY: Final = ("SELECT to_regnamespace('messages') IS NOT NULL", ())
_DATABASE: Final = f"""
    SELECT pg_catalog.pg_notification_queue_usage(),
        (SELECT count(*) FROM psqlmessages_session),
        (SELECT count(*) FROM psqlmessages_client),
        (SELECT count(*) FROM psqlmessages_topic),
        (SELECT count(*) FROM psqlmessages_membership WHERE kind = 'listen'),
        (SELECT count(*) FROM psqlmessages_membership WHERE kind = 'notify'),
        (SELECT count(*) FROM psqlmessages_auth),
        {QUEUES_DISK_SIZE}, {STREAMS_DISK_SIZE}, {BODIES_DISK_SIZE}
"""  # noqa: S608 - built from constants
_DATABASE_QUERY: Final = (_DATABASE, ())


@require_safe
@never_cache
async def metrics(request: HttpRequest) -> HttpResponse:
    """Return metrics of all namespaces and of this process in the format of Prometheus.

    404 unless the setting METRICS is on; 503 if prometheus-client is not installed. No login
    is needed, so restrict access with the server's bind address or with a proxy.
    """
    if not get_settings().METRICS:
        raise Http404("The setting METRICS is off.")
    try:
        import prometheus_client
    except ImportError:
        text = "/metrics needs prometheus-client: pip install 'psqlmessages[web]'\n"
        return HttpResponse(text, status=503, content_type="text/plain; charset=utf-8")
    problems, known = await asyncio.gather(current_problems_async(), _read_namespaces())
    registry = prometheus_client.CollectorRegistry()
    registry.register(MetricsCollector(known, problems))
    return HttpResponse(
        prometheus_client.generate_latest(registry),
        content_type=prometheus_client.CONTENT_TYPE_LATEST,
    )


async def _read_namespaces() -> dict[str, list[Rows | None] | None]:
    """Read all namespaces, the project's own first, without the alias for direct connections."""
    own, direct = resolve_alias(None), direct_alias()
    aliases = [own, *(alias for alias in namespaces() if alias not in (own, direct))]
    queries = (_INSTALLED_QUERY, _DATABASE_QUERY, _QUEUES_QUERY, _EXCHANGES_QUERY, _JOBS_QUERY)
    reads = (
        read_once("metrics", alias, queries, _TIMEOUT_SECONDS, query_seconds=_QUERY_TIMEOUT_SECONDS)
        for alias in aliases
    )
    return dict(zip(aliases, await asyncio.gather(*reads), strict=True))


class MetricsCollector:
    """A Prometheus collector for one response, from the answers of each namespace."""

    def __init__(
        self, answers: dict[str, list[Rows | None] | None], problems: Iterable[Problem] = ()
    ) -> None:
        self._problems = problems
        self._answers = {
            namespace: answer
            for namespace, answer in answers.items()
            # Other databases may lack the schema.
            if answer is None or answer[0] != [(False,)]
        }

    def collect(self) -> Iterator[Any]:
        """Yield all metric families."""
        yield from self.collect_database()
        yield from queue_families(self._rows(2))
        yield from exchange_families(self._rows(3))
        yield from job_families(self._rows(4))
        yield problem_family(self._problems)
        text = "Django connections closed because an answer was lost"
        yield _metric("Counter", "lost_answers", text, silent_connections.count_closed())
        text = "Calls of this process that were refused because a rule is missing"
        yield _metric("Counter", "refused_calls", text, refused_calls.total)
        yield from _hub_metrics()
        yield from _topic_metrics()

    def collect_database(self) -> Iterator[Any]:
        """Yield database metrics; an unknown value is omitted, not reported as 0."""
        up = _family("Gauge", "database_up", "Whether the database answered", "namespace")
        for namespace, answer in self._answers.items():
            up.add_metric((namespace,), float(answer is not None))
        yield up
        gauges = [
            _family("Gauge", name, text, "namespace") for name, text in _DATABASE_GAUGES.items()
        ]
        for namespace, *values in self._rows(1):
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric((namespace,), float(value))
        yield from gauges

    def _rows(self, position: int) -> Rows:
        """Return a query's rows in all namespaces; each row begins with its namespace."""
        return [
            (namespace, *row)
            for namespace, answer in self._answers.items()
            for row in (answer and answer[position]) or ()
        ]


def _hub_metrics() -> Iterator[Any]:
    """Yield metrics of this process's hub, without connecting it."""
    hub = get_hub()
    counters = hub.counters
    gauges = {
        "connected": ("Whether the hub is connected", hub.is_connected),
        "receivers": ("WebSockets and monitors that have nodes", counters.receivers),
        "nodes": ("Nodes of this process", counters.nodes),
        "echo_seconds": ("Round trip of the hub's last probe", hub.echo_seconds),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            yield _metric("Gauge", f"hub_{name}", text, value)
    for name, text in (
        ("received", "Notifications received by the hub"),
        ("delivered", "Frames that the hub delivered to receivers"),
        ("lost_connections", "How often the hub lost its connection"),
    ):
        yield _metric("Counter", f"hub_{name}", text, getattr(counters, name))


def _topic_metrics() -> Iterator[Any]:
    """Yield counters of the busiest topics, if the observer of this event loop is registered."""
    if (observer := running_observer()) is None:
        return
    topics = nlargest(MAX_TOPICS, observer.history.topics.values(), key=lambda topic: topic.count)
    for name, text, attribute in (
        ("messages", "Messages since the monitor started", "count"),
        ("bytes", "Bytes of bodies since the monitor started", "size"),
    ):
        family = _family("Counter", f"topic_{name}", text, "topic")
        for topic in topics:
            family.add_metric((topic.name,), getattr(topic, attribute))
        yield family


def _metric(kind: str, name: str, text: str, value: float) -> Any:
    """Create a metric family with one value, without labels."""
    family = _family(kind, name, text)
    family.add_metric((), float(value))
    return family
