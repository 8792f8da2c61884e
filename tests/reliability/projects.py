"""Django on another server than that of the tests: its default connection, in all threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import dj_database_url
from django.db import connections

from tests.conftest import TestedServer


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
