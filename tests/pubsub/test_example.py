"""The examples of docs/reference/pubsub.md, run as programs, print what the page says."""

import re

import pytest

from psqlmessages.pubsub.pubsub import MAX_UNFINISHED, MAX_UNFINISHED_BYTES
from tests.conftest import TestedServer
from tests.django.processes import ROOT, run_python
from tests.pubsub.conftest import Connect, NewBus, Receiver

PAGE = (ROOT / "docs/reference/pubsub.md").read_text()
PROGRAMS = re.findall(r"```python\n# \w+\.py\n(.*?)```", PAGE, re.DOTALL)
PRINTED = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
(STATEMENT,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("program", "printed"), list(zip(PROGRAMS, PRINTED, strict=True)))
def test_an_example_prints_as_shown(server: TestedServer, program: str, printed: str):
    code = program.replace("dbname=app user=user1", server.url("user1"))
    done = run_python("-X", "utf8", "-W", "error", "-c", code, encoding="utf-8")
    shown = re.sub(r"process_id=\d+", "process_id=4711", done.stdout)
    assert (shown, done.stderr, done.returncode) == (printed, "", 0)


def test_the_statement_for_psql_is_heard(new_bus: NewBus, connect: Connect):
    receiver = Receiver.of(new_bus(), "channel:A")
    connect().execute(STATEMENT)
    assert [receiver.payload(), receiver.payload()] == [{"a": 1}, "текст"]


def test_the_bounds_are_those_of_the_page():
    assert f"| `max_unfinished` | {MAX_UNFINISHED:,} |" in PAGE
    assert f"| `max_unfinished_bytes` | {MAX_UNFINISHED_BYTES // 2**20} MiB |" in PAGE
