"""The examples of docs/rest.md, run with curl in their order."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from psqlmessages.rest import bodies, namespaces
from psqlmessages.rest.api import api
from tests.rest.callers import Caller
from tests.rest.test_exchanges import PERMISSIONS
from tests.sql.conftest import World
from tests.web.site import ROOT, Site

PAGE = (ROOT / "docs" / "rest.md").read_text(encoding="utf-8")
ELLIPSIS = "…"


def examples() -> Iterator[tuple[str, str]]:
    """Yield each command with what the page shows as its output."""
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            yield command, shown.strip()


def fits(shown: str, told: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in shown.split(ELLIPSIS))
    return re.fullmatch(pattern, told.replace("\r", "").strip(), re.DOTALL) is not None


def test_each_example_answers_as_shown(site: Site, rest: World, caller: Callable[..., Caller]):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    wanda = caller("wanda", "worker", is_staff=True, permissions=PERMISSIONS)
    variables = {
        **site._environment(),
        "API": f"{site.url}/api",
        "TOKEN": wanda.headers["Authorization"].removeprefix("Bearer "),
        "PATH": os.environ["PATH"],
    }
    for command, shown in examples():
        lease = rest.owner.query(
            "SELECT id || '.' || lease FROM psqlmessages_element WHERE lease IS NOT NULL"
        )
        told = subprocess.run(
            ["bash", "-c", command.replace("python manage.py", f"{sys.executable} manage.py")],
            env={**variables, "LEASE": lease or ""},
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert fits(shown, told.stdout), f"{command}\n{told.stdout}\n{told.stderr}"


def test_the_page_names_every_call():
    for path in api.get_openapi_schema()["paths"]:
        shown = path.replace("{ns}", "{namespace}").replace("{number}", "{id}")
        shown = shown.replace("/api/q/{namespace}/{queue}", "…")
        assert shown in PAGE, path


def test_the_page_tells_the_bounds():
    assert f"{namespaces.MOST_READERS:,}" in PAGE
    assert f"{namespaces.MOST_READERS_OF_USER:,}" in PAGE
    assert f"{bodies._MOST_SINGLE} at most" in PAGE
    assert f"{bodies._MOST_CHARACTERS // 1024} KiB" in PAGE
