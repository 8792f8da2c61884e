"""/healthz: whether the database answers, in bounded time and with bounded effort."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from django.http import HttpResponse
from django.test import RequestFactory

from psqlmessages.monitor import healthz as module
from psqlmessages.monitor.healthz import healthz
from psqlmessages.relay import watch
from tests.conftest import TestedServer
from tests.web.receivers import in_loop


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A database that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = f"host=127.0.0.1 port={listening.getsockname()[1]}"
        monkeypatch.setattr(module, "dsn", lambda: address)
        monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.5)
        yield listening


async def ask(method: str = "get") -> HttpResponse:
    return await healthz(getattr(RequestFactory(), method)("/healthz"))


@in_loop
async def test_it_is_unavailable_if_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dsn", lambda: "host=127.0.0.1 port=1")
    answer = await ask()
    assert answer.status_code == 503
    assert json.loads(answer.content) == {"status": "unavailable", "broken": ["database"]}
    assert answer["Cache-Control"].startswith("max-age=0, no-cache, no-store")
    assert (await ask("post")).status_code == 405


@in_loop
async def test_it_answers_in_time_by_one_connection_if_the_database_does_not(
    server: TestedServer, stalled: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = await asyncio.gather(*(ask() for _ in range(20)))
    assert {answer.status_code for answer in answers} == {503}
    connection, _ = stalled.accept()
    connection.close()
    with pytest.raises(BlockingIOError):
        stalled.accept()
    # It is ok again when the database answers.
    monkeypatch.setattr(module, "dsn", server.url)
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 60.0)
    assert (await ask()).status_code == 200


@in_loop
async def test_it_names_the_broken_part_of_the_process(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database answers new connections, but nobody finds out who a visitor is."""
    monkeypatch.setattr(module, "dsn", server.url)
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(watch, "SLOW_SECONDS", 0.0)
    release = threading.Event()
    hanging = asyncio.create_task(watch.in_thread(release.wait, 60))
    await asyncio.sleep(0)
    during = await ask()
    release.set()
    await hanging
    assert json.loads(during.content) == {"status": "unavailable", "broken": ["users"]}
    assert (during.status_code, (await ask()).status_code) == (503, 200)
