"""docs/reference/exchanges.md, followed top to bottom: its files, commands, SQL and function."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from importlib import import_module
from pathlib import Path

import pytest

from project.postgres import Server
from psqlmessages.exchanges import SelectorInput, selectors
from psqlmessages.exchanges.routing import dry_run_exchange
from psqlmessages.exchanges.store import definitions, repository
from tests.conftest import TestedServer
from tests.contract.test_docs import answers, examples
from tests.django.processes import start
from tests.django.waiting import wait_until
from tests.exchanges.conftest import TypeIn
from tests.sql.conftest import World

PAGE = (Path(__file__).parents[2] / "docs/reference/exchanges.md").read_text()
BLOCK = re.compile(r"^```(yaml|console|sql|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = "python manage.py psqlmessages exchange "


class Reader:
    """Someone who does what the page says, in an empty folder."""

    def __init__(self, folder: Path, server: TestedServer, type_in: TypeIn) -> None:
        self.folder = folder
        self.world = World(server)
        self.type_in = type_in
        self.loops: subprocess.Popen[str] | None = None

    def follow(self, kind: str, text: str) -> None:
        text = text.replace("'shop'", f"'{Server.owner}'")
        if kind == "yaml":
            name = text.splitlines()[0].removeprefix("# ")
            (self.folder / name).write_text(text)
        elif kind == "sql":
            self.ask(f"```sql\n{text}```")
        elif kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                self.type(*part.split("\n", 1))

    def ask(self, block: str) -> None:
        for _, statement, expected in examples(block):
            # Another process may not have done this yet.
            wait_until(lambda: self.answers(statement, expected))  # noqa: B023
            assert_shown(self.shown, "\n".join(expected))

    def answers(self, statement: str, expected: list[str]) -> bool:
        rows = answers(self.world.owner, statement)
        self.shown = "\n".join(rows)
        return bool(rows) == bool(expected) and '"Total":0' not in self.shown

    def type(self, command: str, shown: str) -> None:
        assert command.startswith(COMMAND)
        arguments = shlex.split(command.removeprefix(COMMAND))
        if arguments == ["run"]:
            self.loops = start(self.world.server, "psqlmessages", "exchange", "run")
            assert self.loops.stderr.readline() == shown
            return
        done = self.type_in(*arguments)
        assert_shown(done.stdout + done.stderr, shown)
        assert done.returncode == int("psqlmessages: " in shown)


def assert_shown(found: str, expected: str) -> None:
    pattern = re.escape(expected).replace("…", ".*")
    assert re.fullmatch(pattern, found), f"{found}\nis not\n{expected}"


@pytest.fixture
def reader(
    transactional_db: None, eu: TestedServer, server: TestedServer, tmp_path: Path, type_in: TypeIn
) -> Iterator[Reader]:
    reader = Reader(tmp_path, server, type_in)
    with chdir(tmp_path):
        yield reader
    if reader.loops is not None:
        reader.loops.kill()
        reader.loops.communicate(timeout=60)
    reader.world.close()


def test_the_page_can_be_followed_top_to_bottom(reader: Reader):
    for kind, text in BLOCK.findall(PAGE):
        reader.follow(kind, text)
    reader.loops.terminate()
    reader.loops.communicate(timeout=60)
    assert reader.loops.returncode == 0


def test_the_page_names_each_field_of_a_definition():
    documented = re.findall(r"`([a-z]+(?:\[…\])?\.[a-z]+|dst)`", PAGE.split("## Trying")[0])
    known = {f"consumer.{field}" for field in definitions.CONSUMER_FIELDS}
    known |= {f"src.{field}" for field in definitions.SOURCE_FIELDS}
    known |= {f"dst[…].{field}" for field in definitions.DESTINATION_FIELDS} | {"dst"}
    assert set(documented) == known


def test_the_pages_selector_in_code_decides(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(selectors, "_functions", {})
    (code,) = (text for kind, text in BLOCK.findall(PAGE) if kind == "python")
    (tmp_path / "message_handlers_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("message_handlers_of_the_page")
    document = {"src": {"queue": "a"}, "dst": [{"queue": "b", "selector": "@big"}]}
    compiled = repository.compile_exchange(definitions.parse_exchange("x", document))
    for total, outcome in ((1001, "ok"), (1000, "no_route")):
        assert dry_run_exchange(compiled, SelectorInput({"total": total})).outcome == outcome
