"""The admin in a real browser: nothing is forbidden by the site's policy, nothing sticks out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.contrib.auth.models import User

from psqlmessages.models import Auth, Client, Topic
from tests.sql.conftest import Program, World
from tests.web.browser import Visitors
from tests.web.desks import CLIENTS, IDENTITIES, RULES, TOPICS
from tests.web.site import Site

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def chief(site: Site) -> User:
    return site.user("chief", is_staff=True, is_superuser=True)


@pytest.fixture
def board(world: World, site: Site) -> Program:
    """BOARD may listen to PRICES, and the monitor may observe it."""
    owner = world.owner.query("SELECT current_user")
    world.rules(f"{owner} example.monitor.* Topic * O 60", "user1 BOARD Topic PRICES R 60")
    return world.node("user1", "BOARD")


def open_topic(page: Page) -> None:
    page.goto(f"{TOPICS}{Topic.objects.get(name='PRICES').pk}/change/")


def test_the_page_of_a_topic_shows_a_listener_come_and_go_without_reload(
    visitors: Visitors, chief: User, board: Program
) -> None:
    page = visitors("chief")
    open_topic(page)
    page.get_by_text("Nobody listens now.").wait_for()
    board.ok("topic_listen", "PRICES")
    page.get_by_label("Listeners now").get_by_text("BOARD").wait_for()
    board.ok("topic_unlisten", "PRICES")
    page.get_by_text("Nobody listens now.").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_of_the_admin_sticks_out_of_a_narrow_screen(
    visitors: Visitors, chief: User, board: Program, scheme: str
) -> None:
    board.ok("topic_listen", "PRICES")
    page = visitors("chief", color_scheme=scheme, viewport={"width": 400, "height": 800})
    for path in (
        RULES,
        f"{RULES}add/",
        f"{RULES}import/",
        f"{RULES}{Auth.objects.get(ident='BOARD').pk}/change/",
        CLIENTS,
        f"{CLIENTS}{Client.objects.get(ident='BOARD').pk}/change/",
        f"{TOPICS}{Topic.objects.get(name='PRICES').pk}/change/",
        IDENTITIES,
        f"{IDENTITIES}add/",
    ):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path


def test_a_user_is_found_by_typing(visitors: Visitors, chief: User, site: Site) -> None:
    site.user("alice")
    page = visitors("chief")
    page.goto(f"{IDENTITIES}add/")
    page.locator(".field-user .select2-selection").click()
    page.keyboard.type("ali")
    page.get_by_role("option", name="alice").click()
    page.get_by_label("Ident").fill("alice.*")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("was added successfully").wait_for()
