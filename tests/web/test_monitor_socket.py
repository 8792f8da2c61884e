"""The monitor's WebSocket over a real Daphne: what it tells, to whom, and how much."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from django.contrib.auth.models import User
from websockets.exceptions import ConnectionClosed

from project.postgres import Server
from psqlmessages.monitor.pacing import FRAMES
from tests.sql.conftest import Program, World
from tests.web.site import Site
from tests.web.watchers import Watcher

ROLE = Server.owner
RULE = f"{ROLE} example.monitor.* Topic * O 60"
ALL = ("psqlmessages.view_monitor", "psqlmessages.view_bodies")
HOSTILE = "<script>alert(1)</script>"

Open = Callable[..., Watcher]


@pytest.fixture
def opened(site: Site, world: World) -> Iterator[Open]:
    """Open the socket of a user of the staff: `opened(topic, user="…", permissions=…)`."""
    world.rules(RULE)
    watchers: list[Watcher] = []

    def open_one(
        topic: str | None = None,
        *,
        user: str = "watcher",
        permissions: tuple[str, ...] = ALL,
        at: Site = site,
    ) -> Watcher:
        at.user(user, is_staff=True, permissions=permissions)
        watchers.append(Watcher(at, at.login(user), topic))
        return watchers[-1]

    yield open_one
    for watcher in watchers:
        watcher.close()


@pytest.fixture
def pair(world: World) -> Callable[[str], tuple[Program, Program]]:
    """Make a sender and a listener of a topic."""

    def make(topic: str) -> tuple[Program, Program]:
        world.rule("user1", "SENDER", "Topic", topic, "W", 60)
        world.rule("user2", "LISTENER", "Topic", topic, "R", 60)
        sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER")
        listener.ok("topic_listen", topic)
        sender.ok("topic_notify", topic)
        return sender, listener

    return make


# Who may


def test_who_is_not_logged_in_is_refused(site: Site) -> None:
    assert Watcher(site).refused()[0] == 4401


@pytest.mark.parametrize(("is_staff", "permissions"), [(True, ()), (False, ALL), (True, ALL[1:])])
def test_who_has_not_the_permission_is_refused(
    site: Site, is_staff: bool, permissions: tuple[str, ...]
) -> None:
    site.user("somebody", is_staff=is_staff, permissions=permissions)
    code, reason = Watcher(site, site.login("somebody")).refused()
    assert (code, "psqlmessages.view_monitor" in reason) == (4403, True)


def test_another_origin_is_refused(site: Site) -> None:
    site.user("watcher", is_staff=True, permissions=ALL)
    with pytest.raises(Exception, match="403"):
        Watcher(site, site.login("watcher"), origin="http://evil.example")


def test_a_permission_that_is_taken_away_ends_the_page(opened: Open) -> None:
    watcher = opened().live()
    User.objects.get(username="watcher").user_permissions.clear()
    assert watcher.closed()[0] == 4403


def test_staff_that_is_staff_no_more_ends_the_page(opened: Open) -> None:
    watcher = opened().live()
    User.objects.filter(username="watcher").update(is_staff=False)
    assert watcher.closed()[0] == 4403


def test_logging_out_ends_the_page(opened: Open, site: Site) -> None:
    watcher = opened().live()
    site.logout(watcher.visitor.cookie)
    assert watcher.closed()[0] == 4401


def test_bodies_vanish_with_the_permission(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened("BODIES").live()
    sender, _ = pair("BODIES")
    sender.ok("topic_send", "BODIES", "secret")
    watcher.until(lambda w: [m.get("body") for m in w.tail] == ["secret"])
    user = User.objects.get(username="watcher")
    user.user_permissions.remove(user.user_permissions.get(codename="view_bodies"))
    watcher.until(lambda w: w.frames[-1].get("may_see_bodies") is False)
    assert "secret" not in json.dumps(watcher.frames[-1])
    sender.ok("topic_send", "BODIES", "secret again")
    watcher.until(lambda w: len(w.tail) == 2)
    assert "secret" not in json.dumps(watcher.frames[-1])


def test_without_the_permission_no_frame_holds_a_body(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    seeing, blind = opened("HIDDEN").live(), opened("HIDDEN", user="b", permissions=ALL[:1]).live()
    sender, _ = pair("HIDDEN")
    sender.ok("topic_send", "HIDDEN", "secret")
    seeing.until(lambda w: w.tail and w.tail[0]["body"] == "secret")
    blind.until(lambda w: w.tail)
    assert blind.tail[0]["size"] == 6
    assert "secret" not in json.dumps(blind.frames)


# What it tells


def test_a_hundred_messages_are_a_hundred(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened().live()
    sender, _ = pair("HUNDRED")
    for number in range(60):
        sender.ok("topic_send", "HUNDRED", str(number % 10))
    sender.ok("topic_send_many", "HUNDRED", ["x"] * 40)
    watcher.until(lambda w: w.topics.get("HUNDRED", {}).get("count") == 100)
    assert watcher.topics["HUNDRED"]["size"] == 100
    watcher.until(lambda w: w.topics["HUNDRED"]["rate"] == 0 and w.topics["HUNDRED"]["last"])
    assert sum(count for frame in watcher.frames for count in peaks(frame)) >= 100


def peaks(frame: dict) -> list[int]:
    return [count for row in frame.get("topics", ()) for count in row["buckets"][1:]]


def test_who_sends_and_listens_follows_what_happens(
    opened: Open, pair: Callable[[str], tuple[Program, Program]], world: World
) -> None:
    watcher = opened().live()
    sender, listener = pair("WHO")
    watcher.until(lambda w: members(w, "WHO") == (["SENDER"], ["LISTENER"]))
    listener.ok("topic_unlisten", "WHO")
    watcher.until(lambda w: members(w, "WHO") == (["SENDER"], []))
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'SENDER'")
    watcher.until(lambda w: members(w, "WHO") == ([], []))
    sender.close()
    watcher.until(lambda w: "topic_unlisten LISTENER WHO" in w.events)
    watcher.until(lambda w: "topic_unnotify SENDER WHO" in w.events)


def members(watcher: Watcher, topic: str) -> tuple[list[str], list[str]] | None:
    row = watcher.topics.get(topic)
    return row and (row["notifiers"], row["listeners"])


def test_the_monitor_counts_as_no_listener(opened: Open, world: World) -> None:
    opened().live()
    world.rules("user1 ALONE Topic NOBODY W 60")
    alone = world.node("user1", "ALONE")
    alone.ok("topic_notify", "NOBODY")
    assert alone.error("topic_send", "NOBODY", "anybody there?")[0] == 10


def test_the_page_of_a_topic_has_its_rules_and_messages(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened("PAGE").live()
    sender, _ = pair("PAGE")
    sender.ok("topic_send", "PAGE", '{"a": 1}', "token-7", "json")
    watcher.until(lambda w: w.tail and len(w.topic.get("rules") or ()) == 3)
    shown = {(rule["ident"], rule["mode"]) for rule in watcher.topic["rules"]}
    assert shown == {("SENDER", "W"), ("LISTENER", "R"), ("example.monitor.*", "O")}
    (message,) = watcher.tail
    assert (message["from"], message["body"], message["enc"]) == ("SENDER", '{"a": 1}', "json")
    assert message["wants_answer"]
    assert "token-7" not in json.dumps(watcher.frames)
    assert "topics" not in watcher.frames[0]


def test_a_large_body_is_a_size(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened("LARGE").live()
    sender, _ = pair("LARGE")
    sender.ok("topic_send", "LARGE", "x" * 100_000)
    watcher.until(lambda w: w.tail)
    assert (watcher.tail[0]["is_kept"], watcher.tail[0]["size"]) == (True, 100_000)
    assert watcher.topic["size"] == 100_000
    assert "xxx" not in json.dumps(watcher.frames)


def test_hostile_names_and_bodies_arrive_as_they_are(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened(HOSTILE).live()
    sender, _ = pair(HOSTILE)
    sender.ok("topic_send", HOSTILE, HOSTILE)
    watcher.until(lambda w: w.tail)
    assert (watcher.topic["name"], watcher.tail[0]["body"]) == (HOSTILE, HOSTILE)


def test_a_page_can_turn_to_another_topic_and_back_to_the_list(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened().live()
    pair("TURN")
    watcher.ask(op="watch", topic="TURN")
    watcher.until(lambda w: w.topic.get("notifiers") == ["SENDER"])
    watcher.ask(op="watch", topic=None)
    watcher.until(lambda w: "TURN" in w.topics)


def test_the_figures_of_the_server_are_known(opened: Open, world: World) -> None:
    world.rules("user1 NODE Rpc NODE W 5")
    world.node("user1", "NODE")
    watcher = opened().live()
    # Sites of other tests may still have monitors, too.
    nodes = "SELECT count(*) FROM psqlmessages_client"
    watcher.until(lambda w: w.health and w.health["nodes"] == world.owner.query(nodes) > 1)
    assert watcher.health is not None
    assert watcher.health["sessions"] == watcher.health["nodes"]
    assert 0 <= watcher.health["usage"] < 0.1
    assert 0 < watcher.health["round_trip"] < 60
    # Others may commit at the moment.
    watcher.until(lambda w: w.health["waiting"] == 0)
    watcher.until(lambda w: w.health["echo"] is not None)
    watcher.until(lambda w: w.frames[-1]["lag"] is not None)


# How it stands


def test_without_its_rule_it_says_so_and_with_it_goes_live(opened: Open, world: World) -> None:
    world.owner.connection.execute("DELETE FROM messages.auth")
    watcher = opened().until(lambda w: w.state["is"] == "not_observing")
    assert watcher.state["missing_role"] == ROLE
    world.rules(RULE)
    watcher.live()


def test_a_rule_that_is_taken_away_is_missed_and_leaves_a_gap(opened: Open, world: World) -> None:
    watcher = opened().live()
    gaps = len(watcher.state["gaps"])
    world.owner.connection.execute("UPDATE messages.auth SET mode = 'R'")
    watcher.until(lambda w: w.state["is"] == "not_observing" and w.state["missing_role"])
    world.owner.connection.execute("UPDATE messages.auth SET mode = 'O'")
    watcher.live()
    assert len(watcher.state["gaps"]) == gaps + 1


def test_a_lost_session_is_told_and_comes_back(
    opened: Open, world: World, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened().live()
    sender, _ = pair("LOST")
    watcher.until(lambda w: "LOST" in w.topics)
    world.superuser().query(
        "SELECT pg_terminate_backend(s.pid) FROM psqlmessages_session AS s"
        " JOIN psqlmessages_client AS c ON c.session_id = s.id"
        " WHERE c.ident LIKE 'example.monitor.%%'"
    )
    watcher.until(lambda w: "connection_lost" in w.events)
    watcher.until(lambda w: w.state["is"] == "live" and w.state["gaps"])
    sender.ok("topic_send", "LOST", "again")
    watcher.until(lambda w: w.topics["LOST"]["count"] == 1)


# Bounds


def test_who_echoes_nothing_gets_no_more_and_is_closed(opened: Open) -> None:
    watcher = opened()
    for _ in range(FRAMES):
        watcher.read(echo=False)
    # That takes ten seconds, in which nothing more comes.
    assert watcher.refused() == (4408, "the page reads too slowly")


def test_who_was_behind_gets_a_snapshot_and_no_number_is_wrong(
    opened: Open, patient_site: Site, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened(at=patient_site).live()
    other = opened(user="other", at=patient_site).live()
    sender, _ = pair("BEHIND")
    for _ in range(FRAMES):
        watcher.read(echo=False)
        other.read()
    sender.ok("topic_send_many", "BEHIND", ["x"] * 50)
    other.until(lambda w: w.topics["BEHIND"]["count"] == 50)
    assert watcher.topics["BEHIND"]["count"] == 0
    watcher.ask(op="echo", n=watcher.frames[-1]["n"])
    assert watcher.read()["op"] == "snapshot"
    assert watcher.topics["BEHIND"]["count"] == 50


def test_a_busy_topic_makes_few_frames(
    opened: Open, pair: Callable[[str], tuple[Program, Program]]
) -> None:
    watcher = opened("BUSY").live()
    sender, _ = pair("BUSY")
    before = len(watcher.frames)
    for _ in range(20):
        sender.ok("topic_send_many", "BUSY", ["x"] * 100)
    watcher.until(lambda w: w.topic.get("count") == 2000)
    since, until = watcher.frames[before]["now"], watcher.frames[-1]["now"]
    assert len(watcher.frames) - before <= 5 * (until - since) + 2
    tails = [frame.get("topic", {}).get("tail", ()) for frame in watcher.frames]
    assert max(map(len, tails)) <= 50


MALFORMED = (
    *("", "[]", "{}", '{"op":"drop"}', "[" * 4000),
    *('{"op":"watch"}', '{"op":"watch","topic":""}', '{"op":"watch","topic":"a\\u0000"}'),
    *('{"op":"watch","topic":"\\ud800"}', '{"op":"echo"}', '{"op":"echo","n":"1"}'),
    '{"op":"echo","n":1' + " " * 5000 + "}",
)


@pytest.mark.parametrize("request_text", MALFORMED)
def test_malformed_requests_close_the_page(opened: Open, request_text: str) -> None:
    watcher = opened()
    watcher.visitor.connection.send(request_text)
    assert watcher.closed()[0] == 4400


def test_a_flood_of_requests_closes_the_page(opened: Open) -> None:
    watcher = opened()
    # It may be closed before it has sent them all.
    with suppress(ConnectionClosed):
        for _ in range(5000):
            watcher.ask(op="echo", n=0)
    assert watcher.closed()[0] == 4429
