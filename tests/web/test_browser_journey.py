"""What an administrator does: log in, give and take rights, and see it happen live."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from project.postgres import Server
from tests.sql.conftest import World
from tests.web.browser import Visitors
from tests.web.site import PASSWORD, Site

ROLE = Server.owner
LIVE = '#pill[data-is="live"]'


@pytest.fixture
def observed(site: Site, world: World) -> Site:
    """A site whose monitor may observe, with an administrator."""
    site.user("admin", is_staff=True, is_superuser=True)
    world.rules(f"{ROLE} example.monitor.* Topic * O 60")
    return site


def listeners(page: Page) -> Locator:
    return page.get_by_label("Listeners now").get_by_role("listitem")


def add_rule(page: Page, role: str, ident: str, dest: str, mode: str) -> None:
    page.goto("/admin/psqlmessages/auth/add/")
    for label, text in (("Role", role), ("Ident", ident), ("Destination", dest), ("Timeout", "60")):
        page.get_by_label(label).fill(text)
    page.get_by_label("Type").select_option("Topic")
    page.get_by_label("Mode").select_option(mode)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".messagelist .success")).to_contain_text("added successfully")


def test_a_right_is_given_used_and_taken_away_and_the_page_shows_it(
    observed: Site, visitors: Visitors, world: World
) -> None:
    admin, watching = visitors("admin"), visitors("admin")
    add_rule(admin, "user2", "LISTENER", "NEWS", "R")
    watching.goto("/monitor/topics/NEWS/")
    expect(watching.locator(LIVE)).to_be_visible()
    expect(listeners(watching)).to_have_count(0)
    listener = world.node("user2", "LISTENER")
    listener.ok("topic_listen", "NEWS")
    expect(listeners(watching)).to_have_text(["LISTENER"])
    admin.get_by_role("link", name="LISTENER").first.click()
    admin.get_by_label("Mode").select_option("W")
    admin.get_by_role("button", name="Save", exact=True).click()
    expect(admin.locator(".messagelist")).to_contain_text("LISTENER no longer listens to NEWS")
    expect(listeners(watching)).to_have_count(0)
    assert "topic_unlisten LISTENER NEWS" in listener.events()


def test_a_listener_that_leaves_vanishes_from_the_page(
    observed: Site, visitors: Visitors, world: World
) -> None:
    world.rules("user2 LISTENER Topic NEWS R 60")
    listener = world.node("user2", "LISTENER")
    listener.ok("topic_listen", "NEWS")
    page = visitors("admin")
    page.goto("/monitor/topics/NEWS/")
    expect(listeners(page)).to_have_text(["LISTENER"])
    listener.ok("deinit", "LISTENER")
    expect(listeners(page)).to_have_count(0)


def test_what_is_sent_shows_in_the_list_and_on_the_page_of_the_topic(
    observed: Site, visitors: Visitors, world: World
) -> None:
    world.rules("user1 SENDER Topic NEWS W 60", "user2 LISTENER Topic NEWS R 60")
    world.node("user2", "LISTENER").ok("topic_listen", "NEWS")
    sender = world.node("user1", "SENDER")
    sender.ok("topic_notify", "NEWS")
    page = visitors("admin")
    page.goto("/monitor/")
    expect(page.locator(LIVE)).to_be_visible()
    row = page.get_by_role("row", name="NEWS")
    expect(row).to_contain_text("SENDER")
    expect(row).to_contain_text("LISTENER")
    row.get_by_role("link", name="NEWS").click()
    expect(page.locator(LIVE)).to_be_visible()
    for number in range(3):
        sender.ok("topic_send", "NEWS", f"flash {number}")
    expect(page.locator("#tail")).to_contain_text("flash 2")
    expect(page.locator("#chart .main-svg").first).to_be_visible()


# Where the first topic's link was, in each frame that the browser drew.
PLACES = """
    window.places = new Set();
    (function look() {
        const link = document.querySelector("#topics a");
        if (link) places.add(link.getBoundingClientRect().top);
        requestAnimationFrame(look);
    })();
"""


@pytest.mark.parametrize("width", [1280, 800])
def test_the_list_stays_in_its_place_while_the_first_figures_come(
    observed: Site, visitors: Visitors, world: World, width: int
) -> None:
    world.rules("user2 LISTENER Topic NEWS R 60")
    page = visitors("admin", viewport={"width": width, "height": 800})
    page.add_init_script(PLACES)
    observed.restart()  # The first snapshot is without figures.
    page.goto("/monitor/")
    expect(page.get_by_role("link", name="NEWS")).to_be_visible()
    expect(page.locator("#health .unknown")).to_have_count(0)
    expect(page.locator("#health")).to_contain_text(re.compile(r"page and back \d"))
    assert len(page.evaluate("[...places]")) == 1, "who clicks in this moment clicks beside"


def test_a_link_keeps_the_focus_when_what_stood_above_it_goes(
    observed: Site, visitors: Visitors, world: World
) -> None:
    world.rules("user2 LISTENER Topic ABOVE R 60", "user2 LISTENER Topic NEWS R 60")
    page = visitors("admin")
    page.goto("/monitor/")
    link = page.get_by_role("link", name="NEWS")
    link.focus()
    page.get_by_label("Filter topics").evaluate(
        "field => { field.value = 'NEWS'; field.dispatchEvent(new Event('input')); }"
    )
    expect(page.get_by_role("link", name="ABOVE")).to_have_count(0)
    expect(link).to_be_focused()


def tab_to(page: Page, target: Locator) -> None:
    """Press Tab until this has the focus, as one does who has no mouse."""
    for _ in range(60):
        if target.evaluate("element => element === document.activeElement"):
            shown = target.evaluate("element => element.matches(':focus-visible')")
            assert shown, "the focus cannot be seen"
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab never leads to {target}")


def test_it_all_works_with_the_keyboard_alone(
    observed: Site, visitors: Visitors, world: World
) -> None:
    world.rules("user2 LISTENER Topic NEWS R 60")
    listener = world.node("user2", "LISTENER")
    listener.ok("topic_listen", "NEWS")
    page = visitors()
    page.goto("/admin/login/?next=/monitor/")
    tab_to(page, page.get_by_label("Username"))
    page.keyboard.type("admin")
    tab_to(page, page.get_by_label("Password"))
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    expect(page.locator(LIVE)).to_be_visible()
    link = page.get_by_role("link", name="NEWS", exact=True)
    expect(link).to_be_visible()
    tab_to(page, link)
    page.keyboard.press("Enter")
    expect(listeners(page)).to_have_text(["LISTENER"])
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
