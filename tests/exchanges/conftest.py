"""Fixtures of the tests of exchanges: a second namespace, and one that is away."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections

from psqlmessages.exchanges.store import permissions
from tests.conftest import TestedServer
from tests.exchanges.field import EMPTY, Bed, Field
from tests.project.example import own_database
from tests.queues.client.conftest import no_polling

__all__ = ["no_polling"]

EU = "test_exchanges_eu"
TypeIn = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def eu_database(server: TestedServer) -> Iterator[TestedServer]:
    # The pipeline's tests import this fixture, so one session may create it twice.
    with own_database(server, EU, f"TEMPLATE {server.server.owner}"):
        yield TestedServer(server.server, EU)


@pytest.fixture
def eu(eu_database: TestedServer, monkeypatch) -> Iterator[TestedServer]:
    """The namespace "eu": a second database without rules; slow answers are allowed."""
    monkeypatch.setattr(permissions, "_CONNECT_SECONDS", 60)
    monkeypatch.setattr(permissions, "_LIMIT_QUERY_TIME", "SET statement_timeout = '60s'")
    with namespace("eu", NAME=EU):
        yield eu_database
    with psycopg.connect(eu_database.url(), autocommit=True) as owner:
        owner.execute("DELETE FROM messages.auth")


@pytest.fixture
def away(server: TestedServer) -> Iterator[None]:
    with namespace("away", HOST="127.0.0.1", PORT="1"):
        yield


@contextmanager
def namespace(alias: str, **differences: Any) -> Iterator[None]:
    """Add an alias to DATABASES, like the default one but for some differences."""
    connections.settings[alias] = {**connections.settings["default"], **differences}
    try:
        yield
    finally:
        if hasattr(connections._connections, alias):
            connections[alias].close()
            del connections[alias]
        del connections.settings[alias]


@pytest.fixture
def committing(server: TestedServer, django_db_blocker) -> Iterator[None]:
    """Let Django commit, as `django_db(transaction=True)` does, without flushing all tables."""
    with django_db_blocker.unblock():
        yield
        with connections["default"].cursor() as cursor:
            cursor.execute(EMPTY)


@pytest.fixture(autouse=True)
def _empty(request) -> None:
    """Remove what tests without Django have left, before a test with Django's mark."""
    if request.node.get_closest_marker("django_db") is not None:
        is_real = "transactional_db" in request.fixturenames
        request.getfixturevalue("transactional_db" if is_real else "db")
        with connections["default"].cursor() as cursor:
            cursor.execute(EMPTY)


@pytest.fixture
def field(server: TestedServer) -> Iterator[Field]:
    field = Field({"default": Bed(server)})
    yield field
    field.close()


@pytest.fixture
def wide_field(server: TestedServer, eu: TestedServer) -> Iterator[Field]:
    field = Field({"default": Bed(server), "eu": Bed(eu)})
    yield field
    field.close()


@pytest.fixture
def type_in(capsys) -> TypeIn:
    def type_in(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = 0
        try:
            call_command("psqlmessages", "exchange", *map(str, arguments))
        except SystemExit as leaving:
            code = int(str(leaving.code))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return type_in
