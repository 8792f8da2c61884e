"""The monitor in a real browser: what it shows changes by itself, and is never stale unsaid."""

import os
import signal

import psycopg
import pytest
from playwright.sync_api import Page, expect

from project.postgres import Server
from tests.sql.conftest import Program, World
from tests.web.browser import Visitors, until
from tests.web.site import Site

RULE = f"{Server.owner} example.monitor.* Topic * O 60"
LIVE = '#pill[data-is="live"]'
IS_GREYED = "document.documentElement.classList.contains('stale')"
# What a browser itself says where the server does not answer.
AWAY = r"WebSocket connection|Failed to load resource"


@pytest.fixture
def site_with_rule(site: Site, world: World) -> Site:
    world.rules(RULE)
    site.user("admin", is_staff=True, is_superuser=True)
    return site


def live(page: Page, address: str) -> Page:
    page.goto(address)
    expect(page.locator(LIVE)).to_be_visible()
    return page


def pair(world: World, topic: str) -> tuple[Program, Program]:
    world.rule("user1", "SENDER", "Topic", topic, "W", 60)
    world.rule("user2", "LISTENER", "Topic", topic, "R", 60)
    sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER")
    listener.ok("topic_listen", topic)
    sender.ok("topic_notify", topic)
    return sender, listener


@pytest.mark.usefixtures("site_with_rule")
def test_a_listener_appears_in_the_list_and_vanishes_without_reload(
    visitors: Visitors, world: World
) -> None:
    page = live(visitors("admin"), "/monitor/")
    sender, listener = pair(world, "SHOWN")
    row = page.get_by_role("row").filter(has_text="SHOWN")
    expect(row).to_contain_text("LISTENER")
    sender.ok("topic_send_many", "SHOWN", ["x"] * 10)
    expect(row.locator("time")).not_to_have_text("none")
    listener.ok("topic_unlisten", "SHOWN")
    expect(row).not_to_contain_text("LISTENER")
    # Monitors of other sites may come and go.
    said = page.locator("#events li").filter(has_text="nobody listens to SHOWN any more")
    expect(said).to_have_count(1)


@pytest.mark.usefixtures("site_with_rule")
def test_the_chart_is_drawn_under_the_policy(visitors: Visitors, world: World) -> None:
    page = live(visitors("admin"), "/monitor/topics/DRAWN/")
    sender, _ = pair(world, "DRAWN")
    sender.ok("topic_send_many", "DRAWN", ["x"] * 30)
    expect(page.locator("#chart .main-svg").first).to_be_visible()
    expect(page.locator("#chart-note")).to_contain_text("30 messages, 30 B")
    expect(page.locator("#totals")).to_contain_text("30")
    # Styled by our own rules: plotly's layers lie upon each other.
    assert page.locator("#chart .main-svg").first.evaluate("e => getComputedStyle(e).position") == (
        "absolute"
    )


def test_the_missing_rule_is_added_by_the_button_and_the_page_goes_live(
    site: Site, visitors: Visitors
) -> None:
    site.user("admin", is_staff=True, is_superuser=True)
    page = visitors("admin")
    page.goto("/monitor/")
    expect(page.locator("#banner")).to_contain_text("example.monitor.*")
    page.get_by_role("button", name="Add this rule").click()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.locator("#banner")).to_be_hidden()


def test_who_may_not_add_the_rule_is_told_whom_to_ask(site: Site, visitors: Visitors) -> None:
    site.user("looker", is_staff=True, permissions=["psqlmessages.view_monitor"])
    page = visitors("looker")
    page.goto("/monitor/")
    expect(page.locator("#missing-rule")).to_contain_text("psqlmessages.add_auth")
    expect(page.get_by_role("button", name="Add this rule")).to_have_count(0)


def test_a_server_that_is_gone_is_told_at_once_and_the_page_returns(
    site_with_rule: Site, visitors: Visitors
) -> None:
    visitors.expect(AWAY)
    page = live(visitors("admin"), "/monitor/")
    site_with_rule.stop()
    expect(page.locator("#banner")).to_contain_text("connects again by itself")
    until(page, IS_GREYED)
    site_with_rule.start()
    expect(page.locator(LIVE)).to_be_visible()
    expect(page.locator("#banner")).to_be_hidden()
    until(page, f"!{IS_GREYED}")


def test_a_server_that_falls_silent_is_not_taken_for_live(
    site_with_rule: Site, visitors: Visitors
) -> None:
    page = live(visitors("admin"), "/monitor/")
    os.kill(site_with_rule.pid, signal.SIGSTOP)
    try:
        expect(page.locator("#banner")).to_contain_text("Nothing has come")
        until(page, IS_GREYED)
    finally:
        os.kill(site_with_rule.pid, signal.SIGCONT)
    expect(page.locator(LIVE)).to_be_visible()


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        (1006, "", "There is no WebSocket at /ws/monitor/"),
        (4429, "more than 20 WebSockets of one user", "more than 20 WebSockets of one user"),
    ],
)
@pytest.mark.usefixtures("site_with_rule")
def test_a_page_whose_socket_never_opens_says_why(
    visitors: Visitors, code: int, reason: str, said: str
) -> None:
    page = visitors("admin")
    page.add_init_script(
        "window.WebSocket = class { static OPEN = 1; constructor() {"
        f" setTimeout(() => this.onclose({{ code: {code}, reason: '{reason}' }})); }} }};"
    )
    page.goto("/monitor/")
    expect(page.locator("#banner")).to_contain_text(said)
    expect(page.locator("#banner")).not_to_contain_text("numbers")


def test_a_permission_taken_away_ends_the_page_for_good(
    site_with_rule: Site, visitors: Visitors
) -> None:
    looker = site_with_rule.user("looker", is_staff=True, permissions=["psqlmessages.view_monitor"])
    page = live(visitors("looker"), "/monitor/")
    looker.user_permissions.clear()
    expect(page.locator("#banner")).to_contain_text("do not have the permission")
    expect(page.get_by_role("link", name="Open it again")).to_be_visible()


@pytest.mark.usefixtures("site_with_rule")
def test_messages_can_be_held_for_reading(visitors: Visitors, world: World) -> None:
    page = live(visitors("admin"), "/monitor/topics/HELD/")
    sender, _ = pair(world, "HELD")
    expect(page.get_by_label("Listeners now")).to_have_text("LISTENER")
    sender.ok("topic_send", "HELD", "one")
    expect(page.locator("#tail li")).to_have_count(1)
    page.get_by_role("button", name="Hold").click()
    sender.ok("topic_send", "HELD", "two")
    expect(page.locator("#totals")).to_contain_text("2")
    expect(page.locator("#tail li")).to_have_count(1)
    page.get_by_role("button", name="Held").click()
    expect(page.locator("#tail li").first).to_contain_text("two")


@pytest.mark.usefixtures("site_with_rule")
def test_the_list_is_filtered_and_sorted_by_the_keyboard(visitors: Visitors, world: World) -> None:
    page = live(visitors("admin"), "/monitor/")
    sender, _ = pair(world, "BUSY")
    world.rules("user1 SENDER Topic CALM W 60", "user1 SENDER Topic QUIET W 60")
    sender.ok("topic_send_many", "BUSY", ["x"] * 50)
    names = page.locator("#topics th")
    expect(names).to_have_text(["BUSY", "CALM", "QUIET"])
    page.get_by_role("button", name="Last message").focus()
    page.keyboard.press("Enter")
    expect(names.first).to_have_text("BUSY")
    page.keyboard.press("Enter")
    expect(names.last).to_have_text("BUSY")
    expect(page.locator('th[aria-sort="ascending"]')).to_have_text("Last message")
    page.locator("#filter").focus()
    page.keyboard.type("listen")
    expect(names).to_have_text(["BUSY"])


@pytest.mark.usefixtures("site_with_rule")
def test_the_admins_page_of_a_topic_is_live_too(visitors: Visitors, world: World) -> None:
    world.rules("user2 LISTENER Topic SEEN R 60")
    page = visitors("admin")
    page.goto("/admin/psqlmessages/topic/")
    page.get_by_role("link", name="SEEN").click()
    section = page.locator("section[data-topic]")
    expect(section).to_contain_text("Nobody listens now.")
    listener = world.node("user2", "LISTENER")
    listener.ok("topic_listen", "SEEN")
    expect(section.get_by_label("Listeners now")).to_have_text("LISTENER")
    listener.ok("topic_unlisten", "SEEN")
    expect(section).to_contain_text("Nobody listens now.")


@pytest.mark.usefixtures("site_with_rule")
def test_what_holds_the_queue_back_is_named_and_vanishes_without_reload(
    visitors: Visitors, world: World
) -> None:
    page = live(visitors("admin"), "/monitor/")
    card = page.locator("#health > div").filter(has_text="Notification queue")
    expect(card).to_contain_text("nobody holds it back")
    page.evaluate("window.isTheSame = true")
    world.rules(f"{Server.owner} HOLDER Topic T R 60")
    # Of the role as which Django connects: what others do it may not see.
    with psycopg.connect(world.server.url(), autocommit=True) as holder:
        holder.execute("SELECT messages.init('HOLDER')")
        # The page is to tell after ten seconds.
        holder.execute("BEGIN")
        said = f"held back by pid {holder.info.backend_pid} ({Server.owner}, "
        expect(card).to_contain_text(said, timeout=60_000)
        expect(card).to_contain_text("idle in transaction for")
        expect(card).to_have_class("wrong")
        holder.execute("COMMIT")
        expect(card).to_contain_text("nobody holds it back")
    expect(card).not_to_have_class("wrong")
    # The same page, never loaded anew.
    assert page.evaluate("window.isTheSame")
