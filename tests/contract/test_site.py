"""The documentation as a site: it builds without a warning, is complete, and its search works."""

import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from jsonschema_rs import Draft7Validator
from playwright.sync_api import expect

from psqlmessages.exceptions import classes_by_number
from psqlmessages.relay.protocol import OPERATIONS
from tests.web.browser import chromium

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # With --quiet, warnings would be no errors.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_search_finds_a_function_without_another_server(address: str):
    with chromium() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        # Not `fill`, because the search reads the field when a key is released.
        page.get_by_role("textbox", name="Search").press_sequentially("queue_listen")
        expect(page.locator(".md-search-result__item").first).to_contain_text("queue_listen")
        assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()


def test_each_error_has_an_address_of_its_own(site: Path):
    page = (site / "reference/errors/index.html").read_text()
    anchors = {f"error-{number}" for number in classes_by_number}
    assert anchors == set(re.findall(r'id="(error-\d+)"', page))
    assert classes_by_number[9]("x").url.endswith("/reference/errors/#error-9")


def test_the_documents_for_programs_name_every_call(site: Path):
    channels = json.loads((site / "reference/asyncapi.json").read_text())["channels"]
    messages = channels["node"]["messages"]
    assert set(messages) == {*OPERATIONS, "answer", "notification"}
    for message in messages.values():
        Draft7Validator(message["payload"])
    request = Draft7Validator(messages["topic_send"]["payload"])
    assert request.is_valid({"op": "topic_send", "ref": 4, "topic": "ROOM", "body": "hello"})
    assert not request.is_valid({"op": "topic_send", "topic": "ROOM"})
    paths = json.loads((site / "reference/openapi.json").read_text())["paths"]
    assert "/api/q/{ns}/{queue}/status" in paths
