"""The graph in a real browser: it lives, says the same as its tables, and shows names as text."""

from __future__ import annotations

import uuid

import pytest
from django.db.models import F
from playwright.sync_api import Page, expect

from psqlmessages.models import Destination, Element, Exchange, ExchangeCount, Queue
from tests.sql.conftest import World
from tests.web.browser import Visitors, until
from tests.web.legibility import NARROW, pale_text, too_wide
from tests.web.site import Site
from tests.web.test_admin_exchanges import ALIVE, new

PAGE = "/monitor/exchanges/"
LIVE = '#pill[data-is="live"]'
HOSTILE = "<script>alert(1)</script>"
AWAY = r"Failed to load resource"
Outcome = ExchangeCount.Outcome
# In the same moment: after ten seconds nothing happens any more.
IS_BUSY = """document.querySelector(".edge.copy.busy")
    && document.querySelector(".edge.copy text").textContent.includes("/s")
    && document.querySelector("#copies tr").textContent.includes("/s")"""


@pytest.fixture(autouse=True)
def chief(site: Site, world: World) -> None:
    """An administrator, and no exchanges."""
    for model in (ExchangeCount, Destination, Exchange, Element, Queue):
        model.objects.all().delete()
    site.user("chief", is_staff=True, is_superuser=True)


def live(page: Page) -> Page:
    page.goto(PAGE)
    expect(page.locator(LIVE)).to_be_visible()
    return page


def counted(exchange: Exchange, number: int) -> None:
    """As a runner would write it."""
    worker = uuid.uuid4()
    for outcome, destination in ((Outcome.OK, -1), (Outcome.TO, 0)):
        ExchangeCount.objects.create(
            exchange=exchange,
            worker=worker,
            outcome=outcome,
            destination=destination,
            count=number,
            seen_at=ALIVE,
        )


def test_without_exchanges_it_says_what_to_do(visitors: Visitors) -> None:
    page = live(visitors("chief"))
    expect(page.locator("#no-exchanges")).to_contain_text("psqlmessages exchange load FILE")
    page.get_by_role("link", name="add one in the admin").click()
    expect(page.get_by_role("heading", name="Add exchange")).to_be_visible()


def test_an_exchange_appears_and_its_rate_is_drawn_without_reload(visitors: Visitors) -> None:
    page = live(visitors("chief"))
    exchange = new("sort", "orders", "eu")
    counted(exchange, 10)
    node = page.locator('[data-node^="x "]')
    expect(node).to_contain_text("sort")
    # The first sample tells no rate yet: a frame more does.
    with page.expect_response("**/figures/"):
        ExchangeCount.objects.update(count=F("count") + 100)
    until(page, IS_BUSY)
    Exchange.objects.all().delete()
    expect(page.locator("#no-exchanges")).to_be_visible()
    expect(page.locator("#graph")).to_be_hidden()


def test_the_sizes_of_queues_are_shown_as_they_are(visitors: Visitors) -> None:
    new("sort", "orders", "eu")
    queue = Queue.objects.create(name="orders", is_paused=True)
    page = live(visitors("chief"))
    node = page.get_by_role("link", name="Queue orders: 0 elements, paused")
    expect(node).to_be_visible()
    Element.objects.bulk_create(Element(queue=queue, body="x") for _ in range(7))
    expect(node.or_(page.get_by_role("link", name="Queue orders: 7 elements"))).to_contain_text("7")
    expect(page.locator("#queues tr").filter(has_text="orders")).to_contain_text("paused")


def test_that_no_process_runs_them_is_said(visitors: Visitors) -> None:
    exchange = new("sort", "orders", "eu")
    page = live(visitors("chief"))
    expect(page.locator("#no-runner")).to_contain_text("psqlmessages exchange run")
    counted(exchange, 0)
    expect(page.locator("#no-runner")).to_be_hidden()
    expect(page.locator("#exchanges tr")).to_contain_text("1 process")


def test_cycles_are_marked_in_picture_and_table(visitors: Visitors) -> None:
    new("there", "a", "b", "c")
    new("back", "b", "a")
    page = live(visitors("chief"))
    expect(page.locator("#cycle-note")).to_be_visible()
    expect(page.locator(".edge.copy.cycle")).to_have_count(2)
    rows = page.locator("#copies tr").filter(has=page.get_by_role("cell", name="yes"))
    expect(rows).to_have_count(2)


def test_names_are_text_and_never_markup(visitors: Visitors) -> None:
    new(HOSTILE, f"{HOSTILE} & co", f"<b>{HOSTILE} '{HOSTILE}' == msg.body")
    page = live(visitors("chief"))
    expect(page.locator("#copies")).to_contain_text(HOSTILE)
    expect(page.locator("#graph")).to_contain_text("<script>")
    assert page.locator("main script, main b").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_narrow_screen(visitors: Visitors, scheme: str) -> None:
    counted(new("sort", "orders", "a", "b", "c", "d" * 100, "msg.body == 'x'"), 5)
    page = live(visitors("chief", viewport=NARROW, color_scheme=scheme))
    expect(page.locator("#copies tr")).to_have_count(5)
    assert too_wide(page) == []
    assert pale_text(page) == []


def test_nodes_are_reached_by_the_keyboard_and_light_their_edges(visitors: Visitors) -> None:
    exchange = new("sort", "orders", "eu", "slow")
    page = live(visitors("chief"))
    node = page.locator(f'[data-node="x {exchange.pk}"]')
    expect(node).to_be_visible()
    page.get_by_role("link", name="Exchanges in the admin").focus()
    for _ in range(6):
        page.keyboard.press("Tab")
        if node.evaluate("element => element === document.activeElement"):
            break
    expect(page.locator(".edge.lit")).to_have_count(3)
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/exchange/{exchange.pk}/change/")


def test_the_focus_stays_while_figures_change(visitors: Visitors) -> None:
    exchange = new("sort", "orders", "eu")
    queue = Queue.objects.create(name="orders")
    page = live(visitors("chief"))
    node = page.locator(f'[data-node="x {exchange.pk}"]')
    node.focus()
    Element.objects.create(queue=queue, body="x")
    expect(page.get_by_role("link", name="Queue orders: 1 elements")).to_be_visible()
    # A new exchange moves everything.
    new("more", "eu", "far")
    expect(page.locator('[data-node^="x "]')).to_have_count(2)
    expect(node).to_be_focused()


def test_a_server_that_is_gone_is_told_and_the_page_returns(site: Site, visitors: Visitors) -> None:
    visitors.expect(AWAY)
    new("sort", "orders", "eu")
    page = live(visitors("chief"))
    site.stop()
    expect(page.locator("#banner")).to_contain_text("asks again by itself")
    until(page, "document.documentElement.classList.contains('stale')")
    site.start()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.locator("#banner")).to_be_hidden()


def test_a_page_of_a_proxy_is_no_answer_and_the_page_returns(visitors: Visitors) -> None:
    new("sort", "orders", "eu")
    page = live(visitors("chief"))
    page.route("**/figures/", lambda route: route.fulfill(body="<p>Back soon.</p>"))
    expect(page.locator("#banner")).to_contain_text("asks again by itself")
    page.unroute("**/figures/")
    expect(page.locator(LIVE)).to_be_visible()


def test_a_permission_taken_away_ends_the_page(site: Site, visitors: Visitors) -> None:
    visitors.expect(AWAY)
    looker = site.user("looker", is_staff=True, permissions=["psqlmessages.view_monitor"])
    page = live(visitors("looker"))
    looker.user_permissions.clear()
    expect(page.locator("#banner")).to_contain_text("do not have the permission")
    expect(page.get_by_role("link", name="Open it again")).to_be_visible()


def test_two_hundred_exchanges_are_drawn(visitors: Visitors) -> None:
    for number in range(200):
        new(f"x{number}", f"q{number}", f"q{(number * 7) % 200}", f"q{number + 1}")
    page = live(visitors("chief"))
    expect(page.locator('[data-node^="x "]')).to_have_count(200)
    took = page.evaluate("""async () => {
        const { layout } = await import("/static/psqlmessages/monitor/graph_layout.js");
        const [nodes, edges] = [[], []];
        for (let i = 0; i < 200; i += 1) {
            for (const id of [`q${i}`, `x${i}`]) nodes.push({ id, length: 150, breadth: 46 });
            edges.push({ id: `${i} from`, from: `q${i}`, to: `x${i}` });
            edges.push({ id: `${i} to`, from: `x${i}`, to: `q${(i * 7) % 200}` });
        }
        const begin = performance.now();
        layout(nodes, edges, 80);
        return performance.now() - begin;
    }""")
    assert took < 30_000
