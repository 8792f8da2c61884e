"""One journey through each page in a real browser: it lives, shows names as text, can be read.

That nothing is written to the console and no policy is violated, `visitors` checks at the end.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from playwright.sync_api import Locator, Page, expect
from pytest_django import Settings

from project.example import CHAT_TOPIC
from project.postgres import Server
from psqlmessages.models import Auth, Client, Element, Exchange, PipelineJob, Queue, Topic, Traffic
from tests.conftest import TestedServer
from tests.sql.conftest import World
from tests.web.browser import AWAY, LIVE, MONITOR_RULE, Visitors, live, pale_text, too_wide, until
from tests.web.desks import CLIENTS, EXCHANGES, IDENTITIES, QUEUES, RULES, TOPICS
from tests.web.measured import HOSTILE, forget, job, report, window
from tests.web.site import ROOT, Site
from tests.web.test_admin_exchanges import new

TRAFFIC = "/monitor/traffic/"
NARROW = {"width": 400, "height": 800}


@pytest.fixture(autouse=True)
def chief(site: Site) -> Iterator[User]:
    """An administrator, and nothing counted."""
    forget()
    yield site.user("chief", is_staff=True, is_superuser=True)
    forget()


def listeners(page: Page) -> Locator:
    return page.get_by_label("Listeners now").get_by_role("listitem")


def add_rule(page: Page, role: str, ident: str, dest: str, mode: str) -> None:
    page.goto(f"{RULES}add/")
    for label, text in (("Role", role), ("Ident", ident), ("Destination", dest), ("Timeout", "60")):
        page.get_by_label(label).fill(text)
    page.get_by_label("Type").select_option("Topic")
    page.get_by_label("Mode").select_option(mode)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".messagelist .success")).to_contain_text("added successfully")


def test_the_monitor_shows_what_rules_nodes_and_messages_do(visitors: Visitors, world: World):
    page, admin = visitors("chief"), visitors("chief")
    page.goto("/monitor/")
    expect(page.locator("#banner")).to_contain_text("example.monitor.*")
    page.get_by_role("button", name="Add this rule").click()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.locator("#banner")).to_be_hidden()
    page.evaluate("window.isTheSame = true")

    add_rule(admin, "user2", "LISTENER", HOSTILE, "R")
    world.rule("user1", "SENDER", "Topic", HOSTILE, "W", 60)
    sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER")
    listener.ok("topic_listen", HOSTILE)
    sender.ok("topic_notify", HOSTILE)
    row = page.get_by_role("row").filter(has_text=HOSTILE)
    expect(row).to_contain_text("SENDER")
    expect(row).to_contain_text("LISTENER")
    sender.ok("topic_send_many", HOSTILE, ["x"] * 10)
    expect(row.locator("time")).not_to_have_text("none")
    assert page.evaluate("window.isTheSame"), "it was loaded anew"

    row.get_by_role("link", name=HOSTILE).click()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(listeners(page)).to_have_text(["LISTENER"])
    sender.ok("topic_send", HOSTILE, "<img src=x onerror=alert(1)>")
    expect(page.locator("#tail")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("#tail img").count() == 0
    expect(page.locator("#totals")).to_contain_text("11")
    # Styled by our own rules: plotly's layers lie upon each other.
    chart = page.locator("#chart .main-svg").first
    expect(chart).to_be_visible()
    assert chart.evaluate("e => getComputedStyle(e).position") == "absolute"
    shown = page.locator("#tail li").count()
    page.get_by_role("button", name="Pause").click()
    sender.ok("topic_send", HOSTILE, "held")
    expect(page.locator("#totals")).to_contain_text("12")
    expect(page.locator("#tail li")).to_have_count(shown)
    page.get_by_role("button", name="Paused").click()
    expect(page.locator("#tail li").first).to_contain_text("held")

    topic = visitors("chief")
    topic.goto(f"{TOPICS}{Topic.objects.get(name=HOSTILE).pk}/change/")
    expect(listeners(topic)).to_have_text(["LISTENER"])
    admin.get_by_role("link", name="LISTENER").first.click()
    admin.get_by_label("Mode").select_option("W")
    admin.get_by_role("button", name="Save", exact=True).click()
    expect(admin.locator(".messagelist")).to_contain_text("LISTENER no longer listens to")
    expect(listeners(page)).to_have_count(0)
    expect(topic.get_by_text("No node listens now.")).to_be_visible()


@contextmanager
def runner(server: TestedServer) -> Iterator[None]:
    """`exchange run`, on the site's database."""
    variables = {
        "DATABASE_URL": server.url(),
        "DJANGO_SETTINGS_MODULE": "tests.web.site_settings",
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "manage.py", "psqlmessages", "exchange", "run"],
        env={**os.environ, **variables}, cwd=ROOT,
    )  # fmt: skip
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def draw(page: Page) -> None:
    """Fill in the form of a stopped exchange with two destinations."""
    page.goto(f"{EXCHANGES}add/")
    page.locator("#id_name").fill("sort")
    page.locator("#id_source_queue").fill("orders")
    page.locator("#id_is_running").uncheck()
    page.locator("#id_destinations-0-queue").fill("eu")
    page.locator("#id_destinations-0-selector").fill('msg.headers["country"] == "it"')
    page.get_by_role("button", name=re.compile("Add another")).or_(
        page.get_by_role("link", name=re.compile("Add another"))
    ).click()
    page.locator("#id_destinations-1-queue").fill("audit")
    page.get_by_role("button", name="Save and continue editing").click()


def test_an_exchange_is_drawn_tried_and_run(visitors: Visitors, server: TestedServer, world: World):
    world.rules("user1 W Queue * RW 60")
    worker = world.program("user1")
    page = live(visitors("chief"), "/monitor/exchanges/")
    expect(page.locator("#no-exchanges")).to_contain_text("psqlmessages exchange load FILE")
    draw(page)
    expect(page.get_by_text("these rules are missing")).to_be_visible()
    page.get_by_role("button", name="Add the rules of this database").click()
    expect(page.get_by_text("exchange.sort has all the rules that it needs.")).to_be_visible()
    page.get_by_role("link", name="Dry run").click()
    page.locator("#id_headers").fill('{"country": "it"}')
    page.get_by_role("button", name="Run").click()
    row = page.get_by_role("row").filter(has_text="default/eu")
    expect(row.get_by_role("cell", name="yes", exact=True)).to_be_visible()
    page.get_by_role("link", name="sort").click()
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()

    live(page, "/monitor/exchanges/")
    expect(page.locator("#no-runner")).to_contain_text("psqlmessages exchange run")
    with runner(server):
        busy = page.locator(".edge.copy.busy")
        for _ in range(60):
            # Elements that are pushed while it runs, until they are seen.
            worker.connection.execute(
                "SELECT messages.push_many('W', 'orders', ARRAY['x', 'y'],"
                ' headers => ARRAY[\'{"country": "it"}\', \'{"country": "us"}\'])'
            )
            with page.expect_response("**/figures/"):
                pass
            if busy.count() == 2:
                break
        expect(busy).to_have_count(2)
        expect(page.locator("#exchanges tr")).to_contain_text("1 process")
        expect(page.locator("#no-runner")).to_be_hidden()
    counts = [Element.objects.filter(queue__name=name).count() for name in ("eu", "audit")]
    assert counts[1] == 2 * counts[0] > 0
    Exchange.objects.all().delete()
    expect(page.locator("#no-exchanges")).to_be_visible()
    expect(page.locator("#graph")).to_be_hidden()


AREAS = """document.querySelector("#rates").data
    .filter(({ name }) => name === "messages").map(({ x }) => x.length).join()"""


def test_traffic_appears_as_counted_and_uncounted_is_not_zero(visitors: Visitors):
    page = live(visitors("chief"), "/monitor/exchanges/")
    page.get_by_role("link", name="Traffic").click()
    expect(page.locator("#no-jobs")).to_contain_text("psqlmessages pipeline traffic")
    expect(page.locator("#no-traffic")).to_contain_text("Start the job “traffic”")
    window("EARLIER", back=50, count=1)
    window(HOSTILE, HOSTILE, back=20, count=1200, bytes=120_000)
    row = page.locator("#topics tr").first
    expect(row).to_contain_text("1,200")
    job("traffic", lag_seconds=3.25)
    told = page.locator("#jobs tr")
    expect(told).to_contain_text("3.3 s")
    PipelineJob.objects.update(seen_at=timezone.now() - timedelta(minutes=90))
    expect(told).to_contain_text("no heartbeat for 1 h")
    expect(told).not_to_contain_text("3.3 s")
    expect(page.locator("#traffic-note")).to_contain_text("is not running")
    PipelineJob.objects.update(state=PipelineJob.State.FAILED, error=HOSTILE)
    expect(told).to_contain_text(HOSTILE)
    Traffic.objects.filter(topic=HOSTILE).update(count=2400)
    expect(row).to_contain_text("2,400")

    row.get_by_role("link", name=HOSTILE).click()
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(page.locator("#senders tr")).to_contain_text(HOSTILE)
    assert page.locator("main script").count() == 0
    expect(page.locator("#shares .main-svg").first).to_be_visible()
    expect(page.locator("#rates .main-svg").first).to_be_visible()
    # Known from the oldest window to the newest, of any topic: 31 of them, and the end.
    until(page, f"{AREAS} === '32'")
    expect(page.locator("#rates-note")).to_contain_text("later messages are not counted")


def test_a_report_opens_from_the_disk_and_can_be_read(visitors: Visitors, tmp_path: Path):
    page = visitors(viewport=NARROW, color_scheme="dark")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report(tmp_path))
    for chart in ("rates", "busiest", "shares"):
        expect(page.locator(f"#{chart} .main-svg").first).to_be_visible()
    assert asked == [page.url]
    assert page.evaluate("document.querySelector('#rates').data[0].y[0]") == 1
    expect(page.locator("#busiest-key")).to_contain_text("others")
    expect(page.locator(".edge.copy text")).to_have_text("1,234")
    expect(page.locator("#graph")).to_contain_text("1,366")
    assert page.locator("main script, main b").count() == 0
    assert too_wide(page) == []
    assert pale_text(page) == []


def test_two_visitors_log_in_and_chat_until_the_rule_goes(
    site: Site, visitors: Visitors, world: World, settings: Settings
):
    # That of the site under test.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    rule = f"{Server.owner} chat/* Topic {CHAT_TOPIC} RW 60"
    world.rules(rule)
    for name in ("ann", "bob"):
        site.user(name, idents=[f"chat/{name}/*"])
    user = User.objects.get(username="ann")
    user.set_password("of ann alone")
    user.save()
    ann, bob = visitors(), visitors("bob")
    ann.goto("/")
    ann.get_by_role("link", name="Log in").click()
    expect(ann.get_by_label("Password")).to_be_visible()
    assert ann.goto("/monitor/").url.endswith("/admin/login/?next=/monitor/")
    ann.goto("/chat/")
    ann.get_by_label("Username").fill("ann")
    for password in ("wrong", "of ann alone"):
        ann.get_by_label("Password").fill(password)
        ann.get_by_role("button", name="Log in").click()
        if password == "wrong":
            expect(ann.get_by_role("alert")).to_contain_text("correct username and password")
    expect(ann.locator("#state")).to_have_text("live")
    answer = bob.goto("/chat/")
    assert answer is not None
    assert "no-store" in answer.headers["cache-control"]
    expect(bob.locator("#state")).to_have_text("live")
    expect(ann.locator("#who")).to_contain_text("bob")
    for page, other, text in ((ann, bob, "hello <b>bob</b>"), (bob, ann, "hello ann")):
        page.get_by_label("Your message").fill(text)
        page.keyboard.press("Enter")
        expect(other.locator("li.other")).to_contain_text(text)
    world.execute("UPDATE messages.auth SET mode = 'R' WHERE ident = 'chat/*'")
    expect(ann.locator("#state")).to_have_text("a rule is missing")
    expect(ann.get_by_role("button", name="Send")).to_be_disabled()
    world.execute("DELETE FROM messages.auth WHERE ident = 'chat/*'")
    expect(ann.locator("#state")).to_contain_text("refused")
    world.rules(rule)
    expect(ann.locator("#state")).to_have_text("live")
    ann.get_by_role("button", name="Log out").click()
    expect(ann.get_by_role("link", name="Log in")).to_be_visible()
    expect(bob.locator("#who")).to_contain_text("alone")


def furnish(site: Site, world: World) -> dict[str, str]:
    """Make one of everything, with a hostile name; return every page's address by a name."""
    site.user("chief", idents=["chat/chief/*"])
    world.rules(
        MONITOR_RULE, f"{Server.owner} chat/* Topic {CHAT_TOPIC} RW 60", "user1 W Queue * RW 60"
    )
    world.rule("user2", HOSTILE, "Topic", HOSTILE, "R", 10)
    world.node("user2", HOSTILE).ok("topic_listen", HOSTILE)
    exchange = new(HOSTILE, HOSTILE, f"{HOSTILE} msg.body == '{'x' * 200}'", "d" * 100)
    worker = world.program("user1")
    worker.connection.execute(
        "SELECT messages.push('W', %s, %s, headers => %s)",
        [HOSTILE, HOSTILE + "y" * 5000, f'{{"{HOSTILE}": "{HOSTILE}"}}'],
    )
    for topic in (HOSTILE, "x" * 100):
        window(topic, HOSTILE)
    job("exchange " + "y" * 80, silent=60)
    job("traffic", state=PipelineJob.State.FAILED, error="What has failed. " * 10)
    rule, queue = Auth.objects.get(ident=HOSTILE).pk, Queue.objects.get(name=HOSTILE).pk
    topic, node = Topic.objects.get(name=HOSTILE).pk, Client.objects.get(ident=HOSTILE).pk
    return {
        "index": "/", "chat": "/chat/", "admin": "/admin/",
        "monitor": "/monitor/", "graph": "/monitor/exchanges/", "traffic": TRAFFIC,
        "topic": f"/monitor/topics/{quote(HOSTILE, safe='')}/",
        "traffic of a topic": f"{TRAFFIC}topic/?name={quote(HOSTILE, safe='')}",
        "rules": RULES, "new rule": f"{RULES}add/", "import": f"{RULES}import/",
        "rule": f"{RULES}{rule}/change/", "history": f"{RULES}{rule}/history/",
        "nodes": CLIENTS, "node": f"{CLIENTS}{node}/change/",
        "topics": TOPICS, "topic in the admin": f"{TOPICS}{topic}/change/",
        "identities": IDENTITIES, "new identity": f"{IDENTITIES}add/",
        "exchanges": EXCHANGES, "new exchange": f"{EXCHANGES}add/",
        "exchange": f"{EXCHANGES}{exchange.pk}/change/",
        "dry_run": f"{EXCHANGES}{exchange.pk}/dry-run/",
        "queues": QUEUES, "queue": f"{QUEUES}{queue}/change/", "new queue": f"{QUEUES}add/",
        "elements": f"{QUEUES}{queue}/elements/",
    }  # fmt: skip


OURS = {"index", "chat", "monitor", "topic", "graph", "traffic", "traffic of a topic"}


def test_pages_are_readable_and_show_names_as_text(site: Site, visitors: Visitors, world: World):
    page = visitors("chief", viewport=NARROW)
    page.on("dialog", lambda dialog: visitors.troubles.append(f"dialog: {dialog.message}"))
    faults = {}
    for name, address in furnish(site, world).items():
        answer = page.goto(address)
        assert answer is not None
        if address.startswith("/monitor/"):
            expect(page.locator(LIVE)).to_be_visible()
            expect(page.get_by_text(HOSTILE).first).to_be_attached()
        found = [answer.status != 200, page.locator("script:text-is('alert(1)')").count()]
        found += too_wide(page)
        for scheme in ("dark", "light") if name in OURS else ():
            page.emulate_media(color_scheme=scheme)
            found += pale_text(page)
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            channels = [int(number) for number in ground.strip("rgb()").split(",")]
            found.append(max(channels) >= 64 if scheme == "dark" else min(channels) <= 192)
        if any(found):
            faults[name] = found
    assert faults == {}


def test_pages_say_that_the_server_is_gone_and_return(site: Site, visitors: Visitors, world: World):
    visitors.expect(AWAY)
    world.rules(MONITOR_RULE)
    new("sort", "orders", "eu")
    pages = {
        live(visitors("chief"), "/monitor/"): "reconnects automatically",
        live(visitors("chief"), "/monitor/exchanges/"): "retries automatically",
    }
    site.stop()
    for page, said in pages.items():
        expect(page.locator("#banner")).to_contain_text(said)
        until(page, "document.documentElement.classList.contains('stale')")
    site.start()
    for page in pages:
        expect(page.locator(LIVE)).to_be_visible()
        expect(page.locator("#banner")).to_be_hidden()
        until(page, "!document.documentElement.classList.contains('stale')")


def test_a_permission_taken_away_ends_each_page(site: Site, visitors: Visitors, world: World):
    visitors.expect("Failed to load resource")
    looker = site.user("looker", is_staff=True, permissions=["psqlmessages.view_monitor"])
    page = visitors("looker")
    page.goto("/monitor/")
    expect(page.locator("#missing-rule")).to_contain_text("psqlmessages.add_auth")
    expect(page.get_by_role("button", name="Add this rule")).to_have_count(0)
    world.rules(MONITOR_RULE)
    pages = [
        live(visitors("looker"), path) for path in ("/monitor/", "/monitor/exchanges/", TRAFFIC)
    ]
    looker.user_permissions.clear()
    for page in pages:
        expect(page.locator("#banner")).to_contain_text("no longer have permission")
        expect(page.get_by_role("link", name="Log in again")).to_be_visible()
