"""The pages of the traffic in a real browser: they live, say the same as the rows, hide nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from psqlmessages.models import PipelineJob, Traffic
from psqlmessages.pipeline import report_page
from psqlmessages.pipeline.report import Amount, Figures, Flow, Period, Report
from tests.sql.conftest import World
from tests.web.browser import Visitors, until
from tests.web.legibility import NARROW, pale_text, too_wide
from tests.web.measured import begin, forget, job, window
from tests.web.site import Site

PAGE, TOPIC = "/monitor/traffic/", "/monitor/traffic/topic/?name=ORDERS"
LIVE = '#pill[data-is="live"]'
HOSTILE = "<script>alert(1)</script><b>x</b>"


@pytest.fixture(autouse=True)
def chief(site: Site, world: World) -> Iterator[None]:
    """An administrator, and nothing counted."""
    forget()
    site.user("chief", is_staff=True, is_superuser=True)
    yield
    forget()


def live(page: Page, address: str) -> Page:
    page.goto(address)
    expect(page.locator(LIVE)).to_be_visible()
    return page


def busy(topic: str = "ORDERS") -> None:
    now = begin(10)
    for back in range(1, 12):
        starts_at = datetime.fromtimestamp(now - 10 * back, UTC)
        for sender in ("SHOP", "SHOP.EU"):
            window(topic, sender, starts_at=starts_at, count=10 * back)


def test_without_a_pipeline_it_says_how_to_start_one(visitors: Visitors) -> None:
    page = live(visitors("chief"), "/monitor/exchanges/")
    page.get_by_role("link", name="Traffic").click()
    expect(page.locator("#no-jobs")).to_contain_text("psqlmessages pipeline traffic")
    expect(page.locator("#no-traffic")).to_contain_text("the job “traffic” has to run")


def test_what_is_counted_appears_without_reload(visitors: Visitors) -> None:
    page = live(visitors("chief"), PAGE)
    window("EARLIER", back=59, count=1)
    window("ORDERS", back=30, count=1200, bytes=120_000)
    job()
    row = page.locator("#topics tr").first
    expect(row).to_contain_text("1,200")
    expect(row).to_contain_text("2.0")
    expect(row).to_contain_text(" B")
    expect(page.locator("#jobs tr")).to_contain_text("running")
    Traffic.objects.filter(topic="ORDERS").update(count=2400)
    expect(row).to_contain_text("2,400")
    row.get_by_role("link", name="ORDERS").click()
    expect(page.get_by_role("heading", name="ORDERS")).to_be_visible()


def test_a_job_that_falls_silent_is_told_so(visitors: Visitors) -> None:
    job("traffic", lag_seconds=3.25)
    page = live(visitors("chief"), PAGE)
    row = page.locator("#jobs tr")
    expect(row).to_contain_text("3.3 s")
    PipelineJob.objects.update(seen_at=timezone.now() - timedelta(minutes=90))
    expect(row).to_contain_text("no sign for 1 h")
    expect(row).not_to_contain_text("3.3 s")
    expect(page.locator("#traffic-note")).to_contain_text("does not run")
    PipelineJob.objects.update(state=PipelineJob.State.FAILED, error=HOSTILE)
    expect(row).to_contain_text(HOSTILE)
    assert page.locator("main script, main b").count() == 0


def test_the_filter_and_the_choices_lead_where_they_say(visitors: Visitors) -> None:
    busy()
    window("PRICES")
    window("HOURLY", length=3600)
    page = live(visitors("chief"), PAGE)
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


def test_the_charts_of_a_topic_are_drawn_under_the_policy(visitors: Visitors) -> None:
    busy()
    job()
    page = live(visitors("chief"), TOPIC)
    expect(page.locator("#totals")).to_contain_text("1,320")
    expect(page.locator("#rates .main-svg").first).to_be_visible()
    expect(page.locator("#shares .main-svg").first).to_be_visible()
    expect(page.locator("#senders tr")).to_have_count(2)
    expect(page.locator("#senders tr").first).to_contain_text("50 %")
    drawn = page.evaluate("document.querySelector('#rates').data[0].y")
    # The first of ten seconds may have passed meanwhile.
    assert max(drawn) == pytest.approx(22)
    bottom = "e => e.getBoundingClientRect().bottom"
    drawn_until = page.locator("#rates .main-svg").first.evaluate(bottom)
    assert drawn_until <= page.locator("#rates").evaluate(bottom)


def test_what_nobody_counted_is_no_zero(visitors: Visitors) -> None:
    window("OTHER", back=50)
    window("ORDERS", back=20, count=30)
    page = live(visitors("chief"), TOPIC)
    expect(page.locator("#rates .main-svg").first).to_be_visible()
    areas = page.evaluate("""document.querySelector("#rates").data
        .filter(({ name }) => name === "messages").map(({ x }) => x.length)""")
    # Known from the oldest window to the newest, of any topic: 31 of them, and the end.
    assert areas == [32]
    expect(page.locator("#rates-note")).to_contain_text("is not known")


def test_charts_without_anything_to_draw_have_their_axes(visitors: Visitors) -> None:
    page = live(visitors("chief"), TOPIC)
    expect(page.locator("#no-senders")).to_be_visible()
    expect(page.locator("#rates .yaxislayer-above")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_narrow_screen(visitors: Visitors, scheme: str) -> None:
    busy()
    busy("x" * 100)
    job("exchange " + "y" * 80, silent=60)
    job("traffic", state=PipelineJob.State.FAILED, error="What has failed. " * 10)
    page = live(visitors("chief", viewport=NARROW, color_scheme=scheme), PAGE)
    expect(page.locator("#topics tr")).to_have_count(2)
    assert too_wide(page) == []
    assert pale_text(page) == []
    live(page, TOPIC)
    expect(page.locator("#shares .main-svg").first).to_be_visible()
    assert too_wide(page) == []
    assert pale_text(page) == []


def test_names_are_text_and_never_markup(visitors: Visitors) -> None:
    window(HOSTILE, HOSTILE)
    page = live(visitors("chief"), PAGE)
    page.get_by_role("link", name=HOSTILE).click()
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(page.locator("#senders tr")).to_contain_text(HOSTILE)
    assert page.locator("main script, main b").count() == 0


def test_a_permission_taken_away_ends_the_page(site: Site, visitors: Visitors) -> None:
    visitors.expect("Failed to load resource")
    looker = site.user("looker", is_staff=True, permissions=["psqlmessages.view_monitor"])
    page = live(visitors("looker"), PAGE)
    looker.user_permissions.clear()
    expect(page.locator("#banner")).to_contain_text("do not have the permission")


# The report


def report(folder: Path, *, is_empty: bool = False) -> str:
    """Write a report of an hour; return its address."""
    end = datetime(2026, 11, 21, 12, tzinfo=UTC)
    period = Period(end - timedelta(hours=1), end)
    first, step = int(period.begin.timestamp()), 60
    amount = Amount(60, 600, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    total = Amount(3600, 36000, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    steps = {first + step * number: amount for number in range(60)}
    points = {HOSTILE: dict.fromkeys(steps, 40), "A": dict.fromkeys(steps, 15)}
    figures = Figures("tests", step, total, steps, {HOSTILE: total}, {HOSTILE: total}, points)
    if is_empty:
        figures = Figures("tests", step, None, {}, {}, {}, {})
    destination = {"to": ("default", HOSTILE), "selector": HOSTILE, "copies": 1234}
    flow = Flow(HOSTILE, ("default", "orders"), [destination], {"ok": 1300, "no_route": 66})
    flows = [] if is_empty else [flow]
    page = folder / "report.html"
    page.write_text(report_page.page(Report("db on host", period, end, figures, flows)))
    return page.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_report_opens_from_the_disk_and_can_be_read(
    visitors: Visitors, tmp_path: Path, scheme: str, width: int
) -> None:
    page = visitors(viewport={"width": width, "height": 800}, color_scheme=scheme)
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
    assert too_wide(page) == []
    assert pale_text(page) == []
    assert page.locator("main script, main b").count() == 0


def test_a_report_of_nothing_says_so(visitors: Visitors, tmp_path: Path) -> None:
    page = visitors()
    page.goto(report(tmp_path, is_empty=True))
    expect(page.get_by_text("Nothing was published in this period")).to_be_visible()
    expect(page.get_by_text("There are no exchanges.")).to_be_visible()
    expect(page.get_by_text("How much was published")).to_be_hidden()


def test_a_report_on_paper_fits_and_is_light(visitors: Visitors, tmp_path: Path) -> None:
    page = visitors(viewport={"width": 794, "height": 1123}, color_scheme="dark")
    page.goto(report(tmp_path))
    expect(page.locator("#rates .main-svg").first).to_be_visible()
    page.emulate_media(media="print", color_scheme="light")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    until(page, "document.querySelector('#rates .main-svg').clientWidth <= 680")
    assert too_wide(page) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
