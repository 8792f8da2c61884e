"""Django, an exchange and a sink of Spark on a server of a test's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import dj_database_url
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
