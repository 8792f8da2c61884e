"""`make screenshots`: the pictures of the documentation, taken from the example project."""

import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from project.postgres.ports import free_port
from tests.conftest import TestedServer
from tests.project.example import Example, copy_project, own_database
from tests.servers import exclusive_server
from tests.web.browser import LIVE, Visitors, chromium

IMAGES = Path(__file__).parents[1] / "docs" / "images"
VIEW = {"width": 1280, "height": 640}
# Wait this long for enough traffic in the charts.
TRAFFIC_MILLISECONDS = 4 * 60 * 1000
# A page shows rates when it has been open for this time.
RATE_MILLISECONDS = 12_000


# A script for Django's shell. It causes elements without a consumer, refused calls, and a stream
# with two subscriptions.
PROBLEMS = """
import asyncio, contextlib
from django.db import transaction
from psqlmessages.django import publish, push, read_stream, send
from psqlmessages.exceptions import MessagesError
from psqlmessages.monitor.refused_writer import write_counts
from psqlmessages.testing import allow_queue, allow_topic
allow_topic("SHIPMENTS")
for client in ("billing", "audit"):
    allow_topic("SHIPMENTS", ident=client, mode="R")
    with transaction.atomic():
        read_stream(client, "SHIPMENTS", 600)
for order in range(12):
    publish("SHIPMENTS", {"order": order, "carrier": "post"})
with transaction.atomic():
    read_stream("audit", "SHIPMENTS", 600)
allow_queue("invoices")
allow_queue("invoices", ident="shop")
for number in range(3):
    push("invoices", {"order": number})
    with contextlib.suppress(MessagesError):
        send("INVOICES", {"order": number}, ident="shop")
asyncio.run(write_counts())
"""


def log_in(page: Page, username: str, password: str, to: str) -> None:
    """Log in by the form, and open a page."""
    page.goto(f"/admin/login/?next={to}")
    page.get_by_label("Username").fill(username)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(lambda url: "/login/" not in url)


def main() -> None:
    """Run the example project with its traffic, and take all pictures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        exclusive_server() as server,
        own_database(TestedServer(server, "postgres"), "screenshots") as url,
    ):
        project = copy_project(Path(folder) / "copy")
        example_process = Example(project, url, seconds=10 * 60, PORT=str(free_port()))
        with chromium() as browser, closing(example_process) as example:
            job = start_job(example.ready(), "traffic")
            make_problems(example.folder, example.database_url)
            try:
                take_all(browser, example)
            finally:
                job.terminate()
                job.wait()


def start_job(example: Example, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a job of the pipeline on the example's database."""
    manage = str(example.folder / "manage.py")
    return subprocess.Popen(
        [sys.executable, manage, "psqlmessages", "pipeline", *arguments],
        cwd=example.folder, env={**os.environ, "DATABASE_URL": example.database_url},
    )  # fmt: skip


def make_problems(folder: Path, database_url: str) -> None:
    """Cause the problems that the first page of the monitor shows."""
    environment = {**os.environ, "DATABASE_URL": database_url}
    command = [sys.executable, "manage.py", "shell", "-c", PROBLEMS]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def take_all(browser: Browser, example: Example) -> None:
    """Visit the pages, and take a picture of each."""
    visitors = Visitors(browser, example.field("address"))
    page, other = (visitors(viewport=VIEW, device_scale_factor=1) for _ in range(2))
    log_in(page, "admin", example.field("password"), "/monitor/topics/")
    log_in(other, "admin", example.field("password"), "/chat/")
    expect(page.locator(LIVE)).to_be_visible()
    page.wait_for_timeout(TRAFFIC_MILLISECONDS)
    take_monitor(page)
    take_traffic(page, example)
    take_others(page)
    page.set_viewport_size({"width": 1280, "height": 700})
    page.goto("/chat/")
    chat(page, other)
    save(page, "chat")
    if errors := visitors.unexpected():
        raise SystemExit(f"the pages have errors: {errors}")


# For each picture: the page, the height of the window, and the elements that must be visible.
MONITOR_PAGES = {
    "monitor": ("topics/", 640, "#topics tr"),
    "now": ("", 640, ".problems li"),
    "queue": ("queues/invoices/", 1000, "tbody tr, #history .plot"),
    "topic": ("topics/DEMO.ORDERS/", 1200, "#chart .plot, #tail li"),
    "exchanges": ("exchanges/", 900, ".edge.copy.busy"),
    "queues": ("queues/", 640, "tbody tr"),
    "streams": ("streams/", 640, "tbody tr"),
    "nodes": ("nodes/", 640, "tbody tr"),
    "node": ("nodes/DEMO.BOARD/", 900, "h1"),
}
# Pictures of these pages are also taken in the dark scheme and on a narrow screen.
MAIN_PAGES = ("now", "monitor", "topic")


def take_monitor(page: Page) -> None:
    """Take pictures of the monitor, some of them in the dark scheme and on a narrow screen too."""
    for name, (path, height, visible) in MONITOR_PAGES.items():
        page.set_viewport_size({"width": 1280, "height": height})
        page.goto(f"/monitor/{path}")
        expect(page.locator(LIVE)).to_be_visible()
        for selector in visible.split(", "):
            expect(page.locator(selector).first).to_be_visible()
        page.wait_for_timeout(RATE_MILLISECONDS)
        save(page, name)
        if name in MAIN_PAGES:
            page.emulate_media(color_scheme="dark")
            save(page, f"{name}-dark")
            page.set_viewport_size({"width": 390, "height": 844})
            page.emulate_media(color_scheme="light")
            page.wait_for_timeout(RATE_MILLISECONDS)
            save(page, f"{name}-narrow")


# Pages that are not live.
OTHER_PAGES = {
    "rules": ("/admin/psqlmessages/auth/", 800, "#result_list tr"),
    "admin-topic": ("/admin/psqlmessages/topic/", 1000, "[data-topic] .status"),
    "admin-queues": ("/admin/psqlmessages/queue/", 640, "#result_list tr"),
    "stored": ("/monitor/stored/?topic=SHIPMENTS", 640, ".tail li"),
    "api": ("/api/docs", 800, ".opblock"),
}


def take_others(page: Page) -> None:
    """Take pictures of the admin, stored messages and the page of the REST API."""
    for name, (path, height, visible) in OTHER_PAGES.items():
        page.set_viewport_size({"width": 1280, "height": height})
        page.goto(path)
        if name == "admin-topic":
            page.get_by_role("link", name="DEMO.ORDERS").click()
        expect(page.locator(visible).first).to_be_visible()
        if name == "rules":  # the browser remembers it for the other pages
            page.get_by_role("button", name="Toggle navigation").click()
        save(page, name)


def take_traffic(page: Page, example: Example) -> None:
    """Take pictures of a topic's traffic, and of a report of the last minutes."""
    page.set_viewport_size({"width": 1280, "height": 1220})
    page.goto("/monitor/traffic/topic/?name=DEMO.PRICES&window=10&seconds=600")
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.locator("#shares .plot").first).to_be_visible()
    expect(page.locator("#senders tr")).not_to_have_count(0)
    save(page, "traffic")
    file = example.folder / "report.html"
    if start_job(example, "report", "--from", "5m", "--out", str(file)).wait():
        raise SystemExit("the job report failed")
    page.set_viewport_size({"width": 1280, "height": 1600})
    page.goto(file.as_uri())
    expect(page.locator("#shares .plot").first).to_be_visible()
    save(page, "report")


def chat(one: Page, other: Page) -> None:
    """Send some messages from two windows."""
    for page in (one, other):
        expect(page.locator("#state")).to_have_text("live")
    messages = (
        (other, "Is anybody there?"),
        (one, "Yes: I am another window, and another node."),
        (other, "Then the rule for chat/* lets us both in."),
        (one, "Take it away in the admin, and we fall silent."),
    )
    for number, (page, text) in enumerate(messages, 1):
        page.get_by_label("Your message").fill(text)
        page.keyboard.press("Enter")
        expect(one.locator(".lines li b")).to_have_count(number)


def save(page: Page, name: str) -> None:
    """Write the picture of a page, without the mouse pointer."""
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=IMAGES / f"{name}.png")
    print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
