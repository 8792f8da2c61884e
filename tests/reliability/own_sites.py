"""Daphne at a server of the test's own, and Django's models of that server within the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest_django

from tests.conftest import TestedServer
from tests.reliability.projects import django_at
from tests.web.site import Site


@contextmanager
def own_site(
    own: TestedServer, folder: Path, blocker: pytest_django.DjangoDbBlocker
) -> Iterator[Site]:
    """Start it, and stop it at the end; its log is to have no fault."""
    site = Site(own, folder, {})
    with blocker.unblock(), django_at(own):
        site.start()
        try:
            yield site
            assert site.faults() == []
        finally:
            site.stop()
            site.forget_users()
