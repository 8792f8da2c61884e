"""The examples of docs/reference/client.md print what the page says."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest

from tests.conftest import TestedServer
from tests.django.processes import ROOT
from tests.django.waiting import wait_until

PAGE = (ROOT / "docs/reference/client.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
PRINTED = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = ("asking", "asking_async", "reading", "booking", "packing")
(RULES,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def program(server: TestedServer, name: str) -> str:
    text = PROGRAMS[name]
    for role in ("user1", "user2"):
        text = text.replace(f"dbname=app user={role}", server.url(role))
    return text


@pytest.fixture
def answering(server: TestedServer, owner: psycopg.Connection) -> Iterator[None]:
    owner.execute(RULES)
    listening = "SELECT 1 FROM messages.topics WHERE topic = 'ORDERS' AND 'NODE2' = ANY (listeners)"
    command = [sys.executable, "-W", "error", "-c", program(server, "answering")]
    with subprocess.Popen(command, cwd=ROOT) as running:
        try:
            wait_until(lambda: running.poll() is not None or owner.execute(listening).fetchone())
            yield
        finally:
            running.send_signal(signal.SIGTERM)
    owner.execute("DELETE FROM messages.auth")


@pytest.mark.usefixtures("answering")
def test_examples_print_as_shown(server: TestedServer, capsys):
    for name, printed in zip(EXAMPLES, PRINTED, strict=True):
        exec(program(server, name), {"__name__": "__main__"})  # noqa: S102 - the page's own text
        said = capsys.readouterr().out
        assert re.fullmatch(re.escape(printed).replace("…", r"\d+"), said), f"{name}:\n{said}"
