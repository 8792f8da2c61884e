"""The examples of docs/client.md, run as programs, print what the page says."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.conftest import TestedServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "client.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
PRINTED = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = ("asking", "asking_async", "reading", "booking", "packing")
(RULES,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def program(server: TestedServer, name: str) -> list[str]:
    """A program of the page as a command, with the address of the test database."""
    text = PROGRAMS[name]
    for role in ("user1", "user2"):
        text = text.replace(f"dbname=app user={role}", server.url(role))
    return [sys.executable, "-W", "error", "-c", text]


@pytest.fixture
def answering(server: TestedServer, owner: psycopg.Connection) -> Iterator[None]:
    """The answering program, listening."""
    owner.execute("DELETE FROM messages.auth")
    owner.execute(RULES)
    with subprocess.Popen(
        program(server, "answering"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as running:
        listening = "SELECT 'NODE2' = ANY (listeners) FROM messages.topics WHERE topic = 'ORDERS'"
        while owner.execute(listening).fetchone() != (True,):
            assert running.poll() is None, running.stderr
        yield
        running.send_signal(signal.SIGTERM)
    owner.execute("DELETE FROM messages.auth")


@pytest.mark.parametrize(("name", "printed"), list(zip(EXAMPLES, PRINTED, strict=True)))
def test_an_example_prints_what_the_page_says(
    server: TestedServer, answering: None, name: str, printed: str
) -> None:
    done = subprocess.run(
        program(server, name), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert re.fullmatch(re.escape(printed).replace("…", r"\d+"), done.stdout), done.stdout
