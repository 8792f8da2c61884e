"""docs/relay.md says what is: its tables and its conversation are compared with the relay."""

import json
import re
from pathlib import Path

from project.postgres import Server
from psqlmessages.conf import Settings
from psqlmessages.relay import sockets
from psqlmessages.relay.protocol import OPERATIONS
from tests.sql.conftest import World
from tests.web.site import Site
from tests.web.sockets import Visitor

DOCS = Path(__file__).parents[2] / "docs"
RELAY = (DOCS / "relay.md").read_text()


def section(title: str) -> str:
    return RELAY.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_operation_is_documented_with_its_fields() -> None:
    documented = {}
    for names, fields in re.findall(
        r"^\| (`.*?) \| (.*?) ?\|$", section("The protocol"), re.MULTILINE
    ):
        if "Evt" in names or "connection" in names or "Away" in fields:
            break
        required, _, optional = fields.partition(";")
        for name in re.findall(r"`(\w+)`", names):
            documented[name] = {
                **dict.fromkeys(re.findall(r"`(\w+)`", required), True),
                **dict.fromkeys(re.findall(r"`(\w+)`", optional.split("(")[0]), False),
            }
    assert documented == {
        op: {name: field.is_required for name, field in fields.items()}
        for op, fields in OPERATIONS.items()
    }


def test_every_close_code_is_documented() -> None:
    codes = {int(code) for code in re.findall(r"\b(?:1|4)\d\d\d\b", section("Close codes"))}
    assert codes >= {
        sockets.UNSUPPORTED,
        sockets.NOT_ALLOWED,
        sockets.TOO_SLOW,
        sockets.TOO_MANY,
        sockets.TRY_AGAIN_LATER,
        *(code for code in sockets.GOODBYES if code not in (None, 1005)),
    }


def test_every_setting_named_exists() -> None:
    assert set(re.findall(r"RELAY_[A-Z_]+[A-Z]", RELAY)) <= set(Settings.__dataclass_fields__)


def test_the_conversation_runs_word_for_word(site: Site, world: World) -> None:
    world.rules(f"{Server.owner} chat/* Topic ROOM RW 60")
    site.user("alice", idents=["chat/alice/*"])
    visitor = Visitor(site, cookie=site.login("alice"))
    (talk,) = re.findall(r"```\n(→.*?)```", RELAY, re.DOTALL)
    said = []
    for line in talk.splitlines():
        direction, _, frame = line.partition(" ")
        if direction == "→":
            visitor.connection.send(frame)
        else:
            said.append((frame, visitor.connection.recv(timeout=60)))
    visitor.close()
    # A message and the answer to who sent it may change places.
    for documented, arrived in zip(
        sorted(frame for frame, _ in said), sorted(frame for _, frame in said), strict=True
    ):
        pattern = re.escape(documented).replace("…", r"\d+")
        assert re.fullmatch(pattern, arrived), (documented, arrived)
        json.loads(arrived)


def test_the_example_of_asgi_py_is_that_of_the_example_project() -> None:
    (example,) = re.findall(r"```python\n# asgi.py\n(.*?)```", RELAY, re.DOTALL)
    code = re.sub(r" *#.*", "", example)
    own = re.sub(r" *#.*", "", (DOCS.parent / "project" / "asgi.py").read_text())
    for line in filter(None, code.splitlines()):
        assert line in own.splitlines(), line
