"""Pytest fixtures for projects: ``pytest_plugins = ["psqlmessages.pytest_plugin"]``."""

from collections.abc import Iterator

import pytest

from psqlmessages import testing
from psqlmessages.rpc_client import close_callers


@pytest.fixture(autouse=True)
def _close_sessions_of_calls() -> Iterator[None]:
    """Close the sessions of ``call``: PostgreSQL does not drop a database with open sessions."""
    yield
    close_callers()


@pytest.fixture
def sent_messages() -> Iterator[testing.SentMessages]:
    """Collect the messages that the test sends; see :func:`psqlmessages.testing.sent_messages`."""
    with testing.sent_messages() as sent:
        yield sent


@pytest.fixture
def answered_calls() -> Iterator[None]:
    """Answer calls by handlers of this process; see :func:`psqlmessages.testing.answered_calls`."""
    with testing.answered_calls():
        yield
