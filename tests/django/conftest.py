"""Fixtures of the Django tests: a project whose node is "shop", and programs of other roles."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from django.contrib.auth.models import Group, User
from django.db import connection
from psycopg.conninfo import conninfo_to_dict
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.cli.doctor_checks import Check, CheckContext, Finding, run_check
from psqlmessages.client.connect import connect
from psqlmessages.rpc_client import close_clients
from tests.conftest import TestedServer
from tests.django.pgbouncer import pgbouncer
from tests.sql.conftest import Program, World

RULES = (
    f"{Server.owner} shop Topic ORDERS RW 60", f"{Server.owner} shop.* Rpc PRICES W 60",
    f"{Server.owner} worker* Topic ORDERS* RW 60", f"{Server.owner} PRICES Rpc NOBODY W 60",
    "user2 LISTENER Topic ORDERS* RW 60", "user2 ASKER Rpc worker* W 60",
    "user2 ASKER Topic ORDERS W 60",
)  # fmt: skip
Changed = Callable[[str, str], None]


@pytest.fixture
def shop(server: TestedServer, settings: Settings, django_db_blocker) -> Iterator[World]:
    """The project's node with its rules. `transactional_db` would take longer."""
    settings.PSQLMESSAGES = {"NODE": "shop"}
    world = World(server)
    world.rules(*RULES)
    with django_db_blocker.unblock():
        yield world
        close_clients()
        if connection.in_atomic_block or not connection.get_autocommit():
            connection.close()
        User.objects.all().delete()
        Group.objects.all().delete()
    world.owner.connection.execute("DELETE FROM messages.auth")
    world.close()


@pytest.fixture
def changed(shop: World) -> Iterator[Changed]:
    """Change the database as the superuser; at the end the second statement takes it back."""
    with ExitStack() as undo:

        def change(statement: str, back: str) -> None:
            shop.watcher.connection.execute(statement)
            undo.callback(shop.watcher.connection.execute, back)

        yield change


@pytest.fixture
def django_by_transaction(shop: World, monkeypatch) -> Iterator[None]:
    """Let Django connect through a pooler in transaction mode."""
    connection.close()
    with pgbouncer(shop.server, "transaction") as address, monkeypatch.context() as behind:
        behind.setitem(connection.settings_dict, "PORT", conninfo_to_dict(address)["port"])
        yield
        connection.close()


def finding_of(check: Check, address: str) -> Finding:
    with connect(address) as connection:
        (finding,) = run_check(check, CheckContext(address, connection))
        return finding


@pytest.fixture
def sender(shop: World) -> Program:
    return shop.node("user2", "ASKER", notify="ORDERS")
