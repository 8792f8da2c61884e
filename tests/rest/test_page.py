"""The page of the API, in a real browser."""

from tests.sql.conftest import World
from tests.web.browser import Visitors, browser, visitors
from tests.web.site import Site

# Fixtures are found here by their names.
__all__ = ["browser", "visitors"]


def test_the_page_runs_under_the_strict_policy_and_asks_with_the_session(
    site: Site, rest: World, visitors: Visitors
):
    site.user("wanda", idents=["worker"])
    page = visitors("wanda")
    page.goto("/api/docs")
    page.get_by_role("heading", name="psqlmessages").wait_for()
    block = page.locator("#operations-queues-psqlmessages_rest_pushing_push")
    block.locator("button").first.click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_placeholder("ns").fill("default")
    block.get_by_placeholder("queue").fill("orders")
    block.get_by_role("button", name="Execute").click()
    block.locator(".live-responses-table .response-col_status", has_text="201").wait_for()
    assert rest.owner.ok("sizes", "worker", "orders")["Total"] == 1
    assert visitors.troubles == []
