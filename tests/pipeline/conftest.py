"""Fixtures of the pipeline's tests: one Spark session for all, addresses by role, messages."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from django.db import connection
from pyspark.sql import SparkSession

from psqlmessages.pipeline import register, session, staging
from psqlmessages.pipeline.spark_session import stop
from tests.conftest import TestedServer
from tests.exchanges.conftest import EU, eu, eu_database, field, wide_field
from tests.pipeline.driving import Source
from tests.pipeline.processes import SMALL
from tests.pipeline.sinks import Sink
from tests.sql.conftest import INSERT_RULE, World, new_role, world

__all__ = ["eu", "eu_database", "field", "new_role", "wide_field", "world"]

# Tables that World does not empty.
LEFT = """
    TRUNCATE psqlmessages_traffic, psqlmessages_pipelinejob, messages.staged;
    DELETE FROM messages._batch
"""
FILL = """
    SELECT messages.publish_many(
        %s, %s, ARRAY(SELECT format(%s, number) FROM generate_series(1, %s) AS number)
    )
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore open sockets to Java, and repeat a test if a worker took over Spark's 10 s."""
    passed = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
    anew = pytest.mark.flaky(reruns=3, only_rerun="Python worker failed to connect back")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(passed)
            item.add_marker(anew)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="package", autouse=True)
def dsn_variables(server: TestedServer) -> Iterator[None]:
    """Set the addresses in the environment; remove variables and messages at the end."""
    eu = TestedServer(server.server, EU).url()
    # Starting Spark sets more variables.
    with patch.dict(os.environ, {"PSQLMESSAGES_DSN": server.url(), "PSQLMESSAGES_DSN_EU": eu}):
        os.environ.pop("PSQLMESSAGES_DSN_FILE", None)
        yield
    left = World(server)
    left.watcher.connection.execute(LEFT)
    left.close()


@pytest.fixture(scope="package")
def spark(dsn_variables: None) -> Iterator[SparkSession]:
    """One session for all tests; its workers read as the owner unless dsnFile is given."""
    try:
        yield register(session("tests", "local[2]", **SMALL))
    finally:
        stop()


@pytest.fixture
def dsn_file(server: TestedServer, tmp_path_factory) -> Callable[[str], str]:
    def write(role: str) -> str:
        path = tmp_path_factory.mktemp("dsn") / role
        path.touch(mode=0o600)
        path.write_text(server.url(role))
        return str(path)

    return write


@pytest.fixture
def source(world: World, dsn_file: Callable[[str], str]) -> Iterator[Source]:
    with closing(Source(world, dsn_file)) as source:
        yield source


@pytest.fixture
def sink(world: World, dsn_file: Callable[[str], str]) -> Iterator[Sink]:
    yield Sink(world, dsn_file("user1"))
    staging.close()


@pytest.fixture
def django(django_db_blocker) -> Iterator[None]:
    """Let Django's connection commit, because Spark reads by others."""
    with django_db_blocker.unblock():
        yield
        connection.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


@pytest.fixture
def fill(world: World) -> Callable[..., int]:
    """Publish many messages as FILL of the owner, and keep them; `text` has %s for the number."""
    owner = world.owner.query("SELECT session_user")

    def publish(topic: str, count: int, text: str = "message %s") -> int:
        rule = (owner, "FILL", "Topic", topic, "W", 60)
        world.execute(f"{INSERT_RULE} ON CONFLICT DO NOTHING", rule)
        world.execute("UPDATE psqlmessages_topic SET retention = 3600 WHERE name = %s", (topic,))
        answer = world.owner.query(FILL, "FILL", topic, text, count)
        assert answer["Err"] == "0", answer
        return int(answer["Id"])

    return publish
