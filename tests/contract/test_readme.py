"""The README's examples run as they stand, but for the address of the database."""

import re
import subprocess
import sys
from pathlib import Path

from tests.sql.conftest import World

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str, beginning: str) -> str:
    """The first code block of a language that begins with these words."""
    found = re.search(rf"```{language}\n({re.escape(beginning)}.*?)```", README, re.DOTALL)
    assert found is not None, beginning
    return found.group(1)


def test_the_python_example_prints_what_its_comment_says(world: World) -> None:
    world.owner.connection.execute(block("sql", "INSERT INTO messages.auth"))
    program = block("python", "from psqlmessages import Node")
    for role in ("user1", "user2"):
        program = program.replace(f"dbname=app user={role}", world.server.url(role))
    (comment,) = re.findall(r"print\(.*\)\s+# (.*)", program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == comment + "\n"


def test_the_sql_example_sends_what_it_says(world: World) -> None:
    world.owner.connection.execute(block("sql", "INSERT INTO messages.auth"))
    listener = world.node("user2", "NODE2")
    listener.ok("topic_listen", "MYTOPIC")
    sender = world.program("user1")
    for statement in block("sql", "SELECT messages.init").split(";\n")[:3]:
        assert sender.query(statement)["Err"] == "0"
    (message,) = [header for header in listener.headers() if header["Type"] == "Topic"]
    assert (message["From"], message["Body"]) == ("NODE1", '{"order": 1}')


def test_the_two_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"run", "test"} <= set(targets)
    assert re.findall(r"^\$ make (\S+)", README, re.MULTILINE) == ["run", "test"]
