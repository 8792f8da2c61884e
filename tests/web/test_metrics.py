"""/metrics: off unless asked for; true figures; however many topics there are, few are told."""

import re
import sys
from collections.abc import Callable
from itertools import islice

import pytest
from django.test import Client
from pytest_django import Settings
from websockets.sync.client import ClientConnection, connect

from project.postgres import Server
from psqlmessages.monitor import metrics
from tests.sql.conftest import World
from tests.web.conftest import PATIENT
from tests.web.site import Site

METRICS = {"NODE": "example", "METRICS": True}
ROLE = Server.owner


def figures(site: Site) -> dict[str, float]:
    """The figures of the site, by their names and labels."""
    status, text = site.get("/metrics")
    assert status == 200, text
    return {
        name: float(value)
        for name, value in re.findall(r"^(psqlmessages_\S+) (\S+)$", text, re.MULTILINE)
    }


def test_it_is_not_there_unless_the_setting_is_on(site: Site) -> None:
    assert site.get("/metrics")[0] == 404


def test_it_tells_what_is_in_the_database(new_site: Callable[..., Site], world: World) -> None:
    world.rules("user1 SENDER Topic T W 10", "user2 LISTENER Topic T R 10")
    world.node("user2", "LISTENER").ok("topic_listen", "T")
    world.node("user1", "SENDER").ok("topic_notify", "T")
    found = figures(new_site(PSQLMESSAGES=METRICS, PATCHED=PATIENT))
    assert found["psqlmessages_database_up"] == 1
    assert 0 <= found["psqlmessages_notification_queue_usage_ratio"] < 0.5
    names = ("sessions", "nodes", "topics", "listeners", "notifiers", "rules")
    assert [found[f"psqlmessages_{name}"] for name in names] == [2, 2, 1, 1, 1, 2]


def test_it_tells_what_the_hub_does(new_site: Callable[..., Site], world: World) -> None:
    site = new_site(PSQLMESSAGES=METRICS, PATCHED=PATIENT)
    world.rules(f"{ROLE} web.* Topic T RW 10", "user1 SENDER Topic T W 10")
    site.user("ann", idents=["web.*"])
    before = figures(site)
    with opened(site, "ann") as socket:
        ask(socket, '{"op":"init","ident":"web.1","ref":1}')
        ask(socket, '{"op":"topic_listen","topic":"T","ref":2}')
        during = figures(site)
        assert during["psqlmessages_hub_connected"] == 1
        assert during["psqlmessages_hub_receivers"] == 1
        assert during["psqlmessages_hub_nodes"] == 1
        sender = world.node("user1", "SENDER")
        sender.ok("topic_notify", "T")
        for _ in range(10):
            sender.ok("topic_send", "T", "x")
        arrived = (frame for frame in socket if '"Type":"Topic"' in str(frame))
        assert len(list(islice(arrived, 10))) == 10
        after = figures(site)
    delivered = "psqlmessages_hub_delivered_total"
    assert after[delivered] - before.get(delivered, 0) >= 10


def opened(site: Site, username: str) -> ClientConnection:
    """A WebSocket of a user who is logged in."""
    cookie = {"Cookie": f"sessionid={site.login(username)}"}
    return connect(
        f"{site.ws_url}/ws/node/", origin=site.url, additional_headers=cookie, open_timeout=60
    )


def ask(socket: ClientConnection, frame: str) -> None:
    """Send a request that must succeed."""
    socket.send(frame)
    for answer in socket:
        if '"ref"' in str(answer):
            assert '"Err":"0"' in str(answer), answer
            return


def test_what_is_not_known_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    families = list(metrics.Figures(None).collect_database())
    assert [(family.name, family.samples[0].value) for family in families] == [
        ("psqlmessages_database_up", 0)
    ]


def test_it_says_what_it_lacks(
    settings: Settings, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.PSQLMESSAGES = METRICS
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = client.get("/metrics")
    assert answer.status_code == 503
    assert "pip install 'psqlmessages[web]'" in answer.text


class Topic:
    """What the monitor remembers of a topic."""

    def __init__(self, number: int) -> None:
        self.name, self.count, self.size = f'T"\n{number}', number, 10 * number


def test_the_busiest_topics_are_told_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Observer:
        class history:  # noqa: N801
            topics = {str(number): Topic(number) for number in range(1000)}  # noqa: RUF012

    monkeypatch.setattr(metrics, "running_observer", Observer)
    messages, sizes = metrics._of_topics()
    told = [sample.value for sample in messages.samples]
    assert told == list(range(999, 999 - metrics.TOPICS, -1))
    assert sizes.samples[0].value == 9990
