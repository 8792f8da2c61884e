"""/metrics: off unless asked for; true figures; few topics, however many there are."""

import re
import sys
from collections.abc import Callable
from contextlib import closing

import pytest
from django.test import Client
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.monitor import metrics
from tests.sql.conftest import World
from tests.web.conftest import PATIENT
from tests.web.site import Site
from tests.web.sockets import Visitor

METRICS = {"NODE": "example", "METRICS": True}


def figures(site: Site) -> dict[str, float]:
    """The figures of the site, by their names and labels."""
    status, text = site.get("/metrics")
    assert status == 200, text
    return {
        name: float(value)
        for name, value in re.findall(r"^psqlmessages_(\S+) (\S+)$", text, re.MULTILINE)
    }


def test_it_is_not_there_unless_the_setting_is_on(site: Site) -> None:
    assert site.get("/metrics")[0] == 404


def test_it_tells_what_is_in_the_database_and_what_the_hub_does(
    new_site: Callable[..., Site], world: World
) -> None:
    site = new_site(PSQLMESSAGES=METRICS, PATCHED=PATIENT)
    world.rules(
        f"{Server.owner} web.* Topic T RW 10",
        "user1 SENDER Topic T W 10",
        "user2 LISTENER Topic T R 10",
    )
    world.node("user2", "LISTENER").ok("topic_listen", "T")
    sender = world.node("user1", "SENDER")
    sender.ok("topic_notify", "T")
    assert site.get("/healthz") == (200, '{"status": "ok"}')
    before = figures(site)
    assert before["database_up"] == 1
    assert 0 <= before["notification_queue_usage_ratio"] < 0.5
    names = ("sessions", "nodes", "topics", "listeners", "notifiers", "rules")
    assert [before[name] for name in names] == [2, 2, 1, 1, 1, 3]
    site.user("ann", idents=["web.*"])
    with closing(Visitor(site, cookie=site.login("ann"))) as visitor:
        visitor.ok("init", ident="web.1")
        visitor.ok("topic_listen", topic="T")
        during = figures(site)
        assert [during[f"hub_{name}"] for name in ("connected", "receivers", "nodes")] == [1, 1, 1]
        for _ in range(10):
            sender.ok("topic_send", "T", "x")
        for _ in range(10):
            visitor.message()
        delivered = "hub_delivered_total"
        assert figures(site)[delivered] - before.get(delivered, 0) >= 10


def test_figures_that_are_not_known_are_left_out(
    settings: Settings, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = list(metrics.Figures(None).collect_database())
    assert [(family.name, family.samples[0].value) for family in families] == [
        ("psqlmessages_database_up", 0)
    ]
    # A package that is missing is named.
    settings.PSQLMESSAGES = METRICS
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = client.get("/metrics")
    assert answer.status_code == 503
    assert "pip install 'psqlmessages[web]'" in answer.text


class Topic:
    """What the monitor remembers of a topic."""

    def __init__(self, number: int) -> None:
        self.name, self.count, self.size = f'T"\n{number}', number, 10 * number


def test_only_the_busiest_topics_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Observer:
        class history:  # noqa: N801
            topics = {str(number): Topic(number) for number in range(1000)}  # noqa: RUF012

    monkeypatch.setattr(metrics, "running_observer", Observer)
    messages, sizes = metrics._of_topics()
    told = [sample.value for sample in messages.samples]
    assert told == list(range(999, 999 - metrics.TOPICS, -1))
    assert sizes.samples[0].value == 9990
