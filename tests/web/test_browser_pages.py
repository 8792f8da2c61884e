"""Every page: under a strict Content-Security-Policy, narrow, dark, with hostile names as text.

That nothing is written to the console and no policy is violated, `visitors` checks at the end.
"""

from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from project.example import CHAT_TOPIC
from project.postgres import Server
from psqlmessages.models import Auth, Topic
from tests.sql.conftest import World
from tests.web.browser import Visitors
from tests.web.legibility import NARROW, pale_text, too_wide
from tests.web.site import Site

ROLE = Server.owner
HOSTILE = "<script>alert(1)</script>"
LIVE = '#pill[data-is="live"]'


@pytest.fixture
def furnished(site: Site, world: World) -> Site:
    """A site with rules, nodes that are connected, and an administrator."""
    site.user("admin", is_staff=True, is_superuser=True, idents=["chat/admin/*"])
    world.rules(
        f"{ROLE} example.monitor.* Topic * O 60",
        f"{ROLE} chat/* Topic {CHAT_TOPIC} RW 60",
        f"user1 SENDER Topic {HOSTILE} W 10",
        f"user2 {HOSTILE} Topic {HOSTILE} R 10",
    )
    world.node("user2", HOSTILE).ok("topic_listen", HOSTILE)
    world.node("user1", "SENDER").ok("topic_notify", HOSTILE)
    return site


def addresses() -> dict[str, str]:
    """Every page that there is, by a name."""
    rule, topic = Auth.objects.get(ident="SENDER"), Topic.objects.get(name=HOSTILE)
    return {
        "index": "/",
        "chat": "/chat/",
        "monitor": "/monitor/",
        "topic": f"/monitor/topics/{quote(HOSTILE, safe='')}/",
        "admin": "/admin/",
        "rules": "/admin/psqlmessages/auth/",
        "rule": f"/admin/psqlmessages/auth/{rule.pk}/change/",
        "new rule": "/admin/psqlmessages/auth/add/",
        "history": f"/admin/psqlmessages/auth/{rule.pk}/history/",
        "nodes": "/admin/psqlmessages/client/",
        "topics": "/admin/psqlmessages/topic/",
        "topic in the admin": f"/admin/psqlmessages/topic/{topic.pk}/change/",
        "identities": "/admin/psqlmessages/webidentity/",
        "new identity": "/admin/psqlmessages/webidentity/add/",
    }


def visit(page: Page, address: str) -> None:
    """Open a page and wait until it is as it should be."""
    answer = page.goto(address)
    assert answer is not None
    assert answer.status == 200, address
    if address.startswith("/monitor/"):
        expect(page.locator(LIVE)).to_be_visible()


def test_every_page_shows_hostile_names_as_text(furnished: Site, visitors: Visitors) -> None:
    page = visitors("admin")
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    for name, address in addresses().items():
        visit(page, address)
        assert page.locator("script:text-is('alert(1)')").count() == 0, name
    visit(page, addresses()["topic"])
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(page.get_by_label("Listeners now")).to_have_text(HOSTILE)


def test_hostile_bodies_are_text(furnished: Site, visitors: Visitors, world: World) -> None:
    page = visitors("admin")
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    visit(page, addresses()["topic"])
    sender = world.programs[-1]
    sender.ok("topic_send", HOSTILE, "<img src=x onerror=alert(1)>")
    expect(page.locator("#tail")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("#tail img").count() == 0


def test_no_page_scrolls_sideways_at_400_pixels(furnished: Site, visitors: Visitors) -> None:
    page = visitors("admin", viewport=NARROW)
    found = {}
    for name, address in addresses().items():
        visit(page, address)
        found[name] = too_wide(page)
    assert {name: wide for name, wide in found.items() if wide} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(furnished: Site, visitors: Visitors, scheme: str) -> None:
    page = visitors("admin", color_scheme=scheme)
    grounds, found = set(), {}
    for name in ("index", "chat", "monitor", "topic"):
        visit(page, addresses()[name])
        found[name] = pale_text(page)
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert {name: pale for name, pale in found.items() if pale} == {}
    for ground in grounds:
        channels = [int(number) for number in ground.strip("rgb()").split(",")]
        assert (max(channels) < 64) if scheme == "dark" else (min(channels) > 192)


def test_who_is_not_logged_in_sees_the_way_in(site: Site, visitors: Visitors) -> None:
    page = visitors()
    page.goto("/")
    page.get_by_role("link", name="Log in").click()
    expect(page.get_by_label("Password")).to_be_visible()
    assert page.goto("/monitor/").url.endswith("/admin/login/?next=/monitor/")
