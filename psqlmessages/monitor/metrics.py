"""/metrics: figures for Prometheus, where the setting METRICS is on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from heapq import nlargest
from typing import Any, Final

import psycopg
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages import lost_answers
from psqlmessages.client.options import conninfo
from psqlmessages.conf import get_settings
from psqlmessages.databases import dsn
from psqlmessages.monitor import metrics_pipeline, metrics_queues
from psqlmessages.monitor.observer import running_observer
from psqlmessages.relay.hub import get_hub

_PATIENCE_SECONDS: Final = 5.0
_STATEMENT_SECONDS: Final = 2
# Who may send may make up names of topics: so many are told, and no more.
TOPICS: Final = 50

_DATABASE: Final = {
    "notification_queue_usage_ratio": "How full PostgreSQL's notification queue is, 0 to 1",
    "sessions": "Sessions of nodes in the database",
    "nodes": "Nodes registered in the database",
    "topics": "Topics in the database",
    "listeners": "Pairs of a node and a topic it listens to",
    "notifiers": "Pairs of a node and a topic it sends to",
    "rules": "Rules in the database",
}
_QUERY: Final = """
    SELECT pg_catalog.pg_notification_queue_usage(),
        (SELECT count(*) FROM psqlmessages_session),
        (SELECT count(*) FROM psqlmessages_client),
        (SELECT count(*) FROM psqlmessages_topic),
        (SELECT count(*) FROM psqlmessages_membership WHERE kind = 'listen'),
        (SELECT count(*) FROM psqlmessages_membership WHERE kind = 'notify'),
        (SELECT count(*) FROM psqlmessages_auth)
"""


# The rows of each question; None of one that took too long.
Answers = list[list[tuple[Any, ...]] | None]


@require_safe
@never_cache
async def metrics(request: HttpRequest) -> HttpResponse:
    """Answer with figures of the database and of this process, in Prometheus' format.

    404 unless the setting METRICS is on; 503 where prometheus-client is not installed. Needs no
    login: who may reach it is up to the address the server is bound to, or to a proxy.
    """
    if not get_settings().METRICS:
        raise Http404("The setting METRICS is off.")
    try:
        import prometheus_client
    except ImportError:
        text = "/metrics needs prometheus-client: pip install 'psqlmessages[web]'\n"
        return HttpResponse(text, status=503, content_type="text/plain; charset=utf-8")
    registry = prometheus_client.CollectorRegistry()
    registry.register(Figures(await _read_database()))
    return HttpResponse(
        prometheus_client.generate_latest(registry),
        content_type=prometheus_client.CONTENT_TYPE_LATEST,
    )


class Figures:
    """A collector for one answer: the figures of one moment."""

    def __init__(self, database: Answers | None) -> None:
        self._database = database

    def describe(self) -> list[Any]:
        """Name no family beforehand: which there are depends on the moment."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the families of figures."""
        yield from self.collect_database()
        yield from self.collect_queues()
        yield _of_process()
        yield from _of_hub()
        yield from _of_topics()

    def collect_database(self) -> Iterator[Any]:
        """Yield those of the database; what is not known is left out, and is never 0."""
        is_up = self._database is not None
        yield _gauge("database_up", "Whether the database answered just now", is_up)
        answer = self._database[0] if self._database else None
        (values,) = answer or [()]
        for (name, text), value in zip(_DATABASE.items(), values, strict=False):
            yield _gauge(name, text, value)

    def collect_queues(self) -> Iterator[Any]:
        """Yield those of queues, exchanges and the pipeline's jobs, if they are known."""
        _, queues, exchanges, jobs = self._database or (None, None, None, None)
        if queues is not None:
            yield from metrics_queues.queue_families(queues)
        if exchanges is not None:
            yield from metrics_queues.exchange_families(exchanges)
        if jobs is not None:
            yield from metrics_pipeline.families(jobs)


def _of_process() -> Any:
    text = "Connections of Django that were closed because an answer was lost"
    return _counter("lost_answers", text, [((), lost_answers.closed())])


def _of_hub() -> Iterator[Any]:
    """Yield what the hub of this process does and has done; asking for it connects nothing."""
    hub = get_hub()
    counters = hub.counters
    yield _gauge("hub_connected", "Whether the hub has its connection", hub.is_connected)
    yield _gauge("hub_receivers", "WebSockets and monitors that have nodes", counters.receivers)
    yield _gauge("hub_nodes", "Nodes of this process", counters.nodes)
    if hub.echo_seconds is not None:
        yield _gauge("hub_echo_seconds", "Time of its last NOTIFY to itself", hub.echo_seconds)
    for name, text in (
        ("received", "Notifications that came to the hub"),
        ("delivered", "Frames that the hub handed to receivers"),
        ("lost_connections", "How often the hub lost its connection"),
    ):
        yield _counter(f"hub_{name}", text, [((), getattr(counters, name))])


def _of_topics() -> Iterator[Any]:
    """Yield the messages of the busiest topics, where this process observes."""
    if (observer := running_observer()) is None:
        return
    busiest = nlargest(TOPICS, observer.history.topics.values(), key=lambda topic: topic.count)
    for name, text, counted in (
        ("messages", "Messages since the monitor observes", "count"),
        ("bytes", "Bytes of bodies since the monitor observes", "size"),
    ):
        values = [((topic.name,), getattr(topic, counted)) for topic in busiest]
        yield _counter(f"topic_{name}", text, values, labels=("topic",))


def _gauge(name: str, text: str, value: float) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"psqlmessages_{name}", text, value=float(value))


def _counter(
    name: str, text: str, values: list[tuple[tuple[str, ...], int]], labels: tuple[str, ...] = ()
) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"psqlmessages_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


async def _read_database() -> Answers | None:
    reading = asyncio.ensure_future(_ask())
    # Not awaited itself: a connection that hangs may hang in its ending too.
    done, _ = await asyncio.wait({reading}, timeout=_PATIENCE_SECONDS)
    if not done:
        reading.cancel()
        return None
    return reading.result()


async def _ask() -> Answers | None:
    try:
        address = conninfo(dsn(), "metrics")
        async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
            await connection.execute(f"SET statement_timeout = '{_STATEMENT_SECONDS}s'")
            questions = ((_QUERY, ()), *metrics_queues.QUESTIONS, metrics_pipeline.QUESTION)
            return [await _answer(connection, *question) for question in questions]
    except (psycopg.Error, OSError):
        return None


async def _answer(
    connection: psycopg.AsyncConnection[tuple[Any, ...]], question: str, values: tuple[Any, ...]
) -> list[tuple[Any, ...]] | None:
    try:
        return await (await connection.execute(question, values)).fetchall()
    except psycopg.errors.QueryCanceled:
        return None
