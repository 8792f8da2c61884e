"""/metrics: off unless asked for; true figures; few topics, however many there are."""

import asyncio
import json
import re
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace

import pytest
from django.http import HttpResponse
from django.test import Client, RequestFactory
from prometheus_client.parser import text_string_to_metric_families
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.models import Destination, Element, Exchange, ExchangeCount, Queue
from psqlmessages.monitor import healthz as module
from psqlmessages.monitor import metrics, queries
from psqlmessages.monitor.healthz import healthz
from psqlmessages.relay import revalidation
from tests.conftest import TestedServer
from tests.exchanges.conftest import namespace
from tests.sql.conftest import Pair, World
from tests.web.conftest import PATIENT
from tests.web.measured import count, forget, job
from tests.web.receivers import in_loop
from tests.web.site import Site
from tests.web.sockets import Visitor

METRICS = {"NODE": "example", "METRICS": True}


def test_it_is_not_there_unless_the_setting_is_on(client: Client):
    assert client.get("/metrics").status_code == 404


def test_it_tells_of_the_database_and_hub(new_site: Callable[..., Site], world: World, pair: Pair):
    site, sender = new_site(PSQLMESSAGES=METRICS, PATCHED=PATIENT), pair[0]
    world.rules(f"{Server.owner} web.* Topic T RW 10")
    forget()
    job("traffic", lag_seconds=1.5)
    job("archive", silent=60, lag_seconds=1.5)
    assert site.get("/healthz") == (200, '{"status": "ok"}')
    before = samples(site)
    forget()
    figures = (("alive", "traffic"), ("lag_seconds", "traffic"), ("alive", "archive"))
    assert [before[f"pipeline_{figure}", name] for figure, name in figures] == [1, 1.5, 0]
    assert ("pipeline_lag_seconds", "archive") not in before
    assert before["database_up",] == 1
    assert 0 <= before["notification_queue_usage_ratio",] < 0.5
    names = ("sessions", "nodes", "topics", "listeners", "notifiers", "rules")
    assert [before[name,] for name in names] == [2, 2, 1, 1, 1, 5]
    assert before["bodies_disk_bytes",] > before["streams_disk_bytes",] > 0
    site.user("ann", idents=["web.*"])
    with closing(Visitor(site, cookie=site.login("ann"))) as visitor:
        visitor.ok("init", ident="web.1")
        visitor.ok("topic_listen", topic="T")
        during = samples(site)
        assert [during[f"hub_{name}",] for name in ("connected", "receivers", "nodes")] == [1, 1, 1]
        for _ in range(10):
            sender.ok("topic_send", "T", "x")
        for _ in range(10):
            visitor.message()
        delivered = ("hub_delivered_total",)
        assert samples(site)[delivered] - before.get(delivered, 0) >= 10


def test_figures_that_are_not_known_are_left_out(settings: Settings, client: Client, monkeypatch):
    # One database does not answer, one has no schema, and one may not be read.
    answers = {"default": None, "eu": [[(False,)], *[None] * 4], "us": [[(True,)], *[None] * 4]}
    found = list(metrics.MetricsCollector(answers).collect_database())
    known = [sample for family in found for sample in family.samples]
    assert [(sample.name, sample.labels, sample.value) for sample in known] == [
        ("psqlmessages_database_up", {"namespace": "default"}, 0),
        ("psqlmessages_database_up", {"namespace": "us"}, 1),
    ]
    settings.PSQLMESSAGES = METRICS
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = client.get("/metrics")
    assert answer.status_code == 503
    assert "pip install 'psqlmessages[web]'" in answer.text


def test_only_the_busiest_topics_have_metrics(monkeypatch):
    topics = {str(n): SimpleNamespace(name=f'T"\n{n}', count=n, size=10 * n) for n in range(1000)}
    observer = SimpleNamespace(history=SimpleNamespace(topics=topics))
    monkeypatch.setattr(metrics, "running_observer", lambda: observer)
    messages, sizes = metrics._topic_metrics()
    told = [sample.value for sample in messages.samples]
    assert told == list(range(999, 999 - metrics.MAX_TOPICS, -1))
    assert sizes.samples[0].value == 9990


def test_each_database_with_the_schema_is_a_namespace(settings: Settings, world: World):
    settings.PSQLMESSAGES = METRICS
    with namespace("eu"), namespace("bare", NAME="postgres"), namespace("direct"):
        text = asyncio.run(metrics.metrics(RequestFactory().get("/metrics"))).text
    found = re.findall(r"database_up\{(.*)", text)
    assert found == ['namespace="default"} 1.0', 'namespace="eu"} 1.0']
    assert set(re.findall('rules\\{namespace="(.*?)"', text)) == {"default", "eu"}


@pytest.fixture
def counting(new_site: Callable[..., Site], world: World) -> Site:
    """A site with METRICS on, without exchanges."""
    site = new_site(PSQLMESSAGES=METRICS, PATCHED=PATIENT)
    for model in (ExchangeCount, Destination, Exchange, Element, Queue):
        model.objects.all().delete()
    return site


def samples(site: Site, namespace: str = "default") -> dict[tuple[str, ...], float]:
    """The samples of a namespace and of the process: name, and other labels' values by name."""
    status, text = site.get("/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.pop("namespace", namespace) != namespace:
                continue
            labels = [value for _, value in sorted(sample.labels.items())]
            found[sample.name.removeprefix("psqlmessages_"), *labels] = sample.value
    return found


def test_the_busiest_queues_have_metrics_of_sizes_and_counters(counting: Site, world: World):
    name = '<script>alert(1)</script>"}} 1\nx{{a="\\'
    world.rule("user1", "W", "Queue", "*", "RW", 60)
    worker = world.program("user1")
    worker.ok("push_many", "W", name, ["a", "b", "c", "d"])
    worker.connection.execute("SELECT messages.push('W', %s, 'e', delay => 3600)", [name])
    worker.query("SELECT count(*) FROM messages.pop('W', %s)", name)
    worker.ok("commit", "W", worker.query("SELECT lease FROM messages.reserve('W', %s)", name))
    worker.query("SELECT count(*) FROM messages.reserve('W', %s)", name)
    worker.ok("pause", "W", name)
    found = samples(counting)
    assert [found["queue_elements", name, kind] for kind in metrics._ELEMENT_STATES] == [1, 1, 1]
    assert found["queue_paused", name] == 1
    names = ("puts", "gets", "reserves", "commits", "rollbacks", "dead_letters")
    assert [found[f"queue_{count}_total", name] for count in names] == [5, 1, 2, 1, 0, 0]
    for number in range(metrics.MAX_QUEUES + 5):
        worker.ok("push_many", "W", f"q{number:02}", ["x"] * (number + 6))
    text = counting.get("/metrics")[1]
    told = re.findall(r'psqlmessages_queue_puts_total\{namespace="default",queue="(.*?)"\}', text)
    assert told == [f"q{number:02}" for number in range(5, metrics.MAX_QUEUES + 5)]


def test_metrics_of_exchanges_contain_a_consistent_histogram(counting: Site):
    exchange = Exchange.objects.create(name="x1", source_queue="orders")
    for position, queue in enumerate(("eu", "audit", "eu")):
        Destination.objects.create(exchange=exchange, position=position, queue=queue)
    buckets = [1, 2, *[0] * 10, 4]
    copies = (("to", 0, 5), ("to", 2, 3), ("bad_selector", 0, 1), ("bad_selector", 2, 1))
    count(
        exchange, ("ok", -1, 7), *copies, seconds=40, buckets=buckets, selector_seconds=0.5,
        missing_rules=["r"],
    )  # fmt: skip
    found = samples(counting)
    assert found["exchange_running", "x1"] == 1
    assert found["exchange_workers", "x1"] == 1
    assert found["exchange_blocked", "x1"] == 1
    assert found["exchange_selector_seconds_total", "x1"] == 1
    assert found["exchange_copies_total", "default/eu", "x1"] == 16
    assert found["exchange_copies_total", "default/audit", "x1"] == 0
    assert found["exchange_selector_failures_total", "default/eu", "x1"] == 4
    bounds = ("0.001", "0.002", "5.0", "+Inf")
    assert [found["exchange_seconds_bucket", "x1", most, "ok"] for most in bounds] == [2, 6, 6, 14]
    assert found["exchange_seconds_count", "x1", "ok"] == 14
    assert found["exchange_seconds_sum", "x1", "ok"] == 80


async def ask(method: str = "get") -> HttpResponse:
    return await healthz(getattr(RequestFactory(), method)("/healthz"))


@in_loop
async def test_it_answers_though_postgresql_does_not(server: TestedServer, monkeypatch):
    # A database that accepts connections and never answers.
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        stalled.setblocking(False)
        address = f"host=127.0.0.1 port={stalled.getsockname()[1]}"
        monkeypatch.setattr(queries, "database_dsn", lambda _: address)
        monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 0.5)
        answers = await asyncio.gather(*(ask() for _ in range(20)))
        assert {answer.status_code for answer in answers} == {503}
        assert json.loads(answers[0].content) == {"status": "unavailable", "broken": ["database"]}
        stalled.accept()[0].close()
        with pytest.raises(BlockingIOError):
            stalled.accept()
    monkeypatch.setattr(queries, "database_dsn", lambda _: server.url())
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 60.0)
    answer = await ask()
    assert answer.status_code == 200
    assert answer["Cache-Control"].startswith("max-age=0, no-cache, no-store")
    assert (await ask("post")).status_code == 405


@in_loop
async def test_it_names_the_broken_part(server: TestedServer, monkeypatch):
    """The database answers new connections, but queries for users hang."""
    monkeypatch.setattr(queries, "database_dsn", lambda _: server.url())
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(revalidation, "SLOW_QUERY_SECONDS", 0.0)
    started, release = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(60)

    hanging = asyncio.create_task(revalidation.in_thread(hang))
    assert await asyncio.to_thread(started.wait, 60)
    during = await ask()
    release.set()
    await hanging
    assert json.loads(during.content) == {"status": "unavailable", "broken": ["users"]}
    assert (during.status_code, (await ask()).status_code) == (503, 200)
