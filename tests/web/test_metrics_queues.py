"""/metrics on queues and exchanges: sizes, counters that only grow, a histogram as it should be."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from psqlmessages.models import Destination, Element, Exchange, ExchangeCount, Queue
from psqlmessages.monitor import metrics_queues
from tests.sql.conftest import World
from tests.web.conftest import PATIENT
from tests.web.site import Site
from tests.web.test_metrics import METRICS

Outcome = ExchangeCount.Outcome


@pytest.fixture
def counting(new_site: Callable[..., Site], world: World) -> Site:
    """A site with METRICS on, without exchanges."""
    site = new_site(PSQLMESSAGES=METRICS, PATCHED=PATIENT)
    for model in (ExchangeCount, Destination, Exchange, Element, Queue):
        model.objects.all().delete()
    return site


def samples(site: Site) -> dict[tuple[str, ...], float]:
    """The samples of the site: name, and the labels' values in the order of the labels' names."""
    status, text = site.get("/metrics")
    assert status == 200
    return {
        (
            sample.name.removeprefix("psqlmessages_"),
            *(sample.labels[label] for label in sorted(sample.labels)),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_busiest_queues_are_told_with_sizes_and_counters(counting: Site, world: World) -> None:
    # Names do not break the format.
    name = '<script>alert(1)</script>"}} 1\nx{{a="\\'
    world.rule("user1", "W", "Queue", "*", "RW", 60)
    worker = world.program("user1")
    worker.ok("push_many", "W", name, ["a", "b", "c", "d"])
    worker.connection.execute("SELECT messages.push('W', %s, 'e', delay => 3600)", [name])
    worker.query("SELECT count(*) FROM messages.pop('W', %s)", name)
    lease = worker.query("SELECT lease FROM messages.reserve('W', %s)", name)
    worker.ok("commit", "W", lease)
    worker.query("SELECT count(*) FROM messages.reserve('W', %s)", name)
    worker.ok("pause", "W", name)
    found = samples(counting)
    sizes = [found["queue_elements", name, kind] for kind in metrics_queues._KINDS]
    assert sizes == [1, 1, 1]
    assert found["queue_paused", name] == 1
    names = ("puts", "gets", "reserves", "commits", "rollbacks", "dead_letters")
    counted = [found[f"queue_{count}_total", name] for count in names]
    assert counted == [5, 1, 2, 1, 0, 0]
    for number in range(metrics_queues.QUEUES + 5):
        worker.ok("push_many", "W", f"q{number:02}", ["x"] * (number + 6))
    text = counting.get("/metrics")[1]
    told = re.findall(r'psqlmessages_queue_puts_total\{queue="(.*?)"\}', text)
    assert told == [f"q{number:02}" for number in range(5, metrics_queues.QUEUES + 5)]


def test_exchanges_are_told_with_a_histogram_that_adds_up(counting: Site) -> None:
    exchange = Exchange.objects.create(name="x1", source_queue="orders")
    for position, queue in enumerate(("eu", "audit", "eu")):
        Destination.objects.create(exchange=exchange, position=position, queue=queue)
    buckets = [1, 2, *[0] * 10, 4]
    for seen in ("2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z"):
        given = {"exchange": exchange, "worker": uuid.uuid4(), "seen_at": seen}
        ExchangeCount.objects.create(
            **given, outcome=Outcome.OK, count=7, seconds=40, buckets=buckets, selector_seconds=0.5
        )
        ExchangeCount.objects.create(**given, outcome=Outcome.NO_ROUTE, count=1)
        for destination, count in ((0, 5), (2, 3)):
            for outcome, number in ((Outcome.TO, count), (Outcome.BAD_SELECTOR, 1)):
                ExchangeCount.objects.create(
                    **given, outcome=outcome, destination=destination, count=number
                )
    found = samples(counting)
    assert found["exchange_running", "x1"] == 1
    assert found["exchange_workers", "x1"] == 1
    assert found["exchange_selector_seconds_total", "x1"] == 1
    assert found["exchange_copies_total", "default/eu", "x1"] == 16
    assert found["exchange_copies_total", "default/audit", "x1"] == 0
    assert found["exchange_selector_failures_total", "default/eu", "x1"] == 4
    histogram = [
        found["exchange_seconds_bucket", "x1", most, "ok"]
        for most in ("0.001", "0.002", "5.0", "+Inf")
    ]
    assert histogram == [2, 6, 6, 14]
    assert found["exchange_seconds_count", "x1", "ok"] == 14
    assert found["exchange_seconds_sum", "x1", "ok"] == 80
