"""The fixture `server`: the test database, and its address for each role."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from django.db import connection
from django.test.utils import setup_databases, teardown_databases
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from psycopg.conninfo import conninfo_to_dict

from project.postgres import Server
from tests.client.proxy import Proxy
from tests.connection_pool import ConnectionPool
from tests.migrated_cluster import create_roles
from tests.servers import SERVER

# On a busy machine, an example or its generation may take long.
slow = [HealthCheck.too_slow]
hypothesis_settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
hypothesis_settings.load_profile("untimed")


@dataclass(frozen=True)
class TestedServer:
    """A server with the test database; `url` takes the owner's name or one of `LOGIN_ROLES`."""

    __test__ = False  # pytest must not collect it because of its name

    server: Server
    database: str
    pool: ConnectionPool | None = None

    def url(self, role: str = Server.owner) -> str:
        return self.server.url(self.database, role)

    @property
    def superuser_url(self) -> str:
        return self.server.superuser_url(self.database)

    @property
    def psql(self) -> Path:
        return self.server.psql


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let Ctrl-C interrupt the commands under test.

    A shell that runs the tests in the background ignores SIGINT; commands would inherit this.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def django_db_setup(pytestconfig, django_test_environment, django_db_blocker) -> Iterator[None]:
    """Create the test database for every run: most tests use it without a mark of Django's."""
    # The writer of the history would keep a session and its lock: only its own tests run it.
    pytest.MonkeyPatch().setattr("psqlmessages.monitor.minute_writer.START_SECONDS", 1_000_000)
    connection.settings_dict["TEST"]["TEMPLATE"] = Server.owner
    with django_db_blocker.unblock():
        created = setup_databases(verbosity=0, interactive=False, aliases=["default"])
    yield
    with django_db_blocker.unblock():
        terminate_sessions(pytestconfig.stash[SERVER])
        teardown_databases(created, verbosity=0)


def terminate_sessions(server: Server) -> None:
    """Terminate the remaining sessions, such as those of hosts that vanished in a test."""
    pid = connection.cursor().connection.info.backend_pid
    with psycopg.connect(server.superuser_url(), autocommit=True) as superuser:
        end = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
        given = (connection.settings_dict["NAME"], pid)
        superuser.execute(f"{end} WHERE datname = %s AND pid <> %s", given)


@pytest.fixture(scope="session")
def server(pytestconfig, django_db_setup: None) -> Iterator[TestedServer]:
    """The server with the migrated test database and the roles of the tests."""
    pool = ConnectionPool()
    tested = TestedServer(pytestconfig.stash[SERVER], connection.settings_dict["NAME"], pool)
    with psycopg.connect(tested.superuser_url, autocommit=True) as superuser:
        create_roles(superuser, tested.server)
    yield tested
    pool.close()


@pytest.fixture
def proxy(server: TestedServer) -> Iterator[Proxy]:
    address = conninfo_to_dict(server.url())
    with Proxy(str(address["host"]), int(str(address["port"]))).serve() as proxy:
        yield proxy
