"""The monitor's WebSocket over a real Daphne: what it tells, to whom, and how much."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from threading import Event
from time import monotonic

import pytest
from django.contrib.auth.models import User
from websockets.exceptions import ConnectionClosed

from benchmarks import cpu_time
from project.postgres import Server
from tests.sql.conftest import Program, World
from tests.web.browser import MONITOR_RULE
from tests.web.site import Site
from tests.web.sockets import Watcher

ROLE = Server.owner
ALL = ("psqlmessages.view_monitor", "psqlmessages.view_bodies")
HOSTILE = "<script>alert(1)</script>"

Open = Callable[..., Watcher]
Pair = Callable[[str], tuple[Program, Program]]


@pytest.fixture
def opened(site: Site, world: World) -> Iterator[Open]:
    """Open the socket of a user of the staff: `opened(topic, user="…", permissions=…)`."""
    world.rules(MONITOR_RULE)
    watchers = ExitStack()

    def open_one(
        topic: str | None = None,
        *,
        user: str = "watcher",
        permissions: tuple[str, ...] = ALL,
        at: Site = site,
    ) -> Watcher:
        at.user(user, is_staff=True, permissions=permissions)
        return watchers.enter_context(closing(Watcher(at, at.login(user), topic)))

    with watchers:
        yield open_one


@pytest.fixture
def pair(world: World) -> Pair:
    def make(topic: str) -> tuple[Program, Program]:
        world.rule("user1", "SENDER", "Topic", topic, "W", 60)
        world.rule("user2", "LISTENER", "Topic", topic, "R", 60)
        sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER")
        listener.ok("topic_listen", topic)
        sender.ok("topic_notify", topic)
        return sender, listener

    return make


def test_users_without_the_permission_are_refused(site: Site):
    assert Watcher(site).refused()[0] == 4401
    for number, (is_staff, permissions) in enumerate(((True, ()), (False, ALL), (True, ALL[1:]))):
        name = f"somebody{number}"
        site.user(name, is_staff=is_staff, permissions=permissions)
        code, reason = Watcher(site, site.login(name)).refused()
        assert (code, "psqlmessages.view_monitor" in reason) == (4403, True)
    site.user("watcher", is_staff=True, permissions=ALL)
    with pytest.raises(Exception, match="403"):
        Watcher(site, site.login("watcher"), origin="http://evil.example")


def test_losing_the_permission_or_logging_out_ends_the_page(opened: Open, site: Site):
    watchers = {name: opened(user=name).live() for name in ("fired", "moved", "left")}
    User.objects.get(username="fired").user_permissions.clear()
    User.objects.filter(username="moved").update(is_staff=False)
    site.logout(watchers["left"].visitor.cookie)
    codes = {name: watcher.closed()[0] for name, watcher in watchers.items()}
    assert codes == {"fired": 4403, "moved": 4403, "left": 4401}


def test_bodies_need_the_permission_and_disappear_with_it(opened: Open, pair: Pair):
    watcher = opened("BODIES").live()
    blind = opened("BODIES", user="b", permissions=ALL[:1]).live()
    sender, _ = pair("BODIES")
    sender.ok("topic_send", "BODIES", "secret")
    watcher.until(lambda w: [m.get("body") for m in w.tail] == ["secret"])
    blind.until(lambda w: w.tail)
    assert blind.tail[0]["size"] == 6
    assert "secret" not in json.dumps(blind.frames)
    user = User.objects.get(username="watcher")
    user.user_permissions.remove(user.user_permissions.get(codename="view_bodies"))
    watcher.until(lambda w: w.frames[-1].get("may_see_bodies") is False)
    assert "secret" not in json.dumps(watcher.frames[-1])
    sender.ok("topic_send", "BODIES", "secret again")
    watcher.until(lambda w: len(w.tail) == 2)
    assert "secret" not in json.dumps(watcher.frames[-1])


def test_a_hundred_messages_are_a_hundred_and_the_monitor_is_no_listener(opened: Open, pair: Pair):
    watcher = opened().live()
    sender, listener = pair("HUNDRED")
    for number in range(60):
        sender.ok("topic_send", "HUNDRED", str(number % 10))
    sender.ok("topic_send_many", "HUNDRED", ["x"] * 40)
    watcher.until(lambda w: w.topics.get("HUNDRED", {}).get("count") == 100)
    assert watcher.topics["HUNDRED"]["size"] == 100
    watcher.until(lambda w: w.topics["HUNDRED"]["rate"] == 0 and w.topics["HUNDRED"]["last"])
    listener.ok("topic_unlisten", "HUNDRED")
    number, _ = sender.error("topic_send", "HUNDRED", "anybody there?")
    assert number == 10, "the monitor counts as no listener"


def test_senders_and_listeners_follow_the_changes(opened: Open, pair: Pair, world: World):
    watcher = opened().live()
    sender, listener = pair("WHO")
    watcher.until(lambda w: members(w, "WHO") == (["SENDER"], ["LISTENER"]))
    listener.ok("topic_unlisten", "WHO")
    watcher.until(lambda w: members(w, "WHO") == (["SENDER"], []))
    world.execute("DELETE FROM messages.auth WHERE ident = 'SENDER'")
    watcher.until(lambda w: members(w, "WHO") == ([], []))
    sender.close()
    watcher.until(lambda w: "topic_unlisten LISTENER WHO" in w.events)
    watcher.until(lambda w: "topic_unnotify SENDER WHO" in w.events)
    watcher.ask(op="watch", topic="WHO")
    watcher.until(lambda w: w.topic.get("senders") == [])
    watcher.ask(op="list")
    watcher.until(lambda w: "WHO" in w.topics)


def members(watcher: Watcher, topic: str) -> tuple[list[str], list[str]] | None:
    row = watcher.topics.get(topic)
    return row and (row["senders"], row["listeners"])


def test_the_page_of_a_topic_has_its_rules_and_messages_as_they_are(opened: Open, pair: Pair):
    watcher = opened(HOSTILE).live()
    sender, _ = pair(HOSTILE)
    sender.ok("topic_send", HOSTILE, json.dumps(HOSTILE), "token-7", "json")
    watcher.until(lambda w: w.tail and len(w.topic.get("rules") or ()) == 3)
    shown = {(rule["ident"], rule["mode"]) for rule in watcher.topic["rules"]}
    assert shown == {("SENDER", "W"), ("LISTENER", "R"), ("example.monitor.*", "O")}
    (message,) = watcher.tail
    assert (watcher.topic["name"], message["from"]) == (HOSTILE, "SENDER")
    assert (json.loads(message["body"]), message["enc"]) == (HOSTILE, "json")
    assert message["wants_answer"]
    assert "token-7" not in json.dumps(watcher.frames)
    assert "topics" not in watcher.frames[0]
    sender.ok("topic_send", HOSTILE, "x" * 100_000)
    watcher.until(lambda w: len(w.tail) == 2)
    assert (watcher.tail[1]["is_large"], watcher.tail[1]["size"]) == (True, 100_000)
    assert "xxx" not in json.dumps(watcher.frames)


def test_the_figures_of_the_server_are_known(opened: Open, world: World):
    world.rules("user1 NODE Rpc NODE W 5")
    world.node("user1", "NODE")
    watcher = opened().live()
    # Sites of other tests may have monitors.
    nodes = "SELECT count(*) FROM psqlmessages_client"
    watcher.until(lambda w: w.health and w.health["nodes"] == world.owner.query(nodes) > 1)
    assert watcher.health is not None
    assert watcher.health["sessions"] == watcher.health["nodes"]
    assert 0 <= watcher.health["usage"] < 0.1
    assert 0 < watcher.health["round_trip"] < 60
    watcher.until(lambda w: w.health["waiting"] == 0)
    watcher.until(lambda w: w.health["echo"] is not None)
    watcher.until(lambda w: w.frames[-1]["lag"] is not None)


def test_without_its_rule_it_says_so_and_a_rule_taken_away_leaves_a_gap(opened: Open, world: World):
    world.execute("DELETE FROM messages.auth")
    watcher = opened().until(lambda w: w.state["is"] == "not_observing")
    assert watcher.state["role_without_rule"] == ROLE
    world.rules(MONITOR_RULE)
    gaps = len(watcher.live().state["gaps"])
    world.execute("UPDATE messages.auth SET mode = 'R'")
    watcher.until(lambda w: w.state["is"] == "not_observing" and w.state["role_without_rule"])
    world.execute("UPDATE messages.auth SET mode = 'O'")
    watcher.live()
    assert len(watcher.state["gaps"]) == gaps + 1


def test_a_lost_session_is_reported_and_restored(opened: Open, world: World, pair: Pair):
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


def test_a_busy_topic_makes_few_frames(opened: Open, pair: Pair):
    watcher = opened("BUSY").live()
    sender, _ = pair("BUSY")
    before = len(watcher.frames)
    for _ in range(20):
        sender.ok("topic_send_many", "BUSY", ["x"] * 100)
    watcher.until(lambda w: w.topic.get("count") == 2000)
    since, until = watcher.frames[before]["now"], watcher.frames[-1]["now"]
    assert len(watcher.frames) - before <= 5 * (until - since) + 2
    assert max(len(frame.get("topic", {}).get("tail", ())) for frame in watcher.frames) <= 50


MALFORMED = (
    "", "[]", "{}", '{"op":"drop"}', "[" * 4000, '{"op":"watch"}', '{"op":"list","page":"1"}',
    '{"op":"list","sort":"x"}', '{"op":"watch","topic":""}', '{"op":"watch","topic":"a\\u0000"}',
    '{"op":"watch","topic":"\\ud800"}', '{"op":"echo"}', '{"op":"echo","n":"1"}',
    '{"op":"echo","n":1' + " " * 5000 + "}",
)  # fmt: skip

MEASURED_SECONDS, MESSAGES_PER_SECOND = 10, 2000


@pytest.mark.nightly
def test_twenty_consoles_cost_at_most_twice_as_much_as_one(opened: Open, site: Site, pair: Pair):
    """CPU time of the server process; half of the consoles, of 20 users, show the busy topic."""
    sender, _ = pair("BUSY")
    is_over, sent = Event(), [0]

    def send() -> None:
        began = monotonic()
        while not is_over.wait(max(0, began + sent[0] / MESSAGES_PER_SECOND - monotonic())):
            sender.ok("topic_send_many", "BUSY", ["x" * 100] * 100)
            sent[0] += 100

    def look(watcher: Watcher) -> None:
        with suppress(ConnectionClosed, TimeoutError):
            while not is_over.is_set():
                watcher.read()

    shares, consoles = {}, []
    with ThreadPoolExecutor(21) as threads:
        threads.submit(send)
        for number in (1, 20):
            while len(consoles) < number:
                topic = "BUSY" if len(consoles) % 2 else None
                consoles.append(opened(topic, user=f"watcher{len(consoles)}").live())
                threads.submit(look, consoles[-1])
            used, before = cpu_time.seconds(site.pid), sent[0]
            is_over.wait(MEASURED_SECONDS)
            shares[number] = (cpu_time.seconds(site.pid) - used) / (sent[0] - before)
        is_over.set()
    print(f"CPU seconds of the server process per message, by number of consoles: {shares}")
    assert shares[20] <= 2 * shares[1]


def test_malformed_or_too_many_requests_close_the_page(opened: Open):
    codes = {}
    for text in MALFORMED:
        watcher = opened()
        watcher.visitor.connection.send(text)
        codes[text] = watcher.closed()[0]
    assert codes == dict.fromkeys(MALFORMED, 4400)
    watcher = opened()
    # The site may close the WebSocket earlier.
    with suppress(ConnectionClosed):
        for _ in range(5000):
            watcher.ask(op="echo", n=0)
    assert watcher.closed()[0] == 4429
