"""README and docs agree with the database: functions, errors and examples."""

import json
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata
from itertools import product
from pathlib import Path

import psycopg
import pytest
import yaml
from django import get_version

from psqlmessages.exceptions import DOCS_URL, classes_by_number
from tests.promises import find_errors, read_promises
from tests.sql.conftest import Program, World

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
SQL = (DOCS / "reference/sql.md").read_text()
CI_JOBS = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
NULL = re.compile(r"NULL::[a-z ]+(\[\])?")
FUNCTIONS = r"""
    SELECT p.proname, pg_get_function_arguments(p.oid), p.prorettype::regtype::text,
        obj_description(p.oid, 'pg_proc')
    FROM pg_proc AS p WHERE p.pronamespace = 'messages'::regnamespace AND p.proname NOT LIKE '\_%'
    ORDER BY p.prolang <> (SELECT l.oid FROM pg_language AS l WHERE l.lanname = 'plpgsql')
"""
BLOCK = re.compile(r"```sql\n(.*?)```", re.DOTALL)


def documented_functions() -> dict[str, tuple[set[str], str]]:
    """Signatures and errors of each `### function` of docs/reference/sql.md."""
    found = {}
    for section in SQL.split("\n### ")[1:]:
        name = section.splitlines()[0]
        signatures = re.search(r"```sql\n(messages\.[^`]*)\n```", section)
        errors = re.search(r"^Errors: (.*?)\.?$", section, re.MULTILINE)
        assert signatures is not None, name
        assert errors is not None, name
        joined = re.sub(r"\(\n +|\n(?=\) )", lambda m: m[0].strip(), signatures.group(1))
        lines = set(re.sub(r"\n +", " ", joined).splitlines())
        found[name] = (lines, errors.group(1))
    return found


def test_every_public_function_is_documented_as_the_database_has_it(world: World):
    live: dict[str, tuple[set[str], str]] = {}
    # The overload with text and seconds comes first, and its comment names the errors of all.
    for name, arguments, answer, comment in world.execute(FUNCTIONS):
        if name not in live:
            errors = re.search(r"Errors: ([^.]*)\.", comment)
            assert errors is not None, f"the comment of {name} names no errors: {comment}"
            live[name] = (set(), errors.group(1))
        live[name][0].add(f"messages.{name}({NULL.sub('NULL', arguments)}) → {answer}")
    assert documented_functions() == live


def examples(page: str) -> Iterator[tuple[str, str, list[str]]]:
    """Role, statement and expected rows of every example, in the order of the document."""
    for block in BLOCK.findall(page):
        role, statement, expected = "", "", []
        if block.startswith("messages."):
            continue
        for line in block.splitlines():
            is_next = statement.endswith(";") and not line.startswith("-- ")
            if line.startswith("-- as ") or is_next:
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
def test_the_examples_of_the_page_run_top_to_bottom(world: World, page: str):
    programs = {role: world.program(role) for role in ("user1", "user2", "user3")}
    programs["owner"] = world.owner
    try:
        for role, statement, expected in examples((DOCS / "reference" / page).read_text()):
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
    # psql shows arrays in braces, and JSON without spaces.
    shown = {
        list: lambda value: "{" + ",".join(value) + "}",
        dict: lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    }
    return [" | ".join(shown.get(type(v), str)(v) for v in row) for row in cursor]


def test_errors_md_equals_the_errors_of_sql_and_the_classes_of_python(world: World):
    page = (DOCS / "reference/errors.md").read_text()
    table = re.findall(r"^\| (\d+) \| (.*?) \| (\w+) \|", page, re.MULTILINE)
    live = world.execute("SELECT number, errstr FROM messages.errors").fetchall()
    assert [(int(number), text) for number, text, _ in table] == live
    names = {number: error.__name__ for number, error in classes_by_number.items()}
    assert {int(number): name for number, _, name in table} == names


def test_the_sql_example_of_the_readme_pushes_and_takes(world: World):
    world.rules("user1 shop Queue jobs RW 1")
    (example,) = BLOCK.findall(README)
    push, pop = example.split(";\n")[:2]
    shop = world.program("user1")
    assert shop.query(push)["Err"] == "0"
    assert json.loads(shop.query(pop)) == {"order": 2}


def test_documented_targets_are_in_the_makefile():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^\$ make (\S+)", README, re.MULTILINE) == ["run", "test"]
    text = "\n".join(path.read_text() for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")))
    assert set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)


def test_the_makefile_and_ci_run_the_same_tests_on_each_version_of_postgresql():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    (tests,) = re.findall(r"^TESTS_OF_SQL := (.*)", makefile, re.MULTILINE)
    (selected,) = set(re.findall(r'-m ("versions.*?")', makefile))
    run = CI_JOBS["postgresql"]["steps"][-1]["run"]
    assert run.rpartition(" -m ")[2].split() == f"{selected} {tests}".split()


def test_links_to_the_site_and_files_named_to_contributors_exist():
    texts = [README, *(path.read_text() for path in (ROOT / "psqlmessages").rglob("*.*[ysl]"))]
    address = re.compile(rf"(?:{DOCS_URL}|{{DOCS_URL}})([a-z/-]+)/")
    linked = {page for text in texts for page in address.findall(text)}
    assert {"tutorial", "choose", "reference/settings"} <= linked
    pages = "".join(path.read_text() for path in ROOT.glob("*.md"))
    files = re.findall(r"\]\((?!https:|#)([^)#]+)", pages)
    files += re.findall(r"`((?:docs|psqlmessages|tests)/\S+\.\w+)`", pages)
    pages += "".join(path.read_text() for path in (ROOT / "pyproject.toml", *DOCS.rglob("*.md")))
    files += re.findall(r"/psqlmessages/(?:blob/|tree/)?main/([^\s)>\"]+)", pages)
    missing = [page for page in linked if not (DOCS / f"{page}.md").exists()]
    assert missing + [file for file in files if not any(ROOT.glob(file))] == []


def test_each_promise_stands_in_the_docs_and_has_a_test():
    assert len(read_promises()) > 400
    assert find_errors() == []


def test_the_declared_versions_are_tested_in_all_combinations_that_django_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons, djangos, excluded = CI_JOBS["django"]["strategy"]["matrix"].values()
    tested = {*product(pythons, djangos)} - {tuple(each.values()) for each in excluded}
    assert tested == {*re.findall(r'\("(3.\d+)", "(.*?)"\)', (ROOT / "noxfile.py").read_text())}
    declared = re.findall(r"(?:Django|Python) :: ([\d.]{2,})", str(project["classifiers"]))
    assert declared == djangos + pythons
    assert project["requires-python"] == f">={pythons[0]}"
    after_last = ".".join([djangos[-1][:-2], str(int(djangos[-1][-1]) + 1)])
    assert project["dependencies"][0] == f"django>={djangos[0]},<{after_last}"
    allowed = re.findall(r"Python :: (3\.\d+)", str(metadata("django").get_all("Classifier")))
    installed = {python for python, django in tested if django == get_version()[:3]}
    assert installed == {*allowed} & {*pythons}
