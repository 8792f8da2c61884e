"""All pages that somebody can click to, and what stands in them."""

import re
from collections import Counter, deque
from collections.abc import Iterable
from html.parser import HTMLParser
from urllib.parse import parse_qsl, urljoin, urlsplit

from django.http import HttpResponse
from django.test import Client

from tests.reliability.counts import size

MOST_PAGES = size(80, 600)
# Of pages that differ in numbers, names or values only, so many.
OF_A_KIND = size(1, 3)
# What names an address to be opened, and what to be loaded.
OPENED, LOADED = {"href", "action", "formaction"}, {"src", "href", "data", "poster"}


class Tags(HTMLParser):
    """The tags of a page with their attributes, and its forms."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        # Method, address and fields.
        self.forms: list[tuple[str, str, dict[str, str]]] = []
        self.inline = ""
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append((tag, given))
        self._in_script = tag == "script"
        if tag == "form":
            self.forms.append((given.get("method", "get").lower(), given.get("action", ""), {}))
        elif self.forms and given.get("name"):
            self.forms[-1][2].setdefault(given["name"], given.get("value", ""))

    def handle_data(self, data: str) -> None:
        # JSON in a script that is none does not run.
        if self._in_script and self.tags[-1][1].get("type") != "application/json":
            self.inline += data.strip()

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    @property
    def links(self) -> Iterable[str]:
        return (given["href"] for tag, given in self.tags if tag == "a" and "href" in given)


def faults(response: HttpResponse, tags: Tags) -> list[str]:
    """What must not be in a page: anything that runs in it, and a policy that would let it."""
    policy = response.headers.get("Content-Security-Policy", "")
    found = [f"the policy is {policy!r}"] * (
        not {"default-src 'none'", "script-src 'self'"} <= set(re.split("; *", policy))
        or "unsafe-eval" in policy
    )
    found += [f"inline script {tags.inline[:60]!r}"] * bool(tags.inline)
    for tag, given in tags.tags:
        found += [f"{name} in <{tag}>" for name in given if name.startswith("on")]
        found += [
            f"{value[:60]!r} in <{tag}>"
            for name, value in given.items()
            if name in OPENED | LOADED
            and re.match(r"[\s\x00-\x1f]*(javascript|vbscript|data):", value, re.IGNORECASE)
            and not value.startswith("data:image/")
        ]
    return found


class Crawl:
    """Somebody who clicks on everything: `pages` has the answers by their address."""

    def __init__(self, client: Client, starts: Iterable[str], most: int = MOST_PAGES) -> None:
        self.client = client
        self.pages: dict[str, HttpResponse] = {}
        self.tags: dict[str, Tags] = {}
        self._kinds: Counter[str] = Counter()
        self._known: set[str] = set()
        self._waiting: deque[str] = deque()
        for start in starts:
            self._found("/", start)
        while self._waiting and len(self.pages) < most:
            self._open(self._waiting.popleft())

    def _found(self, page: str, link: str) -> None:
        parts = urlsplit(urljoin(f"http://testserver{page}", link))
        address = parts._replace(scheme="", netloc="", fragment="").geturl()
        kind = re.sub(r"\d+|%[^/]*", "#", parts.path)
        kind += "?" + "&".join(sorted({name for name, _ in parse_qsl(parts.query)}))
        if parts.netloc != "testserver" or address in self._known or "/static/" in address:
            return
        self._known.add(address)
        self._kinds[kind] += 1
        if self._kinds[kind] <= OF_A_KIND:
            self._waiting.append(address)

    def _open(self, address: str) -> None:
        response = self.client.get(address)
        self.pages[address] = response
        if response.status_code in (301, 302):
            self._found(address, response["Location"])
        elif response["Content-Type"].startswith("text/html"):
            tags = self.tags[address] = Tags(response.content.decode())
            for link in tags.links:
                self._found(address, link)
            for method, action, _ in tags.forms:
                if method == "get":
                    self._found(address, action or address)
