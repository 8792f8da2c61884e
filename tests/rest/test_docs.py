"""The pages: docs/reference/rest.md, whose examples run with curl in their order, and /api/docs."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

from django.test import Client

from psqlmessages.rest import bodies, namespaces
from psqlmessages.rest.api import api
from tests.conftest import installed
from tests.rest.callers import Caller
from tests.rest.test_exchanges import PERMISSIONS
from tests.sql.conftest import World
from tests.web.browser import Visitors, browser, visitors
from tests.web.site import ROOT, Site

__all__ = ["browser", "visitors"]

PAGE = (ROOT / "docs/reference/rest.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)


def test_each_example_answers_as_shown(site: Site, rest: World, caller: Callable[..., Caller]):
    installed("curl")
    wanda = caller("wanda", "worker", is_staff=True, permissions=PERMISSIONS)
    variables = {
        **site._environment(), "API": f"{site.url}/api",
        "TOKEN": wanda.headers["Authorization"].removeprefix("Bearer "), "PATH": os.environ["PATH"],
    }  # fmt: skip
    examples = EXAMPLE.findall(PAGE)
    assert len(examples) == PAGE.count("\n$ ") > 10
    for command, shown in examples:
        lease = rest.owner.query(
            "SELECT id || '.' || lease FROM psqlmessages_element WHERE lease IS NOT NULL"
        )
        told = subprocess.run(
            ["bash", "-c", command.replace("python manage.py", f"{sys.executable} manage.py")],
            env={**variables, "LEASE": lease or ""},
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        pattern = ".*".join(map(re.escape, shown.strip().split("…")))
        found = told.stdout.replace("\r", "").strip()
        assert re.fullmatch(pattern, found, re.DOTALL), f"{command}\n{told.stdout}\n{told.stderr}"


def test_the_page_names_every_call_and_the_bounds():
    for path in api.get_openapi_schema()["paths"]:
        shown = path.replace("{ns}", "{namespace}").replace("{number}", "{id}")
        shown = shown.replace("/api/q/{namespace}/{queue}", "…")
        assert shown in PAGE, path
    assert f"{namespaces.MAX_WAITERS:,}" in PAGE
    assert f"{namespaces.MAX_WAITERS_PER_USER:,}" in PAGE
    assert f"{bodies._MAX_SINGLE_HEADERS} at most" in PAGE
    assert f"{bodies._MAX_ALL_HEADERS_CHARACTERS // 1024} KiB" in PAGE


def test_other_methods_than_get_are_refused_as_json():
    client = Client(enforce_csrf_checks=True)
    for path in ("", "docs", "openapi.json", "docs/1/x"):
        for method in ("put", "post", "delete", "options"):
            answer = getattr(client, method)(f"/api/{path}")
            assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD"), path
            assert answer.json()["detail"].startswith(f"{method.upper()} is not supported")
    assert client.head("/api/openapi.json").status_code == 200
    for path in ("", "docs/1/x"):
        assert client.get(f"/api/{path}").json() == {"detail": "not found", "err": None}
    assert client.put("/api/none").json() == {"detail": "not found", "err": None}


def test_the_page_runs_under_the_strict_policy(site: Site, rest: World, visitors: Visitors):
    site.user("wanda", idents=["worker"])
    page = visitors("wanda")
    page.goto("/api/docs")
    page.locator("h1.title").wait_for()
    block = page.locator("#operations-queues-psqlmessages_rest_queues_push")
    block.locator("button").first.click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_placeholder("ns").fill("default")
    block.get_by_placeholder("queue").fill("orders")
    block.get_by_role("button", name="Execute").click()
    block.locator(".live-responses-table .response-col_status", has_text="201").wait_for()
    assert rest.owner.ok("sizes", "worker", "orders")["Total"] == 1
    assert visitors.troubles == []
