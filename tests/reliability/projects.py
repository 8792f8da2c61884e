"""Django, an exchange and a sink of Spark on a server of a test's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dj_database_url
import pytest
from django.db import connections

from tests.conftest import TestedServer
from tests.exchanges.field import Bed, Field
from tests.sql.conftest import World


@contextmanager
def django_at(own: TestedServer) -> Iterator[None]:
    """Let the project use a server of the test's own, as if DATABASES named it."""
    known = connections.settings["default"]
    address = dj_database_url.parse(own.url())
    changed = {key: address[key] for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT")}
    before = {key: known[key] for key in changed}
    connections["default"].close()
    known.update(changed)
    try:
        yield
    finally:
        connections["default"].close()
        known.update(before)


@contextmanager
def exchange(world: World, *rules: str) -> Iterator[Field]:
    """An exchange that copies the queue a to b and c; other rules than these are removed."""
    with django_at(world.server):
        field = Field({"default": Bed(world.server)})
        try:
            field.define(x={"src": "a", "dst": ["b", "c"]})
            world.rules(*rules)
            yield field
        finally:
            field.close()


def copies(field: Field) -> list[list[str]]:
    return [sorted(field.default.bodies(queue)) for queue in "bc"]


@contextmanager
def sink(world: World, folder: Path) -> Iterator[Any]:
    """The writer of a stream of Spark to the topic T, as user1."""
    pytest.importorskip("pyarrow")
    from psqlmessages.pipeline import staging
    from tests.pipeline.test_sink_commits import writer

    world.rules("user1 pipeline Topic T W 60")
    path = folder / "user1"
    path.touch(mode=0o600)
    path.write_text(world.server.url("user1"))
    try:
        yield writer({"topic": "T", "dsnFile": str(path)})
    finally:
        staging.close()
