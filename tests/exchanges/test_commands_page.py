"""docs/exchanges.md, followed top to bottom: its files, its commands, its SQL, its function."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from django.core.management import call_command

from project.postgres import Server
from psqlmessages.exchanges import Message, registry
from psqlmessages.graph import definitions, stored
from psqlmessages.graph.trial import tried
from tests.conftest import TestedServer
from tests.contract.test_docs import answers, examples
from tests.django.processes import start
from tests.sql.conftest import World

PAGE = (Path(__file__).parents[2] / "docs" / "exchanges.md").read_text()
BLOCK = re.compile(r"^```(yaml|console|sql|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = "python manage.py psqlmessages "
# Statements that are asked again until they answer: what they tell of is done by another process.
PATIENCE = 6000


class Reader:
    """Someone who does what the page says, in an empty folder."""

    def __init__(self, folder: Path, server: TestedServer, capsys: pytest.CaptureFixture[str]):
        self.folder = folder
        self.world = World(server)
        self.capsys = capsys
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
            rows = answers(self.world.owner, statement)
            for _ in range(PATIENCE):
                if bool(rows) == bool(expected) and '"Total":0' not in "".join(rows):
                    break
                self.world.owner.query("SELECT pg_sleep(0.01)")
                rows = answers(self.world.owner, statement)
            assert_shown("\n".join(rows), "\n".join(expected))

    def type(self, command: str, shown: str) -> None:
        assert command.startswith(COMMAND)
        arguments = shlex.split(command.removeprefix(COMMAND))
        if arguments == ["exchange", "run"]:
            self.loops = start(self.world.server, "psqlmessages", *arguments)
            assert self.loops.stderr is not None
            assert self.loops.stderr.readline() == shown
            return
        self.capsys.readouterr()
        code = 0
        try:
            call_command("psqlmessages", *arguments)
        except SystemExit as leaving:
            code = int(str(leaving.code))
        printed = self.capsys.readouterr()
        assert_shown(printed.out + printed.err, shown)
        assert code == int("psqlmessages: " in shown)


def assert_shown(found: str, expected: str) -> None:
    pattern = re.escape(expected).replace("…", ".*")
    assert re.fullmatch(pattern, found), f"{found}\nis not\n{expected}"


@pytest.fixture
def reader(
    transactional_db: None,
    eu: TestedServer,
    server: TestedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, server, capsys)
    yield reader
    if reader.loops is not None:
        reader.loops.kill()
        reader.loops.communicate(timeout=60)
    reader.world.close()


def test_the_page_can_be_followed_top_to_bottom(reader: Reader) -> None:
    for kind, text in BLOCK.findall(PAGE):
        reader.follow(kind, text)
    assert reader.loops is not None
    reader.loops.terminate()
    reader.loops.communicate(timeout=60)
    assert reader.loops.returncode == 0


def test_every_file_of_the_page_but_the_faulty_one_is_a_definition(eu: TestedServer) -> None:
    files = {text.splitlines()[0]: text for kind, text in BLOCK.findall(PAGE) if kind == "yaml"}
    assert "# faulty.yaml" in files
    for name, text in files.items():
        if name != "# faulty.yaml":
            assert definitions.read(text), name
    documented = re.findall(r"`([a-z]+(?:\[…\])?\.[a-z]+|dst)`", PAGE.split("## Trying")[0])
    known = {f"consumer.{field}" for field in definitions.CONSUMER}
    known |= {f"src.{field}" for field in definitions.SOURCE}
    known |= {f"dst[…].{field}" for field in definitions.DESTINATION} | {"dst"}
    assert set(documented) == known


def test_the_selector_in_code_of_the_page_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "_functions", {})
    (code,) = (text for kind, text in BLOCK.findall(PAGE) if kind == "python")
    (tmp_path / "message_handlers_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("message_handlers_of_the_page")
    exchange = definitions.validated_exchange(
        "x", {"src": {"queue": "a"}, "dst": [{"queue": "b", "selector": "@big"}]}
    )
    compiled = stored.compiled(exchange)
    for total, outcome in ((1001, "ok"), (1000, "no_route")):
        assert tried(compiled, Message({"total": total})).outcome == outcome
