"""The documents say what is: functions, errors and examples are compared with the database."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from psqlmessages.exceptions import registry
from tests.sql.conftest import Program, World

DOCS = Path(__file__).parents[2] / "docs"
SQL = (DOCS / "sql.md").read_text()
NULL = re.compile(r"NULL::[a-z ]+(\[\])?")
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
            f"{name}({NULL.sub('NULL', arguments)}) → {answer}",
            errors.group(1),
        )
    assert documented_functions() == live


def examples(page: str) -> Iterator[tuple[str, str, list[str]]]:
    """Role, statement and expected rows of every example, in the order of the document."""
    for block in BLOCK.findall(page):
        role, statement, expected = "", "", []
        if block.startswith("messages."):
            continue
        for line in block.splitlines():
            if line.startswith("-- as ") or (
                statement.endswith(";") and not line.startswith("-- ")
            ):
                if statement:
                    yield role, statement, expected
                statement, expected = "", []
            if line.startswith("-- as "):
                role = line.removeprefix("-- as ")
            elif line.startswith("-- "):
                expected.append(line.removeprefix("-- "))
            else:
                statement = f"{statement}\n{line}".strip()
        yield role, statement, expected


@pytest.mark.parametrize("page", ["sql.md", "streams.md", "queues.md"])
def test_the_examples_of_the_page_run_top_to_bottom(world: World, page: str) -> None:
    programs = {role: world.program(role) for role in ("user1", "user2", "user3")}
    programs["owner"] = world.owner
    try:
        for role, statement, expected in examples((DOCS / page).read_text()):
            rows = answers(programs[role], statement)
            pattern = re.escape("\n".join(expected)).replace("…", '[^"]*')
            assert re.fullmatch(pattern, "\n".join(rows)), f"{statement}\n{rows}\n{expected}"
    finally:
        world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 0")


def answers(program: Program, statement: str) -> list[str]:
    """The rows of a statement as psql shows them, or the error that it raised."""
    try:
        cursor = program.connection.execute(statement)
    except psycopg.Error as error:
        return [f"{error.sqlstate}: {error.diag.message_primary}"]
    if cursor.description is None:
        return []
    return [" | ".join(map(as_psql_prints, row)) for row in cursor]


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


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name} links to {target}"
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken
