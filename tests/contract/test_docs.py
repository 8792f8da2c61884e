"""The documents say what is: functions, errors and examples are compared with the database."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from psqlmessages.exceptions import registry
from tests.sql.conftest import World

DOCS = Path(__file__).parents[2] / "docs"
SQL = (DOCS / "sql.md").read_text()
BLOCK = re.compile(r"```sql\n(.*?)```", re.DOTALL)


def documented_functions() -> dict[str, tuple[str, str]]:
    """Signature and errors of each `### function` of docs/sql.md."""
    found = {}
    for section in SQL.split("\n### ")[1:]:
        name = section.splitlines()[0]
        signature = re.search(r"```sql\nmessages\.(.*)\n```", section)
        errors = re.search(r"^Errors: (.*?)\.?$", section, re.MULTILINE)
        assert signature is not None, name
        assert errors is not None, name
        found[name] = (signature.group(1), errors.group(1))
    return found


def test_every_public_function_is_documented_as_the_database_has_it(world: World) -> None:
    rows = world.owner.connection.execute(
        "SELECT p.proname, pg_get_function_arguments(p.oid), p.prorettype::regtype::text,"
        " obj_description(p.oid, 'pg_proc')"
        " FROM pg_proc AS p WHERE p.pronamespace = 'messages'::regnamespace"
        " AND p.proname NOT LIKE '\\_%'"
    ).fetchall()
    live = {}
    for name, arguments, answer, comment in rows:
        errors = re.search(r"Errors: ([^.]*)\.", comment)
        assert errors is not None, f"the comment of {name} names no errors: {comment}"
        live[name] = (
            f"{name}({arguments.replace('NULL::text', 'NULL')}) → {answer}",
            errors.group(1),
        )
    assert documented_functions() == live


def examples() -> Iterator[tuple[str, str, str]]:
    """Role, statement and expected answer of every example, in the order of the document."""
    for block in BLOCK.findall(SQL):
        statement: list[str] = []
        for line in block.splitlines():
            if line.startswith("-- as "):
                role = line.removeprefix("-- as ")
            elif line.startswith("-- "):
                yield role, "\n".join(statement), line.removeprefix("-- ")
                statement = []
            else:
                statement.append(line)
        if statement and not block.startswith("messages."):
            yield role, "\n".join(statement), ""


def test_the_examples_of_sql_md_run_top_to_bottom(world: World) -> None:
    programs = {role: world.program(role) for role in ("user1", "user2", "user3")}
    programs["owner"] = world.owner
    for role, statement, expected in examples():
        cursor = programs[role].connection.execute(statement)
        if cursor.description is None:
            continue
        (row,) = cursor.fetchall()
        answer = " | ".join(map(as_psql_prints, row))
        pattern = re.escape(expected).replace("…", '[^"]*')
        assert re.fullmatch(pattern, answer), f"{statement}\n{answer}\n{expected}"


def as_psql_prints(value: object) -> str:
    """A value as psql shows it: arrays in braces, JSON without spaces."""
    if isinstance(value, list):
        return "{" + ",".join(value) + "}"
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return str(value)


def test_errors_md_equals_the_errors_of_sql_and_the_classes_of_python(world: World) -> None:
    table = re.findall(
        r"^\| (\d+) \| (.*?) \| (\w+) \|", (DOCS / "errors.md").read_text(), re.MULTILINE
    )
    live = world.owner.connection.execute("SELECT number, errstr FROM messages.errors").fetchall()
    assert [(int(number), text) for number, text, _ in table] == live
    assert {int(number): name for number, _, name in table} == {
        number: error.__name__ for number, error in registry.items()
    }


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
