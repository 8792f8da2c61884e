"""A real browser for the tests: the system's Chromium, driven by Playwright."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings
from django.db import connections
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Response,
    Route,
    expect,
    sync_playwright,
)

from project.postgres import Server
from tests.conftest import installed

if TYPE_CHECKING:
    from tests.web.site import Site

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_MILLISECONDS = 60_000
ROLE = Server.owner
MONITOR_RULE = f"{ROLE} example.monitor.* Topic * O 60"
LIVE = '#pill[data-is="live"]'
# Also the state of pages of traffic while no job counts.
CURRENT = '#pill:is([data-is="live"], [data-is="not_counting"])'
# Errors of the browser if the server does not answer.
AWAY = r"WebSocket connection|Failed to load resource"
# Report violations of the Content-Security-Policy as errors.
TELL_VIOLATIONS = """
    addEventListener("securitypolicyviolation", (event) => console.error(
        `CSP: ${event.violatedDirective} ${event.blockedURI} ${event.sourceFile} ${event.sample}`));
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    path = installed("chromium-headless-shell", "chromium")
    expect.set_options(timeout=PATIENCE_MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium for the tests of one file, in which `asyncio.run` is not possible."""
    with pytest.MonkeyPatch.context() as patch:
        # Playwright's event loop runs in this thread, but not while the test runs.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        with chromium() as started:
            yield started
            # Within an event loop Django has other connections, which no later test could close.
            connections.close_all()


def hurry(route: Route) -> None:
    """Serve poll.js so that it asks ten times as often."""
    answer = route.fetch()
    text = answer.text()
    assert "INTERVAL_MS = 2000" in text
    route.fulfill(response=answer, body=text.replace("INTERVAL_MS = 2000", "INTERVAL_MS = 200"))


class Visitors:
    """Opens pages, each with its own browser profile, and collects their errors."""

    def __init__(self, browser: Browser, url: str, site: "Site | None" = None) -> None:
        self._browser = browser
        self._url = url
        self._site = site
        self._expected: list[re.Pattern[str]] = []
        self.troubles: list[str] = []

    def __call__(self, username: str | None = None, **options: Any) -> Page:
        """Open an empty page, logged in if a name is given; `options` are Playwright's."""
        context = self._browser.new_context(base_url=self._url, **options)
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        context.add_init_script(TELL_VIOLATIONS)
        context.route("**/monitor/poll.js", hurry)
        if username is not None:
            assert self._site is not None, "only a site under test logs users in by itself"
            name, value = settings.SESSION_COOKIE_NAME, self._site.login(username)
            context.add_cookies([{"name": name, "value": value, "url": self._url}])
        page = context.new_page()
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.troubles.append(f"uncaught: {error}"))
        page.on("response", self._answered)
        return page

    def expect(self, pattern: str) -> None:
        """Allow an error in this test."""
        self._expected.append(re.compile(pattern))

    def unexpected(self) -> list[str]:
        """Return the errors that were not allowed."""
        return [t for t in self.troubles if not any(e.search(t) for e in self._expected)]

    def __enter__(self) -> "Visitors":
        return self

    def __exit__(self, *_: object) -> None:
        for context in self._browser.contexts:
            # Closing ends requests of running routes; ignore their errors.
            for each in (context, *context.pages):
                each.unroute_all(behavior="ignoreErrors")
            context.close()
        assert self.unexpected() == []

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(f"{message.type}: {message.text} ({message.location})")

    def _answered(self, response: Response) -> None:
        if response.status >= 500:
            self.troubles.append(f"{response.status} at {response.url}")


UNTIL = """async (most) => {
    const end = performance.now() + most;
    while (!(%s)) {
        if (performance.now() > end) throw new Error(`not within ${most} ms`);
        await new Promise(requestAnimationFrame);
    }
}"""


def until(page: Page, condition: str) -> None:
    """Wait until an expression of JavaScript holds; Playwright's own wait needs eval."""
    page.evaluate(UNTIL % condition, PATIENCE_MILLISECONDS)


def live(page: Page, address: str) -> Page:
    page.goto(address)
    expect(page.locator(LIVE)).to_be_visible()
    return page


@pytest.fixture
def visitors(browser: Browser, site: "Site") -> Iterator[Visitors]:
    """Opens pages of the site; unexpected errors in them fail the test."""
    with Visitors(browser, site.url, site) as visitors:
        yield visitors


# Elements that reach out of the page.
TOO_WIDE = """
() => document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll("body *")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
    .slice(0, 5).map((e) => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 30)}`)
    .concat([`the page is ${document.documentElement.scrollWidth} wide`])
"""


def too_wide(page: Page) -> list[Any]:
    """Return the elements that make the page scroll sideways."""
    # Without its styles, any page is wide.
    page.wait_for_load_state("load")
    return page.evaluate(TOO_WIDE)
