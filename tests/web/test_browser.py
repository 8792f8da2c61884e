"""One journey through each page in a real browser; nothing may go wrong in its console."""

import os
import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.contrib.auth.models import User
from django.db.models import F
from django.utils import timezone
from playwright.sync_api import FilePayload, Locator, Page, Response, ViewportSize, expect

from project.example import CHAT_TOPIC
from project.postgres import Server
from psqlmessages import models
from psqlmessages.rules import document
from psqlmessages.rules.document import RuleEntry
from tests.conftest import TestedServer
from tests.sql.conftest import World
from tests.web import test_now
from tests.web.browser import AWAY, CURRENT, LIVE, MONITOR_RULE, Visitors, live, too_wide, until
from tests.web.measured import HOSTILE, count, job, report, window
from tests.web.pages import CLIENTS, EXCHANGES, IDENTITIES, LISTS, QUEUES, RULES, TOPICS, page_of
from tests.web.site import Site
from tests.web.test_admin_exchanges import new
from tests.web.test_relay_bounds import database_away

TRAFFIC = "/monitor/traffic/"
ENTRIES = ("/monitor/", "/monitor/topics/", "/monitor/exchanges/")
NARROW, BROAD = ViewportSize(width=400, height=800), ViewportSize(width=1280, height=800)
# Pages of the monitor and the admin that are opened without permission.
REFUSED = ("/monitor/topics/?name=T", f"{RULES}?q=T")


@pytest.fixture(autouse=True)
def chief(site: Site) -> Iterator[User]:
    """A superuser, and no counts of earlier tests."""
    counts = models.Traffic, models.PipelineJob, models.HistoryPeriod, models.TopicMinute
    for model in (*counts, models.QueueMinute):
        model.objects.all().delete()
    yield site.user("chief", is_staff=True, is_superuser=True)
    for model in (*counts, models.QueueMinute):
        model.objects.all().delete()


def listeners(page: Page) -> Locator:
    return page.get_by_label("Listeners now").get_by_role("listitem")


def test_the_monitor_shows_effects_of_rules_nodes_and_messages(visitors: Visitors, world: World):
    page, admin = visitors("chief"), visitors("chief")
    page.goto("/monitor/topics/")
    expect(page.locator("#banner")).to_contain_text("example.monitor.*")
    page.get_by_role("button", name="Add this rule").click()
    expect(page.locator("main")).to_contain_text(f"The role {Server.owner} may act")
    page.get_by_role("button", name="Add this rule").click()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.locator("#banner")).to_be_hidden()
    page.evaluate("window.isTheSame = true")

    world.rule("user2", "LISTENER", "Topic", HOSTILE, "R", 60)
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
    expect(page.locator("#chart .area")).not_to_have_count(0)
    page.locator("#chart").hover(position={"x": 200, "y": 100})
    expect(page.locator("#chart .tooltip")).to_contain_text("not observed")
    shown = page.locator("#tail li").count()
    page.get_by_role("button", name="Pause").click()
    sender.ok("topic_send", HOSTILE, "held")
    expect(page.locator("#totals")).to_contain_text("12")
    expect(page.locator("#tail li")).to_have_count(shown)
    page.get_by_role("button", name="Paused").click()
    expect(page.locator("#tail li").first).to_contain_text("held")

    topic = visitors("chief")
    topic.goto(f"{TOPICS}{models.Topic.objects.get(name=HOSTILE).pk}/change/")
    expect(listeners(topic)).to_have_text(["LISTENER"])
    admin.goto(RULES)
    admin.locator("#result_list").get_by_role("link", name="LISTENER").first.click()
    admin.get_by_label("Mode").select_option("W")
    admin.get_by_role("button", name="Save", exact=True).click()
    expect(admin.locator(".messagelist")).to_contain_text("LISTENER no longer listens to")
    expect(listeners(page)).to_have_count(0)
    expect(topic.get_by_text("No node listens now.")).to_be_visible()
    rule = topic.locator("[data-fragment=rules]").get_by_role("row").filter(has_text="LISTENER")
    expect(rule).to_contain_text("W (send)")


def test_the_list_of_topics_is_as_its_url_says(visitors: Visitors, world: World):
    world.rules(MONITOR_RULE)
    page = live(visitors("chief"), "/monitor/topics/?q=listener&sort=topic")
    expect(page.get_by_label("Filter topics")).to_have_value("listener")
    expect(page.locator("#no-topics")).to_contain_text("No topic matches")
    world.rule("user2", "LISTENER", "Topic", HOSTILE, "R", 60)
    world.node("user2", "LISTENER", listen=HOSTILE)
    expect(page.get_by_role("row").filter(has_text=HOSTILE)).to_be_visible()
    page.get_by_label("Filter topics").fill("other")
    page.wait_for_url("**/?q=other&sort=topic")
    expect(page.locator("#topics tr")).to_have_count(0)
    page.get_by_role("button", name="Listeners").click()
    page.wait_for_url("**/?q=other&sort=-listeners")
    expect(page.locator('th[aria-sort="descending"]')).to_have_text("Listeners")


# The sums and the number of lines of a chart.
CHARTS = {"topics/T": ("1,234 messages, 5.7 kB", 2), "queues/Q": ("12 in, 7 out, 3 removed", 4)}


def test_the_history_is_drawn_and_uncounted_times_are_shaded(visitors: Visitors, world: World):
    world.rules("user1 W Queue Q RW 60")
    world.program("user1").ok("push", "W", "Q", "x")
    now = timezone.now().replace(second=0, microsecond=0)
    start, end = (now - timedelta(minutes=back) for back in (30, 10))
    for kind in "topic", "queue":
        models.HistoryPeriod.objects.create(kind=kind, starts_at=start, ends_at=end, pid=1)
    models.TopicMinute.objects.create(topic="T", minute=start, messages=1234, bytes=5678)
    models.QueueMinute.objects.create(
        queue="Q", minute=start, puts=12, gets=7, removes=3, backlog=2
    )
    page = visitors("chief")
    for name, (sums, lines) in CHARTS.items():
        page.goto(f"/monitor/{name}/")
        for length in ("7 days", "1 hour"):
            page.get_by_role("button", name=length).click()
            expect(page.locator("[aria-pressed=true]")).to_have_text(length)
            expect(page.locator("#history-note")).to_have_text(sums)
            expect(page.locator("#history .line")).to_have_count(lines)
        # Before and after the period, in both panels.
        expect(page.locator("#history .unknown")).to_have_count(4)


def test_the_page_of_a_topic_sends_and_filters(visitors: Visitors, world: World):
    name = "L\u202eR"
    world.rules(MONITOR_RULE, f"user2 {name} Topic T R 60", f"{Server.owner} example Topic T W 60")
    reader = world.node("user2", name, listen="T")
    reader.got(name, "T", 3600)
    page = live(visitors("chief", timezone_id="Asia/Tokyo"), "/monitor/topics/T/")
    options = {"format": "json", "as": "stored"}
    sends = ("<b>one</b>", {}, "Sent"), ('{"two": 2, "in": [[3]]}', options, "Published")
    for body, chosen, done in sends:
        page.get_by_label("Body").fill(body)
        for field, value in chosen.items():
            page.locator(f"[name={field}]").select_option(value)
        page.get_by_role("button", name="Send…").click()
        expect(page.get_by_text("Nodes that listen now:")).to_contain_text(name)
        page.get_by_role("button", name="Send a test message").click()
        expect(page.locator(".notice")).to_contain_text(f"{done} a test message")
        expect(page.locator(LIVE)).to_contain_text("GMT+9")
    rows = page.locator("#tail li:visible")
    numbers = {"TWO": 1, "example": 2, "none": 0, "$.two = 2": 1, "$.two=3": 0, "$.in.length": 0}
    for text, number in {**numbers, "$..two": 0, "": 2}.items():
        page.get_by_label("Filter messages").fill(text)
        expect(rows).to_have_count(number)
        told = page.get_by_text("Not a JSON path" if text == "$..two" else "No message matches")
        expect(told).to_be_visible(visible=not number)
    expect(rows.locator("time").first).to_have_text(re.compile("^[0-9:]+ GMT.9$"))
    reader.ok("topic_unlisten", "T")
    # U+202E reverses only the name.
    expect(page.locator("#events bdi", has_text="R").first).to_have_text(name)
    page.goto("/monitor/stored/?topic=T&search=$[0].two")
    expect(page.locator("main time")).to_contain_text("GMT+9")


def test_an_exchange_is_drawn_tried_and_run(visitors: Visitors):
    page = live(visitors("chief"), "/monitor/exchanges/")
    expect(page.locator("#no-exchanges")).to_contain_text("psqlmessages exchange load FILE")
    new("sort", "orders", 'eu msg.headers["country"] == "it"', "audit", is_running=False)
    page.goto(page_of(models.Exchange.objects.get()))
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
    count(models.Exchange.objects.get(), ("ok", -1, 5), ("to", 0, 5), ("to", 1, 5))
    new("back", "eu", "orders")
    expect(page.locator("#cycle-note")).to_be_visible()
    expect(page.locator(".edge.copy.cycle")).to_have_count(2)
    expect(page.locator("#exchanges tr").filter(has_text="sort")).to_contain_text("1 process")
    expect(page.locator("#no-runner")).to_be_hidden()
    # A rate needs two samples.
    with page.expect_response("**/figures/"):
        models.ExchangeCount.objects.update(count=F("count") + 100)
    # All at the same moment: the rate lasts ten seconds.
    until(
        page,
        """document.querySelectorAll(".edge.copy.busy").length === 2
        && document.querySelector(".edge.copy.busy text").textContent.includes("/s")
        && document.querySelector("#copies").textContent.includes("/s")""",
    )
    state = page.locator("#exchanges tr").filter(has_text="sort")
    queue, _ = models.Queue.objects.get_or_create(name="orders")
    later = timezone.now() + timedelta(days=2, minutes=1)
    models.Element.objects.create(queue=queue, tries=1, mature_at=later, available_at=later)
    expect(state).to_contain_text("1 process, 1 element failed, next try in 2 d")
    counts = models.ExchangeCount.objects.filter(outcome="ok")
    counts.update(failing_since=timezone.now() - timedelta(days=3))
    expect(state).to_contain_text(re.compile(r"failing since \d+ \w+ 20\d\d.*1 element failed"))
    models.Exchange.objects.all().delete()
    expect(page.locator("#no-exchanges")).to_be_visible()
    expect(page.locator("#graph")).to_be_hidden()


def test_an_operator_finds_and_empties_a_stuck_queue(visitors: Visitors, world: World):
    world.rules(f"{Server.owner} example Queue * A 60", "user1 SHOP Queue * RW 60")
    shop = world.program("user1")
    shop.ok("push", "SHOP", "other", "x")
    page = live(visitors("chief", viewport=NARROW), "/monitor/queues/")
    page.evaluate("window.isTheSame = true")
    page.get_by_role("searchbox").fill("order")
    expect(page.locator("tbody tr")).to_have_count(0)
    for body in ("one", "two"):
        shop.ok("push", "SHOP", "orders", body)
    row = page.get_by_role("row").filter(has_text="orders")
    expect(row.get_by_role("cell").first).to_have_text("2")
    assert page.get_by_role("searchbox").evaluate("e => e === document.activeElement")
    assert "q=order" in page.url
    page.get_by_role("link", name="Queue", exact=True).click()
    expect(page).to_have_url(re.compile("sort=name"))
    assert page.evaluate("window.isTheSame"), "it was loaded anew"
    assert too_wide(page) == []
    row.get_by_role("link", name="orders").click()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.get_by_text("no consumer was seen")).to_be_visible()
    assert too_wide(page) == []
    page.get_by_role("button", name="Pause…").click()
    expect(page.get_by_text("2 available, 0 scheduled and 0 reserved")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("Paused.")).to_be_visible()
    expect(page.get_by_text("The queue is paused")).to_be_visible()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.get_by_role("button", name="Delete…")).to_be_disabled()
    page.get_by_label("Select all on this page").check()
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("button", name="Delete elements").click()
    expect(page.get_by_text("Deleted: 2 elements.")).to_be_visible()
    expect(page.locator("dd").first).to_have_text("0")


# The numbers of steps of the filled areas: one for each window, and one for the base.
AREAS = """[...document.querySelectorAll("#rates .area[fill='var(--accent)']")]
    .map((area) => area.getAttribute("d").split("V").length - 1).join()"""

# How to make it, the problem on the first page, and words of the page behind it.
FAULTS = (
    (lambda world: test_now.push(world, "orders", is_paused=True),
     "The queue “orders” is paused", "orders"),
    (lambda _: test_now.exchange("default: INSERT INTO messages.auth …;"),
     "The exchange “sort it” is blocked", "INSERT INTO messages.auth"),
    (lambda world: test_now.push(world, test_now.HOSTILE, 7), "no consumer takes elements", "<b>"),
    (test_now.slow_reader, "“SUB” reads the stream “T” too slowly", "SUB"),
)  # fmt: skip


def test_each_of_four_faults_is_one_click_behind_the_first_page(visitors: Visitors, world: World):
    page = live(visitors("chief"), "/monitor/")
    world.rule("user1", "W", "Queue", "*", "RW", 60)
    for make, words, _ in FAULTS:
        make(world)
        expect(page.get_by_role("link", name=words)).to_be_visible()
    assert too_wide(page) == []
    for _, words, behind in FAULTS:
        page.goto("/monitor/")
        page.get_by_role("link", name=words).click()
        found = page.get_by_role("main").get_by_text(behind).locator("visible=true")
        expect(found.first).to_be_visible()
    page.goto("/monitor/")
    models.Queue.objects.update(is_paused=False)
    expect(page.get_by_text("The queue “orders” is paused")).to_have_count(0)


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
    expect(page.locator("#pill")).to_contain_text("live since")
    models.PipelineJob.objects.update(seen_at=timezone.now() - timedelta(minutes=90))
    expect(told).to_contain_text("no heartbeat for 1 h")
    expect(told).not_to_contain_text("3.3 s")
    expect(page.locator("#traffic-note")).to_contain_text("is not running")
    expect(page.locator("#pill")).to_have_text("the job is not running")

    row.get_by_role("link", name=HOSTILE).click()
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(page.locator("#senders tr")).to_contain_text(HOSTILE)
    assert page.locator("main script").count() == 0
    expect(page.locator("#shares .plot")).to_be_visible()
    expect(page.locator("#rates .plot")).to_be_visible()
    # The 31 windows from the oldest to the newest of any topic, and the end.
    until(page, f"{AREAS} === '32'")
    expect(page.locator("#rates-note")).to_contain_text("later messages are not counted")


# A catalog that marks each text that it is asked for.
MARKING_CATALOG = """globalThis.django = {
    gettext: (text) => `«${text}»`, ngettext: (one, many, n) => `«${n === 1 ? one : many}»` };"""
# Texts and labels with words that the scripts have not asked the catalog for. Words of the page as
# the server sends it were translated there.
UNTRANSLATED = """async () => {
    const html = new DOMParser().parseFromString(await (await fetch(location)).text(), "text/html");
    const labels = (root) => [...root.querySelectorAll("[title], [aria-label]")]
        .flatMap((element) => [element.title ?? "", element.ariaLabel ?? ""]);
    const elements = [...html.querySelectorAll("*")];
    const attributes = elements.flatMap((element) => [...element.attributes]);
    const served = html.body.textContent + attributes.map(({ value }) => value).join();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const texts = labels(document);
    // Names are in elements of their own, which divide the text of an event.
    const isMarked = (span) => span?.textContent.startsWith("«");
    while (walker.nextNode()) {
        const { data, parentElement: parent } = walker.currentNode;
        const isSkipped = parent.closest("b, bdi, noscript, script");
        if (!isSkipped && !isMarked(parent.closest("#events span"))) texts.push(data);
    }
    const withoutMarked = (text) => {
        const shorter = text.replace(/«[^«»]*»/g, "");
        return shorter === text ? text : withoutMarked(shorter);
    };
    const withoutDates = (text) => text.replace(/[0-9]+ [A-Z][a-z]+ 20[0-9]+/g, "");
    return texts.map((text) => withoutDates(withoutMarked(text)).trim())
        .filter((text) => /[a-z]{3}/.test(text) && !/[«»]/.test(text) && !served.includes(text));
}"""


def test_each_text_of_the_scripts_can_be_translated(visitors: Visitors, world: World):
    # A topic of this test alone: the site remembers the messages of others.
    world.rules(MONITOR_RULE, "user2 L Topic TEXTS R 60", "user1 S Topic TEXTS W 60")
    world.node("user2", "L", listen="TEXTS")
    world.node("user1", "S", notify="TEXTS").ok("topic_send", "TEXTS", "X")
    new("SORT", "ORDERS", "EU", "AUDIT", is_running=True)
    window("TEXTS", "S", back=20)
    job("JOB", lag_seconds=3.25)
    page = visitors("chief")
    catalog = {"body": MARKING_CATALOG, "content_type": "text/javascript"}
    page.route("**/monitor/texts.js", lambda route: route.fulfill(**catalog))
    addresses = "topics/", "topics/TEXTS/", "exchanges/", "traffic/", "traffic/topic/?name=TEXTS"
    for address in addresses:
        page.goto(f"/monitor/{address}")
        expect(page.locator(CURRENT)).to_contain_text("«")
        expect(page.locator("main").get_by_text("«").first).to_be_attached()
        assert page.evaluate(UNTRANSLATED) == [], address


def test_a_report_opens_from_the_disk_and_can_be_read(visitors: Visitors, tmp_path: Path):
    page = visitors(viewport=NARROW, color_scheme="dark")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report(tmp_path))
    for chart in ("rates", "busiest", "shares"):
        expect(page.locator(f"#{chart} .plot")).to_be_visible()
    assert asked == [page.url]
    page.locator("#rates .plot").hover(position={"x": 200, "y": 100})
    expect(page.locator("#rates .tooltip")).to_contain_text(": 60 messages")
    expect(page.locator("#busiest-key")).to_contain_text("others")
    expect(page.locator(".edge.copy text")).to_have_text("1,234")
    expect(page.locator("#graph")).to_contain_text("1,366")
    assert page.locator("main script, main b").count() == 0
    assert too_wide(page) == []
    page.emulate_media(media="print", color_scheme="light")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert too_wide(page) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.goto(report(tmp_path, is_empty=True))
    expect(page.get_by_text("No messages were counted")).to_be_visible()
    expect(page.get_by_text("Published messages")).to_be_hidden()


def test_two_visitors_chat_until_the_rule_goes(site: Site, visitors: Visitors, world: World):
    world.rules(f"{Server.owner} chat/* Topic {CHAT_TOPIC} RW 60")
    for name in ("ann", "bob"):
        site.user(name, idents=[f"chat/{name}/*"])
    ann, bob = visitors("ann"), visitors("bob")
    for page in (ann, bob):
        page.goto("/chat/")
        expect(page.locator("#state")).to_have_text("live")
    for page, other, text in ((ann, bob, "hello <b>bob</b>"), (bob, ann, "hello ann")):
        page.get_by_label("Your message").fill(text)
        page.keyboard.press("Enter")
        expect(other.locator("li.other")).to_contain_text(text)
    world.execute("UPDATE messages.auth SET mode = 'R' WHERE ident = 'chat/*'")
    expect(ann.locator("#state")).to_have_text("a rule is missing")
    expect(ann.get_by_role("button", name="Send")).to_be_disabled()


def create_all(site: Site, world: World) -> tuple[list[str], list[str]]:
    """Make one of everything, with a hostile name; return the addresses of all pages.

    The order matters: an address with a button is opened by this button of the page before.
    The second list repeats templates of the first.
    """
    site.user("chief", idents=["chat/chief/*"])
    world.rules(
        MONITOR_RULE, f"{Server.owner} chat/* Topic {CHAT_TOPIC} RW 60", "user1 W Queue * RW 60"
    )
    world.rule("user2", HOSTILE, "Topic", HOSTILE, "R", 10)
    world.rule("user2", "i" * 100, "Topic", "t" * 100, "R", 10)
    models.Queue.objects.create(name="q" * 100, channel="q")
    node = world.node("user2", HOSTILE)
    node.ok("topic_listen", HOSTILE)
    node.connection.execute("SELECT messages.subscribe(%s, %s, 600)", [HOSTILE, HOSTILE])
    exchange = new(HOSTILE, HOSTILE, f"{HOSTILE} msg.body == '{'x' * 200}'", "d" * 100)
    world.program("user1").connection.execute(
        "SELECT messages.push('W', %s, %s, headers => %s)",
        [HOSTILE, HOSTILE + "y" * 5000, f'{{"{HOSTILE}": "{HOSTILE}"}}'],
    )
    for topic in (HOSTILE, "x" * 100):
        window(topic, HOSTILE)
    job("exchange " + "y" * 80, silent=60)
    job("traffic", state=models.PipelineJob.State.FAILED, error="What has failed. " * 10)
    identity = models.WebIdentity.objects.get().pk
    rule, queue = models.Auth.objects.get(ident=HOSTILE), models.Queue.objects.get(name=HOSTILE)
    dead = models.Queue.objects.create(name="__deadletter__", channel="dead")
    models.Element.objects.create(
        queue=dead, body=HOSTILE + "y" * 5000,
        headers={"x-dl-from-queue": HOSTILE, "x-dl-t": "2026-01-01T00:00:00Z", "x-dl-tries": 3},
    )  # fmt: skip
    topic, client = models.Topic.objects.get(name=HOSTILE), models.Client.objects.get(ident=HOSTILE)
    subscription, traffic = models.Subscription.objects.get(), models.Traffic.objects.first()
    assert traffic
    name = quote(HOSTILE, safe="")
    pages = [
        "/", "/chat/", "/login/", *ENTRIES, TRAFFIC, "/api/docs", "/admin/",
        *(f"/monitor/{kind}/{each}" for kind in ("streams", "nodes", "queues")
          for each in ("", f"{name}/")), f"/monitor/queues/{name}/ Drain…",
        f"/monitor/topics/{name}/", f"{TRAFFIC}topic/?name={name}",
        f"/monitor/stored/?topic={name}",
        CLIENTS, RULES, f"{RULES}import/", f"{RULES}import/ Show changes",
        *(page_of(each) for each in (rule, topic, exchange)), page_of(queue),
        f"{page_of(queue)} Drain…", page_of(client), f"{page_of(client)} Disconnect…",
        page_of(rule, "delete"), page_of(exchange, "dry-run"), page_of(dead, "elements"),
    ]  # fmt: skip
    more = [
        *(each for each in LISTS if each not in pages), f"{IDENTITIES}add/",
        "/admin/auth/user/", "/admin/auth/user/add/",
        "/admin/password_change/", f"{RULES}?ident={HOSTILE[:1]}", f"{CLIENTS}open-transactions/",
        page_of(rule, "history"), page_of(subscription),
        page_of(traffic), f"{RULES}add/", f"{RULES}?q=-", page_of(queue, "elements"),
        f"{EXCHANGES}add/",
        *(page_of(each, "history") for each in (topic, queue, exchange)),
        page_of(exchange, "delete"), f"{IDENTITIES}{identity}/change/", f"{QUEUES}add/",
        "/admin/psqlmessages/",
    ]  # fmt: skip
    return pages, more


# Rules to import: one is new, one is changed, and the others are removed.
IMPORTED = (*(RuleEntry("user1", name, "Queue", "*", "W", 60) for name in ("W", HOSTILE)),)
DOCUMENT = document.write(document.Definitions(IMPORTED)).encode()
# Violations of accessibility that axe finds.
VIOLATIONS = """async ([scheme, options]) => {
    const media = matchMedia(`(prefers-color-scheme: ${scheme})`);
    // Swagger UI follows the scheme by a class.
    const isDark = () => document.documentElement.classList.contains("dark-mode");
    const isSwagger = document.getElementById("swagger-ui") !== null;
    while (!media.matches || (isSwagger && isDark() !== (scheme === "dark"))) {
        await new Promise(requestAnimationFrame);
    }
    const transitions = document.getAnimations().filter((each) => each instanceof CSSTransition);
    await Promise.allSettled(transitions.map((each) => each.finished));
    // Preloading would resolve the imports of style sheets against the page.
    const { violations } = await axe.run(
        { resultTypes: ["violations"], preload: false, selectors: false, ...options });
    const found = violations.filter(({ impact }) => ["critical", "serious"].includes(impact));
    return found.flatMap(({ id, nodes }) => nodes.slice(0, 5).map(({ html }) => `${id}: ${html}`));
}"""


def open_page(page: Page, address: str) -> Response | None:
    """Open an address; if it has a button, press the button in the page that is open."""
    path, _, button = address.partition(" ")
    if not button:
        return page.goto(path)
    if path == f"{RULES}import/":
        file = FilePayload(name="x", mimeType="application/json", buffer=DOCUMENT)
        page.locator("#id_document").set_input_files([file])
        page.locator("#id_replace").check()
    with page.expect_navigation() as opened:
        page.get_by_role("button", name=button, exact=True).click()
    return opened.value


def find_violations(page: Page, scheme: str) -> list[Any]:
    """Return what axe finds in a color scheme, and the background if it is wrong there."""
    page.emulate_media(color_scheme=scheme)
    only = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
    found = page.evaluate(VIOLATIONS, [scheme, only])
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(number) for number in ground.strip("rgb()").split(",")]
    is_right = max(channels) < 64 if scheme == "dark" else min(channels) > 192
    return found if is_right else [*found, f"{scheme}: {ground}"]


def find_faults(page: Page, addresses: list[str], *schemes: str) -> dict[str, list[Any]]:
    """Return the faults of each page: found by axe, too wide, wrong colors, markup in a name."""
    # Pages poll as in production, and the browser may cache files.
    page.context.unroute_all()
    faults: dict[str, list[Any]] = {}
    for address in (*addresses, *REFUSED):
        User.objects.update(is_superuser=address not in REFUSED)
        page.set_viewport_size(NARROW)
        answer = open_page(page, address)
        assert answer is not None
        if page.locator("#pill").count():
            expect(page.locator(CURRENT)).to_be_visible()
            expect(page.get_by_text(HOSTILE).first).to_be_attached()
        is_right = answer.status == (403 if address in REFUSED else 200)
        found: list[Any] = [] if is_right else [answer.status]
        found += page.locator("script:text-is('alert(1)')").all_text_contents()
        page.evaluate(AXE_SCRIPT)
        for width in (NARROW, BROAD):
            page.set_viewport_size(width)
            found += too_wide(page)
            # The narrow page hides columns: axe reads it only if there is time for all schemes.
            if width == BROAD or len(schemes) > 1:
                for scheme in schemes:
                    found += find_violations(page, scheme)
        if found:
            faults[address] = found
    return faults


@pytest.fixture
def silent_page(visitors: Visitors) -> Page:
    """An empty page, in which no dialog may open."""
    for address in REFUSED:
        visitors.expect(rf"403 \(Forbidden\) .*{re.escape(address)}'")
    page = visitors("chief")
    page.on("dialog", lambda dialog: visitors.troubles.append(f"dialog: {dialog.message}"))
    return page


def test_pages_are_accessible_and_show_names_as_text(site: Site, silent_page: Page, world: World):
    assert find_faults(silent_page, create_all(site, world)[0], "light") == {}


@pytest.mark.nightly
def test_more_pages_are_accessible_also_in_the_dark(site: Site, silent_page: Page, world: World):
    pages, more = create_all(site, world)
    assert find_faults(silent_page, pages + more, "dark", "light") == {}


def test_pages_say_that_postgresql_the_site_or_a_permission_is_gone(
    site: Site, visitors: Visitors, world: World, server: TestedServer
):
    visitors.expect(f"{AWAY}|503 at")
    viewer = site.user("viewer", is_staff=True, permissions=["psqlmessages.view_monitor"])
    world.rules(MONITOR_RULE, "user1 SENDER Topic T RW 60")
    # One page of each script that reconnects.
    pages = {
        live(visitors("viewer"), "/monitor/topics/"): "reconnects automatically",
        live(visitors("viewer"), "/monitor/exchanges/"): "retries automatically",
        live(visitors("viewer"), "/monitor/"): "retries automatically",
    }
    topics = next(iter(pages))
    queue, sent = visitors("chief"), visitors("chief")
    queue.goto(page_of(models.Queue.objects.create(name="q", channel="q")))
    number = queue.locator("[data-fragment=state]").get_by_role("cell")
    expect(queue.locator("[data-liveness]")).to_have_text("live")
    models.Queue.objects.update(is_paused=True)
    expect(number.first).to_have_text("paused")
    with sent.expect_websocket() as opened:
        sent.goto(page_of(models.Topic.objects.get(name="T")))
    expect(sent.locator("section[data-topic] .is-live")).to_have_text("live")
    world.node("user1", "SENDER", listen="T", notify="T").ok("topic_send_many", "T", ["x"] * 1000)
    rate = sent.locator("section[data-topic] .now")
    expect(rate).to_have_text(re.compile("^[1-9]"))
    with database_away(server):
        expect(queue.locator("[data-liveness]")).to_contain_text("Not live")
        until(sent, "document.querySelector('section[data-topic].stale') !== null")
        shown = rate.inner_text()
        for _ in range(3):
            opened.value.wait_for_event("framereceived")
        assert rate.inner_text() == shown
        expect(topics.locator("#banner")).to_contain_text("PostgreSQL cannot be reached")
        expect(topics.locator("#pill")).not_to_have_attribute("data-is", "live")
    expect(topics.locator(LIVE)).to_be_visible()
    queue.close()
    sent.close()
    site.stop()
    for page, said in pages.items():
        expect(page.locator("#banner")).to_contain_text(said)
        until(page, "document.documentElement.classList.contains('stale')")
    site.start()
    for page in pages:
        expect(page.locator(LIVE)).to_be_visible()
        expect(page.locator("#banner")).to_be_hidden()
        until(page, "!document.documentElement.classList.contains('stale')")
    viewer.user_permissions.clear()
    for page in pages:
        expect(page.locator("#banner")).to_contain_text("no longer have permission")
        expect(page.get_by_role("link", name="Log in again")).to_be_visible()


@pytest.mark.nightly
def test_a_server_that_falls_silent_is_not_live(site: Site, visitors: Visitors, world: World):
    world.rules(MONITOR_RULE)
    page = live(visitors("chief"), "/monitor/topics/")
    os.kill(site.pid, signal.SIGSTOP)
    try:
        expect(page.locator("#banner")).to_contain_text("The server has not sent anything")
        until(page, "document.documentElement.classList.contains('stale')")
    finally:
        os.kill(site.pid, signal.SIGCONT)
    expect(page.locator(LIVE)).to_be_visible()


@pytest.mark.nightly
def test_a_page_whose_socket_never_opens_says_why(visitors: Visitors):
    many = "more than 20 WebSockets of one user"
    for code, reason in ((1006, ""), (4429, many)):
        page = visitors("chief")
        page.add_init_script(
            "window.WebSocket = class { static OPEN = 1; constructor() {"
            f" setTimeout(() => this.onclose({{ code: {code}, reason: '{reason}' }})); }} }};"
        )
        page.goto("/monitor/topics/")
        said = reason or "There is no WebSocket at /ws/monitor/"
        expect(page.locator("#banner")).to_contain_text(said)
        expect(page.locator("#banner")).not_to_contain_text("numbers")


@pytest.mark.nightly
def test_a_session_that_holds_the_queue_back_is_named_live(visitors: Visitors, world: World):
    world.rules(MONITOR_RULE, f"{Server.owner} HOLDER Topic T R 60")
    page = live(visitors("chief"), "/monitor/topics/")
    card = page.locator("#health > div").filter(has_text="Notification queue")
    expect(card).to_contain_text("no session holds it back")
    # Django's role may see its own sessions only.
    with psycopg.connect(world.server.url(), autocommit=True) as holder:
        holder.execute("SELECT messages.init('HOLDER')")
        holder.execute("BEGIN")
        expect(card).to_contain_text(f"held back by pid {holder.info.backend_pid} (")
        expect(card).to_contain_text("idle in transaction for")
        expect(card).to_have_class("wrong")
        holder.execute("COMMIT")
        expect(card).to_contain_text("no session holds it back")
    expect(card).not_to_have_class("wrong")


@pytest.mark.nightly
def test_nodes_are_reached_by_the_keyboard_and_keep_the_focus(visitors: Visitors):
    exchange = new("sort", "orders", "eu", "slow")
    queue = models.Queue.objects.create(name="orders")
    page = live(visitors("chief"), "/monitor/exchanges/")
    node = page.locator(f'[data-node="x {exchange.pk}"]')
    expect(node).to_be_visible()
    page.get_by_role("link", name="Exchanges in the admin").focus()
    for _ in range(6):
        page.keyboard.press("Tab")
        if node.evaluate("element => element === document.activeElement"):
            break
    expect(page.locator(".edge.highlighted")).to_have_count(3)
    models.Element.objects.create(queue=queue, body="x")
    expect(page.get_by_role("link", name="Queue orders: 1 element", exact=True)).to_be_visible()
    new("more", "eu", "far")
    expect(page.locator('[data-node^="x "]')).to_have_count(2)
    expect(node).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/exchange/{exchange.pk}/change/")
