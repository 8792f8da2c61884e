"""Databases in other encodings than UTF8: where names with a beginning end, is another question."""

from collections.abc import Iterator

import pytest
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

from tests.conftest import TestedServer
from tests.project.example import own_database
from tests.sql.conftest import INSERT_RULE, Pair, Program

pytestmark = pytest.mark.versions
BEGIN_SO = ["P", "PA", "P~", "P\u00e9", "P\u00ff", "P" + 49 * "\u00ff"]
BEGIN_ELSE = ["O", "O\u00ff", "Q", "p", "\u00ff"]


@pytest.fixture(params=["SQL_ASCII", pytest.param("LATIN1", marks=pytest.mark.nightly)])
def programs(server: TestedServer, request, django_db_blocker) -> Iterator[Pair]:
    """Two programs in a migrated database in that encoding: seconds, so one of them every day."""
    more = f"TEMPLATE template0 ENCODING '{request.param}' LOCALE 'C'"
    with own_database(server, "encoded", more) as url, django_db_blocker.unblock():
        connections.settings["encoded"] = connections.settings["default"] | {"NAME": "encoded"}
        try:
            executor = MigrationExecutor(connections["encoded"])
            executor.migrate(executor.loader.graph.leaf_nodes("psqlmessages"))
        finally:
            connections["encoded"].close()
            del connections["encoded"], connections.settings["encoded"]
        programs = [Program(f"{url}?client_encoding=UTF8") for _ in range(2)]
        yield programs[0], programs[1]
        for program in programs:
            program.close()


def allow(program: Program, *rules: tuple[str, str, str]) -> None:
    rows = [("psqlmessages", ident, "Topic", topic, mode, 10) for ident, topic, mode in rules]
    program.connection.cursor().executemany(INSERT_RULE, rows)


def test_patterns_match_the_names_with_their_prefix_only(programs: Pair):
    gateway, subject = programs
    allow(gateway, ("SUBJECT", "T", "RW"), ("P*", "T", "R"))
    allow(gateway, *((name, "OTHER", "R") for name in BEGIN_ELSE))
    names = [*BEGIN_SO, *BEGIN_ELSE]
    for name in names:
        gateway.ok("init", name)
    gateway.payloads()
    subject.ok("init", "SUBJECT")
    [connected] = gateway.headers()
    assert connected["Nodes"] == sorted(BEGIN_SO)

    sender, eye = gateway, subject
    allow(sender, ("EYE", "P*", "O"), *(("SENDER", name, "RW") for name in names))
    sender.ok("init", "SENDER")
    eye.ok("init", "EYE")
    eye.payloads()
    eye.ok("topic_observe", "P*")
    for name in names:
        sender.ok("topic_listen", name)
        sender.ok("topic_notify", name)
        sender.ok("topic_send", name, name)
    assert eye.bodies() == BEGIN_SO
