"""The example project's own pages in a real browser."""

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Page, expect
from pytest_django import Settings

from project.example import CHAT_TOPIC
from project.postgres import Server
from tests.sql.conftest import World
from tests.web.browser import Visitors, until
from tests.web.site import Site

ROLE = Server.owner


@pytest.fixture
def room(site: Site, world: World) -> None:
    """A room for chat/*, and two users who may come in."""
    world.rules(f"{ROLE} chat/* Topic {CHAT_TOPIC} RW 60")
    for name in ("ann", "bob"):
        site.user(name, idents=[f"chat/{name}/*"])


def in_chat(page: Page) -> Page:
    page.goto("/chat/")
    expect(page.locator("#state")).to_have_text("live")
    return page


def say(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


@pytest.mark.usefixtures("room")
def test_two_browsers_chat(visitors: Visitors) -> None:
    ann, bob = in_chat(visitors("ann")), in_chat(visitors("bob"))
    expect(ann.locator("#who")).to_contain_text("bob")
    say(ann, "hello <b>bob</b>")
    expect(bob.locator("li.other")).to_contain_text("hello <b>bob</b>")
    say(bob, "hello ann")
    expect(ann.locator("li.other")).to_contain_text("hello ann")
    expect(ann.locator("li.mine")).to_have_count(1)
    bob.close()
    expect(ann.locator("#who")).to_contain_text("alone")


@pytest.mark.usefixtures("room")
def test_the_chat_falls_silent_without_its_rule_and_returns_with_it(
    visitors: Visitors, world: World
) -> None:
    ann = in_chat(visitors("ann"))
    world.owner.connection.execute("UPDATE messages.auth SET mode = 'R' WHERE ident = 'chat/*'")
    expect(ann.locator("#state")).to_have_text("a rule is missing")
    expect(ann.get_by_role("button", name="Send")).to_be_disabled()
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'chat/*'")
    expect(ann.locator("#state")).to_contain_text("refused")
    world.rules(f"{ROLE} chat/* Topic {CHAT_TOPIC} RW 60")
    expect(ann.locator("#state")).to_have_text("live")
    say(ann, "again")
    expect(ann.locator("li.mine")).to_contain_text("again")


CONNECT = """async (ident) => {
    const { connect } = await import("/static/psqlmessages/node.js");
    window.node = await connect(ident);
    window.heard = [];
}"""


def test_two_browsers_talk_through_the_bare_module(
    site: Site, visitors: Visitors, world: World
) -> None:
    world.rules(
        f"{ROLE} web.* Topic ROOM RW 60", f"{ROLE} web.ann Rpc web.bob W 60",
        f"{ROLE} web.bob Rpc web.ann W 60",
    )  # fmt: skip
    pages = []
    for name in ("ann", "bob"):
        site.user(name, idents=[f"web.{name}"])
        page = visitors(name)
        page.goto("/")
        page.evaluate(CONNECT, f"web.{name}")
        pages.append(page)
    ann, bob = pages
    bob.evaluate("node.listen('ROOM', (message) => heard.push(message.body))")
    ann.evaluate("node.notify('ROOM')")
    ann.evaluate("node.send('ROOM', { order: 1, note: 'x'.repeat(20000) })")
    until(bob, "heard.length === 1")
    assert bob.evaluate("heard[0].order + heard[0].note.length") == 20_001
    bob.evaluate("node.onCall((message) => message.body * 2)")
    assert ann.evaluate("node.call('web.bob', 21, { timeout: 60000 })") == 42


def test_a_browser_cannot_be_a_node_of_somebody_else(
    site: Site, visitors: Visitors, world: World
) -> None:
    world.rules(f"{ROLE} web.* Topic ROOM RW 60")
    site.user("ann", idents=["web.ann"])
    page = visitors("ann")
    page.goto("/")
    number = page.evaluate(f"({CONNECT})('web.bob').catch((error) => error.number)")
    assert number == 5


def test_the_chat_asks_to_log_in(visitors: Visitors) -> None:
    page = visitors()
    page.goto("/chat/")
    expect(page).to_have_title("Log in · psqlmessages")


@pytest.mark.usefixtures("room")
def test_who_is_not_staff_logs_in_to_the_chat(visitors: Visitors, settings: Settings) -> None:
    # That of the site under test.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    ann = User.objects.get(username="ann")
    ann.set_password("of ann alone")
    ann.save()
    page = visitors()
    page.goto("/chat/")
    page.get_by_label("Username").fill("ann")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("correct username and password")
    page.get_by_label("Password").fill("of ann alone")
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("#state")).to_have_text("live")


@pytest.mark.usefixtures("room")
def test_a_chat_that_is_shown_again_as_it_was_left_comes_in_anew(visitors: Visitors) -> None:
    ann = in_chat(visitors("ann"))
    # So a browser tells that it keeps the page for its Back button.
    ann.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    expect(ann.locator("#state")).to_have_text("live")
    say(ann, "back")
    expect(ann.locator("li.mine")).to_contain_text("back")


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("path", ["/", "/chat/"])
def test_a_page_that_says_who_you_are_is_not_kept(visitors: Visitors, path: str) -> None:
    answer = visitors("ann").goto(path)
    assert answer is not None
    assert "no-store" in answer.headers["cache-control"]


@pytest.mark.usefixtures("room")
def test_who_is_not_staff_can_log_out(visitors: Visitors) -> None:
    ann = in_chat(visitors("ann"))
    ann.get_by_role("button", name="Log out").click()
    expect(ann.get_by_role("link", name="Log in")).to_be_visible()
