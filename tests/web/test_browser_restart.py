"""PostgreSQL goes away under open pages: they say so, and are live again once it is back."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from project.postgres import Server
from project.postgres.ports import free_port
from tests.own_server import own_server
from tests.project.example import Example, copy_project
from tests.servers import SERVER
from tests.web.browser import AWAY, LIVE, Visitors, log_in

# It makes a PostgreSQL, starts everything on it, and stops it meanwhile.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

# Longer than the page is trusted, and than it takes to call a socket silent.
OUTAGE_MILLISECONDS = 12_000
# Whatever the banner says during that time.
SAID = """(milliseconds) => new Promise((resolve) => {
    const banner = document.getElementById("banner-text");
    const said = new Set([banner.textContent]);
    const note = () => said.add(banner.textContent);
    new MutationObserver(note).observe(banner, { childList: true, subtree: true });
    setTimeout(() => resolve([...said]), milliseconds);
})"""


@pytest.fixture
def server(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[Server]:
    with own_server(tmp_path, pytestconfig.stash[SERVER].binaries) as own:
        yield own.server


@pytest.fixture
def example(server: Server, tmp_path: Path) -> Iterator[Example]:
    """`make run` on that PostgreSQL, with its live traffic."""
    copy = copy_project(tmp_path / "copy")
    with closing(Example(copy, server.url(), seconds=300, PORT=str(free_port()))) as example:
        yield example.ready()


def test_the_examples_pages_follow_its_rules_and_say_that_postgresql_is_away(
    example: Example, server: Server, browser: Browser
):
    with Visitors(browser, example.field("address")) as visitors:
        play(example, server, visitors)


def play(example: Example, server: Server, visitors: Visitors) -> None:
    def opened(path: str) -> Page:
        page = visitors()
        log_in(page, "admin", example.field("password"), path)
        return page

    page, topic = opened("/"), opened("/monitor/topics/DEMO.PRICES/")
    board = topic.get_by_label("Listeners now")
    expect(board).to_have_text("DEMO.BOARD")
    page.get_by_role("link", name="Open the rule").click()
    page.get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Yes").click()
    expect(page.locator(".messagelist")).to_contain_text("DEMO.BOARD")
    expect(board).to_have_count(0)
    page.goto("/")
    page.get_by_role("link", name="Add the rule again").click()
    expect(page.get_by_label("Ident")).to_have_value("DEMO.BOARD")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".messagelist")).to_contain_text("added successfully")
    expect(board).to_have_text("DEMO.BOARD")

    visitors.expect(AWAY)
    chat = opened("/chat/")
    expect(chat.locator("#state")).to_have_text("live")
    server.stop()
    expect(topic.locator("#banner")).to_contain_text("PostgreSQL cannot be reached")
    said = topic.evaluate(SAID, OUTAGE_MILLISECONDS)
    assert [text for text in said if "PostgreSQL cannot be reached" not in text] == []
    expect(topic.locator("#pill")).not_to_have_attribute("data-is", "live")
    expect(chat.locator("#state")).not_to_have_text("live")
    server.start()
    expect(topic.locator(LIVE)).to_be_visible()
    expect(topic.locator("#banner")).to_be_hidden()
    expect(board).to_have_text("DEMO.BOARD")
    expect(topic.locator("#tail li").first).to_contain_text(re.compile("DEMO.TICKER"))
    expect(chat.locator("#state")).to_have_text("live")
    chat.get_by_label("Your message").fill("there again")
    chat.keyboard.press("Enter")
    expect(chat.locator("li.mine")).to_contain_text("there again")
