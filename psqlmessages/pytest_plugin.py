"""Pytest fixtures for projects: ``pytest_plugins = ["psqlmessages.pytest_plugin"]``."""

import sys
from collections.abc import Iterator

import pytest

from psqlmessages import testing
from psqlmessages.rpc_client import close_clients


@pytest.fixture(autouse=True)
def _close_sessions() -> Iterator[None]:
    """Close the sessions of ``call`` and of the history's writer after each test.

    PostgreSQL does not drop the test database while sessions are open.
    """
    yield
    close_clients()
    # WebSockets and commands start the writer of the history. Do not import it only to stop it.
    if writer := sys.modules.get("psqlmessages.monitor.minute_writer"):
        writer.stop_history_writer()


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
