"""Queues and exchanges in a real browser: drawn, tried, started, and seen at work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, expect

from psqlmessages.models import Destination, Element, Exchange, ExchangeCount, Queue
from tests.conftest import TestedServer
from tests.sql.conftest import Program, World
from tests.web.browser import Visitors
from tests.web.legibility import NARROW, too_wide
from tests.web.site import ROOT, Site
from tests.web.test_admin_exchanges import EXCHANGES, HOSTILE, new

QUEUES = "/admin/psqlmessages/queue/"


@pytest.fixture(autouse=True)
def worker(site: Site, world: World) -> Program:
    """An administrator, no exchanges, and a program of user1 that may use all queues as W."""
    for model in (ExchangeCount, Destination, Exchange, Element, Queue):
        model.objects.all().delete()
    site.user("chief", is_staff=True, is_superuser=True)
    world.rules("user1 W Queue * RW 60")
    return world.program("user1")


@contextmanager
def runner(server: TestedServer) -> Iterator[subprocess.Popen[bytes]]:
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
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


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


@pytest.mark.timeout(400)
def test_an_exchange_is_drawn_tried_started_and_seen_at_work(
    visitors: Visitors, server: TestedServer, worker: Program
) -> None:
    page = visitors("chief")
    draw(page)
    expect(page.get_by_text("these rules are missing")).to_be_visible()
    page.get_by_role("button", name="Add those of this database").click()
    expect(page.get_by_text("exchange.sort may do what it needs.")).to_be_visible()
    page.get_by_role("link", name="Try it").click()
    page.locator("#id_headers").fill('{"country": "it"}')
    page.get_by_role("button", name="Try it").click()
    row = page.get_by_role("row").filter(has_text="default/eu")
    expect(row.get_by_role("cell", name="yes", exact=True)).to_be_visible()
    page.get_by_role("link", name="sort").click()
    page.get_by_role("button", name="Start it").click()
    expect(page.get_by_role("button", name="Stop it")).to_be_visible()
    page.goto("/monitor/exchanges/")
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
    counts = [Element.objects.filter(queue__name=name).count() for name in ("eu", "audit")]
    assert counts[1] == 2 * counts[0] > 0


def test_script_tags_are_text_on_every_page(visitors: Visitors, worker: Program) -> None:
    exchange = new(HOSTILE, HOSTILE, f"{HOSTILE} msg.body == '{HOSTILE}'")
    worker.connection.execute(
        "SELECT messages.push('W', %s, %s, headers => %s)",
        [HOSTILE, HOSTILE, f'{{"{HOSTILE}": "{HOSTILE}"}}'],
    )
    queue = Queue.objects.get()
    page = visitors("chief")
    page.on("dialog", lambda dialog: visitors.troubles.append(f"dialog: {dialog.message}"))
    for path in (
        EXCHANGES,
        f"{EXCHANGES}{exchange.pk}/change/",
        f"{EXCHANGES}{exchange.pk}/try/",
        QUEUES,
        f"{QUEUES}{queue.pk}/change/",
        f"{QUEUES}{queue.pk}/elements/",
        "/monitor/exchanges/",
    ):
        page.goto(path)
        expect(page.get_by_text(HOSTILE).first).to_be_attached()
    page.goto(f"{EXCHANGES}{exchange.pk}/try/")
    page.locator("#id_body").fill(HOSTILE)
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_role("status")).to_contain_text(HOSTILE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_sticks_out_of_a_narrow_screen(
    visitors: Visitors, worker: Program, scheme: str
) -> None:
    exchange = new("sort", "orders", f"eu msg.body == '{'x' * 200}'", "d" * 100)
    worker.connection.execute("SELECT messages.push('W', 'orders', %s)", ["y" * 5000])
    queue = Queue.objects.get()
    page = visitors("chief", color_scheme=scheme, viewport=NARROW)
    for path in (
        EXCHANGES,
        f"{EXCHANGES}add/",
        f"{EXCHANGES}{exchange.pk}/change/",
        f"{EXCHANGES}{exchange.pk}/try/",
        QUEUES,
        f"{QUEUES}add/",
        f"{QUEUES}{queue.pk}/change/",
        f"{QUEUES}{queue.pk}/elements/",
    ):
        page.goto(path)
        assert too_wide(page) == [], path
    page.goto(f"{EXCHANGES}{exchange.pk}/try/")
    page.locator("#id_body").fill("z" * 3000)
    page.get_by_role("button", name="Try it").click()
    expect(page.get_by_role("status")).to_be_visible()
    assert too_wide(page) == []
