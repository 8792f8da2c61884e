"""Databases in other encodings than UTF8: where names with a beginning end, is another question."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TestedServer
from tests.project.example import own_database
from tests.sql.conftest import INSERT_RULE, Program

ROOT = Path(__file__).parents[2]
BEGIN_SO = ["P", "PA", "P~", "P\u00e9", "P\u00ff", "P" + 49 * "\u00ff"]
BEGIN_ELSE = ["O", "O\u00ff", "Q", "p", "\u00ff"]


@pytest.fixture(scope="module", params=["LATIN1", "SQL_ASCII"])
def url(server: TestedServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database in that encoding."""
    more = f"TEMPLATE template0 ENCODING '{request.param}' LOCALE 'C'"
    with own_database(server, "encoded", more) as url:
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            env={**os.environ, "DATABASE_URL": url},
            cwd=ROOT,
            check=True,
        )
        yield f"{url}?client_encoding=UTF8"


@pytest.fixture
def programs(url: str) -> Iterator[tuple[Program, Program]]:
    """Two programs, who find nobody there."""
    programs = Program(url), Program(url)
    programs[0].connection.execute("DELETE FROM messages.auth")
    yield programs
    for program in programs:
        program.close()


def allow(program: Program, *rules: tuple[str, str, str]) -> None:
    """Let nodes use topics: ident, topic, mode."""
    program.connection.cursor().executemany(
        INSERT_RULE,
        [("psqlmessages", ident, "Topic", topic, mode, 10) for ident, topic, mode in rules],
    )


def test_a_rule_by_pattern_lets_all_nodes_hear_that_begin_so_and_no_other(
    programs: tuple[Program, Program],
) -> None:
    gateway, subject = programs
    allow(gateway, ("SUBJECT", "T", "RW"), ("P*", "T", "R"))
    allow(gateway, *((name, "OTHER", "R") for name in BEGIN_ELSE))
    for name in [*BEGIN_SO, *BEGIN_ELSE]:
        gateway.ok("init", name)
    gateway.payloads()
    subject.ok("init", "SUBJECT")
    [connected] = gateway.headers()
    assert connected["Nodes"] == sorted(BEGIN_SO)


def test_an_observer_by_pattern_sees_all_topics_that_begin_so_and_no_other(
    programs: tuple[Program, Program],
) -> None:
    sender, eye = programs
    names = [*BEGIN_SO, *BEGIN_ELSE]
    allow(sender, ("EYE", "P*", "O"), *(("SENDER", name, "RW") for name in names))
    sender.ok("init", "SENDER")
    eye.ok("init", "EYE")
    eye.ok("topic_observe", "P*")
    for name in names:
        sender.ok("topic_listen", name)
        sender.ok("topic_notify", name)
        sender.ok("topic_send", name, name)
    seen = [header["Body"] for header in eye.headers() if header["Type"] == "Topic"]
    assert seen == BEGIN_SO
