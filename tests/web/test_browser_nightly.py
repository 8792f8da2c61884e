"""More of the pages in a real browser: the keyboard, faults of each kind, charts, much to draw."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db.models import F
from playwright.sync_api import Locator, Page, expect

from psqlmessages.models import Element, ExchangeCount, Queue
from tests.sql.conftest import Program, World
from tests.web.browser import LIVE, MONITOR_RULE, ROLE, Visitors, live, pale_text, too_wide, until
from tests.web.measured import forget, report, window
from tests.web.site import PASSWORD, Site
from tests.web.test_admin_exchanges import counted, new

# The journeys of test_browser.py visit each of these pages every day.
pytestmark = pytest.mark.nightly

GRAPH, TRAFFIC = "/monitor/exchanges/", "/monitor/traffic/"


@pytest.fixture(autouse=True)
def chief(site: Site, world: World) -> Iterator[User]:
    """An administrator, the monitor's rule, and nothing counted."""
    forget()
    world.rules(MONITOR_RULE)
    yield site.user("chief", is_staff=True, is_superuser=True)
    forget()


def listener(world: World) -> Program:
    """LISTENER may receive from NEWS, and does."""
    world.rules("user2 LISTENER Topic NEWS R 60")
    return world.node("user2", "LISTENER", listen="NEWS")


def tab_to(page: Page, target: Locator) -> None:
    """Press Tab until this has the focus, as one does who has no mouse."""
    for _ in range(60):
        if target.evaluate("element => element === document.activeElement"):
            shown = target.evaluate("element => element.matches(':focus-visible')")
            assert shown, "the focus cannot be seen"
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab never leads to {target}")


def test_the_monitor_and_the_admin_work_with_the_keyboard_alone(visitors: Visitors, world: World):
    listener(world)
    page = visitors()
    page.goto("/admin/login/?next=/monitor/")
    for label, text in (("Username", "chief"), ("Password", PASSWORD)):
        tab_to(page, page.get_by_label(label))
        page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.locator(LIVE)).to_be_visible()
    link = page.get_by_role("link", name="NEWS", exact=True)
    expect(link).to_be_visible()
    tab_to(page, link)
    page.keyboard.press("Enter")
    expect(page.get_by_label("Listeners now")).to_have_text("LISTENER")
    tab_to(page, page.get_by_role("link", name="LISTENER"))
    page.keyboard.press("Enter")
    mode = page.get_by_label("Mode")
    expect(mode).to_be_visible()
    tab_to(page, mode)
    page.keyboard.press("W")
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_role("button", name="Save", exact=True))
    page.keyboard.press("Enter")
    expect(page.locator(".messagelist")).to_contain_text("LISTENER no longer listens to NEWS")


def test_the_list_is_filtered_and_sorted_by_the_keyboard(visitors: Visitors, world: World):
    page = live(visitors("chief"), "/monitor/")
    listener(world)
    world.rules("user1 SENDER Topic NEWS W 60")
    world.rules("user1 SENDER Topic OLDS W 60", "user1 SENDER Topic QUIET W 60")
    sender = world.node("user1", "SENDER", notify="NEWS")
    sender.ok("topic_send_many", "NEWS", ["x"] * 50)
    names = page.locator("#topics th")
    expect(names).to_have_text(["NEWS", "OLDS", "QUIET"])
    page.get_by_role("button", name="Last message").focus()
    page.keyboard.press("Enter")
    expect(names.first).to_have_text("NEWS")
    page.keyboard.press("Enter")
    expect(names.last).to_have_text("NEWS")
    expect(page.locator('th[aria-sort="ascending"]')).to_have_text("Last message")
    link = page.get_by_role("link", name="NEWS")
    link.focus()
    page.get_by_label("Filter topics").evaluate(
        "field => { field.value = 'listen'; field.dispatchEvent(new Event('input')); }"
    )
    expect(names).to_have_text(["NEWS"])
    expect(link).to_be_focused()


def test_a_server_that_falls_silent_is_not_taken_for_live(site: Site, visitors: Visitors):
    page = live(visitors("chief"), "/monitor/")
    os.kill(site.pid, signal.SIGSTOP)
    try:
        expect(page.locator("#banner")).to_contain_text("The server has not sent anything")
        until(page, "document.documentElement.classList.contains('stale')")
    finally:
        os.kill(site.pid, signal.SIGCONT)
    expect(page.locator(LIVE)).to_be_visible()


def test_a_page_whose_socket_never_opens_says_why(visitors: Visitors):
    many = "more than 20 WebSockets of one user"
    for code, reason in ((1006, ""), (4429, many)):
        page = visitors("chief")
        page.add_init_script(
            "window.WebSocket = class { static OPEN = 1; constructor() {"
            f" setTimeout(() => this.onclose({{ code: {code}, reason: '{reason}' }})); }} }};"
        )
        page.goto("/monitor/")
        said = reason or "There is no WebSocket at /ws/monitor/"
        expect(page.locator("#banner")).to_contain_text(said)
        expect(page.locator("#banner")).not_to_contain_text("numbers")


def test_a_session_that_holds_the_queue_back_is_named_live(visitors: Visitors, world: World):
    page = live(visitors("chief"), "/monitor/")
    card = page.locator("#health > div").filter(has_text="Notification queue")
    expect(card).to_contain_text("no session holds it back")
    world.rules(f"{ROLE} HOLDER Topic T R 60")
    # Of the role as which Django connects: what others do it may not see.
    with psycopg.connect(world.server.url(), autocommit=True) as holder:
        holder.execute("SELECT messages.init('HOLDER')")
        # The page is to tell after ten seconds.
        holder.execute("BEGIN")
        expect(card).to_contain_text(f"held back by pid {holder.info.backend_pid} ({ROLE}, ")
        expect(card).to_contain_text("idle in transaction for")
        expect(card).to_have_class("wrong")
        holder.execute("COMMIT")
        expect(card).to_contain_text("no session holds it back")
    expect(card).not_to_have_class("wrong")


def test_rates_sizes_and_cycles_are_drawn_and_told_in_tables(visitors: Visitors):
    exchange = new("sort", "a", "b", "c")
    new("back", "b", "a")
    queue = Queue.objects.create(name="a", is_paused=True)
    counted(exchange, 10)
    page = live(visitors("chief"), GRAPH)
    expect(page.locator("#cycle-note")).to_be_visible()
    expect(page.locator(".edge.copy.cycle")).to_have_count(2)
    rows = page.locator("#copies tr").filter(has=page.get_by_role("cell", name="yes"))
    expect(rows).to_have_count(2)
    node = page.get_by_role("link", name="Queue a: 0 elements, paused")
    expect(node).to_be_visible()
    Element.objects.bulk_create(Element(queue=queue, body="x") for _ in range(7))
    expect(node.or_(page.get_by_role("link", name="Queue a: 7 elements"))).to_contain_text("7")
    # The first sample tells no rate yet: a frame more does.
    with page.expect_response("**/figures/"):
        ExchangeCount.objects.update(count=F("count") + 100)
    # In the same moment: after ten seconds nothing happens any more.
    until(
        page,
        """document.querySelector(".edge.copy.busy")
        && document.querySelector(".edge.copy text").textContent.includes("/s")
        && document.querySelector("#copies tr").textContent.includes("/s")""",
    )


def test_nodes_are_reached_by_the_keyboard_and_keep_the_focus(visitors: Visitors):
    exchange = new("sort", "orders", "eu", "slow")
    queue = Queue.objects.create(name="orders")
    page = live(visitors("chief"), GRAPH)
    node = page.locator(f'[data-node="x {exchange.pk}"]')
    expect(node).to_be_visible()
    page.get_by_role("link", name="Exchanges in the admin").focus()
    for _ in range(6):
        page.keyboard.press("Tab")
        if node.evaluate("element => element === document.activeElement"):
            break
    expect(page.locator(".edge.lit")).to_have_count(3)
    Element.objects.create(queue=queue, body="x")
    expect(page.get_by_role("link", name="Queue orders: 1 elements")).to_be_visible()
    # A new exchange moves everything.
    new("more", "eu", "far")
    expect(page.locator('[data-node^="x "]')).to_have_count(2)
    expect(node).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/exchange/{exchange.pk}/change/")


def test_the_filter_and_the_choices_lead_where_they_say(visitors: Visitors):
    window("ORDERS")
    window("PRICES")
    window("HOURLY", length=3600)
    page = live(visitors("chief"), TRAFFIC)
    expect(page.locator("#topics tr")).to_have_count(2)
    page.get_by_label("Filter topics by name").fill("pri")
    expect(page.locator("#topics tr")).to_have_count(1)
    page.get_by_role("link", name="1 day").click()
    expect(page.locator("#topics tr")).to_contain_text("HOURLY")
    page.locator("#topics").get_by_role("link").click()
    expect(page.locator("nav[aria-label=Windows] [aria-current]")).to_have_text("1 h")
    page.get_by_role("link", name="7 days").click()
    expect(page.locator("nav[aria-label=Time] [aria-current]")).to_have_text("7 days")
    expect(page.locator("#senders tr")).to_contain_text("SENDER")


def test_a_report_is_readable_on_screen_and_paper_and_if_empty(visitors: Visitors, tmp_path: Path):
    for width, scheme in ((1280, "dark"), (1280, "light"), (400, "light")):
        page = visitors(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto(report(tmp_path))
        expect(page.locator("#shares .main-svg").first).to_be_visible()
        assert too_wide(page) == []
        assert pale_text(page) == []
    page = visitors(viewport={"width": 794, "height": 1123}, color_scheme="dark")
    page.goto(report(tmp_path))
    expect(page.locator("#rates .main-svg").first).to_be_visible()
    page.emulate_media(media="print", color_scheme="light")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    until(page, "document.querySelector('#rates .main-svg').clientWidth <= 680")
    assert too_wide(page) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.goto(report(tmp_path, is_empty=True))
    expect(page.get_by_text("Nothing was published in this period")).to_be_visible()
    expect(page.get_by_text("There are no exchanges.")).to_be_visible()
    expect(page.get_by_text("Published messages")).to_be_hidden()
