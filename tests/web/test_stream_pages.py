"""The monitor's pages of streams and nodes: what they show, and what operators do there."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models import F
from django.http import HttpResponse
from django.utils import timezone

from project.postgres import Server
from psqlmessages.models import Auth, Subscription, Topic
from psqlmessages.monitor import actions, listing, stream_status
from tests.sql.conftest import Program, World
from tests.web.pages import Page, logged_in

LIST, STREAM = "/monitor/streams/", "/monitor/streams/S/"
NODES, NODE = "/monitor/nodes/", "/monitor/nodes/READER/"


@pytest.fixture(autouse=True)
def fresh() -> None:
    listing._results.clear()


@pytest.fixture
def reader(world: World) -> Program:
    """READER has subscribed to S, and has three messages to read: 1, 2 and 3."""
    world.rules(
        "user1 READER Topic S R 60", "user2 WRITER Topic S W 60", "user1 READER Queue jobs* RW 60",
        f"{Server.owner} READER Topic S R 60",
    )  # fmt: skip
    reader, writer = world.node("user1", "READER"), world.program("user2")
    reader.read("READER", "S", 600)
    for body in "123":
        writer.ok("publish", "WRITER", "S", body)
    return reader


def text(client: Any, path: str) -> str:
    listing._results.clear()
    return Page(path, client.get(path)).text


def shown(response: HttpResponse) -> str:
    """Return the text of a page without the characters that isolate names."""
    return re.sub("[\u2068\u2069]", "", Page("", response).text)


def set_read(age: int) -> None:
    Subscription.objects.update(pinged_at=timezone.now() - timedelta(seconds=age))


def test_lists_and_pages_show_subscriptions_and_nodes(database: World, reader: Program):
    client = logged_in("view_monitor")
    for path, parts in (
        (LIST, ("READER", "S", "alive", "3", "1 to 1 of 1")),
        (f"{LIST}?state=alive&q=read&sort=-read", ("READER",)),
        (f"{LIST}?state=silent", ("Nothing matches.",)),
        (f"{LIST}?fragment=subscriptions", ("READER",)),
        (STREAM, ("READER", "alive", "Unread 3", "until all subscriptions have read")),
        (f"{LIST}?name=S", ("Unread 3",)),
        (NODES, ("READER", "user1", "connected")),
        (f"{NODES}?state=closed", ("Nothing matches.",)),
        (f"{NODES}?state=connected&sort=-since&q=USER1", ("READER",)),
        (NODE, ("connected", f"pid {reader.pid}", "user1", "S", "alive", "jobs*", "RW")),
        (f"{NODES}?name=WRITER", ("not connected", "user2", "subscribed to no stream")),
    ):
        found = text(client, path)
        assert [part for part in parts if part not in found] == [], (path, found)
    for path in (f"{LIST}?sort=x", f"{LIST}?x=1", f"{NODES}?page=0", f"{STREAM}?q=1", f"{NODE}?x="):
        assert client.get(path).status_code == 400, path
    for path in (f"{LIST}none/", f"{NODES}none/", f"{NODES}*/", f"{LIST}?name=A*"):
        assert client.get(path).status_code == 404, path
    for path in (LIST, STREAM, NODES, NODE):
        assert logged_in().get(path).status_code == 403, path


def test_alive_means_read_recently(database: World, reader: Program):
    client = logged_in("view_monitor")
    for age, timeout, state in ((50, 600, "alive"), (70, 600, "silent since"), (70, 60, "expired")):
        set_read(age)
        Subscription.objects.update(timeout=timeout)
        assert state in text(client, STREAM), age


def test_a_gap_in_the_samples_is_no_zero(database: World, reader: Program, monkeypatch):
    (row,), _ = stream_status.read_subscriptions(topic="S")
    now = stream_status.time()
    monkeypatch.setattr(stream_status, "time", lambda: now + 30)
    stream_status.read_subscriptions(topic="S")
    assert stream_status._samples.values(row.id)[-4:] == [3, None, None, 3]
    assert len(row.lines) == 2


def test_an_operator_resets_and_deletes_subscriptions(database: World, reader: Program):
    # Otherwise housekeeping may remove messages that READER has read.
    Topic.objects.update(retention=3600)
    client = logged_in("view_monitor", "change_subscription", "delete_subscription")
    assert "Read again from the start" in text(client, STREAM)
    assert reader.got("READER", "S", 600) == ["1", "2", "3"]
    query = "SELECT published_at FROM psqlmessages_streammessage ORDER BY id"
    third = database.execute(query).fetchall()[2][0].isoformat()
    url = f"/monitor/subscriptions/{Subscription.objects.get().pk}"
    for fields, said, logged, left in (
        ({"to": "start"}, "READER will read 3 messages of S again.", "3 messages are read", "123"),
        ({"to": "end"}, "READER will skip 0 messages of S", "0 messages are skipped", ""),
        ({"to": "time", "time": third}, "will read 1 message of S", "1 message is read", "3"),
    ):
        set_read(120)
        before = Subscription.objects.get().position
        assert said in shown(client.post(f"{url}/reset/", fields))
        assert Subscription.objects.get().position == before, "it acts before it is confirmed"
        response = client.post(f"{url}/reset/", {**fields, "confirmed": "1"})
        assert (response.status_code, response["Location"]) == (302, STREAM)
        assert "silent since" in text(client, STREAM), "a reset is no read"
        assert logged in LogEntry.objects.latest("pk").change_message
        assert "".join(reader.got("READER", "S", 600)) == left
    for fields, error in (
        ({"to": "x"}, "start, end or time"),
        ({"to": "time", "time": "soon"}, "'soon' is not a time"),
        ({"to": "time", "time": "2026-13-01T00:00"}, "is not a time"),
    ):
        response = client.post(f"{url}/reset/", {**fields, "confirmed": "1"})
        assert response.status_code == 400
        assert error in response.text.replace("&#x27;", "'")
    client.post(f"{url}/reset/", {"to": "start", "confirmed": "1"})
    Subscription.objects.update(pinged_at=F("pinged_at") - timedelta(days=1))
    assert "has expired. It starts again" in client.post(f"{url}/reset/", {"to": "end"}).text
    client.post(f"{url}/reset/", {"to": "start", "confirmed": "1"})
    assert "alive" in text(client, STREAM)
    assert "READER will not read 3 unread messages" in shown(client.post(f"{url}/delete/"))
    assert client.post(f"{url}/delete/", {"confirmed": "1"}).status_code == 302
    assert not Subscription.objects.exists()
    assert "3 unread messages" in LogEntry.objects.latest("pk").change_message
    assert client.post(f"{url}/delete/", {"confirmed": "1"}).status_code == 404


def test_actions_need_permission_rule_and_lock(database: World, reader: Program, monkeypatch):
    url = f"/monitor/subscriptions/{Subscription.objects.get().pk}/delete/"
    assert "Actions" not in text(logged_in("view_monitor"), STREAM)
    chief = logged_in("view_monitor", "delete_subscription")
    changer = logged_in("view_monitor", "change_subscription")
    buttons = "Read again from", "Delete the sub"
    found = [[each in text(client, STREAM) for each in buttons] for client in (chief, changer)]
    assert found == [[False, True], [True, False]]
    assert "psqlmessages.delete_subscription" in changer.post(url, {"confirmed": "1"}).text
    reset = chief.post(url.replace("delete", "reset"), {"to": "end", "confirmed": "1"})
    assert "psqlmessages.change_subscription" in reset.text
    assert chief.get(url).status_code == 405
    monkeypatch.setattr(actions, "_LOCK_TIMEOUT", "50ms")
    with reader.connection.transaction():
        reader.read("READER", "S", 600)
        response = chief.post(url, {"confirmed": "1"})
    assert (response.status_code, "Nothing was changed." in response.text) == (400, True)
    Auth.objects.filter(role=Server.owner).delete()
    response = chief.post(url, {"confirmed": "1"})
    assert response.status_code == 400
    assert "INSERT INTO messages.auth" in response.text
    assert Subscription.objects.exists()
    assert not LogEntry.objects.exists()
