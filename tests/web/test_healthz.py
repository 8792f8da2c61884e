"""/healthz: whether the database answers, in bounded time and with bounded effort."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from time import monotonic

import pytest
from django.http import HttpResponse
from django.test import RequestFactory

from psqlmessages.monitor import healthz as module
from psqlmessages.monitor.healthz import healthz
from psqlmessages.relay import watch
from tests.conftest import TestedServer
from tests.web.site import Site


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A database that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = f"host=127.0.0.1 port={listening.getsockname()[1]}"
        monkeypatch.setattr(module, "dsn", lambda: address)
        yield listening


async def ask(method: str = "get") -> HttpResponse:
    return await healthz(getattr(RequestFactory(), method)("/healthz"))


def test_it_is_ok_where_the_database_answers_and_tells_nothing_else(patient_site: Site) -> None:
    assert patient_site.get("/healthz") == (200, '{"status": "ok"}')


def test_it_is_not_cached_and_changes_nothing(server: TestedServer) -> None:
    assert asyncio.run(ask())["Cache-Control"].startswith("max-age=0, no-cache, no-store")
    assert asyncio.run(ask("post")).status_code == HTTPStatus.METHOD_NOT_ALLOWED


def test_it_is_unavailable_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dsn", lambda: "host=127.0.0.1 port=1")
    answer = asyncio.run(ask())
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert json.loads(answer.content) == {"status": "unavailable", "broken": ["database"]}


def test_it_answers_in_time_where_the_database_does_not(stalled: socket.socket) -> None:
    begun = monotonic()
    assert asyncio.run(ask()).status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert monotonic() - begun < module._PATIENCE_SECONDS + 30


def test_however_many_ask_there_is_one_connection_at_a_time(stalled: socket.socket) -> None:
    async def many() -> list[HttpResponse]:
        return await asyncio.gather(*(ask() for _ in range(20)))

    assert {answer.status_code for answer in asyncio.run(many())} == {503}
    connection, _ = stalled.accept()
    connection.close()
    with pytest.raises(BlockingIOError):
        stalled.accept()


def test_it_names_what_of_the_process_does_not_work(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database answers new connections, but nobody finds out who a visitor is."""
    monkeypatch.setattr(module, "dsn", server.url)
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(watch, "SLOW_SECONDS", 0.0)
    release = threading.Event()

    async def while_a_query_hangs() -> list[HttpResponse]:
        hanging = asyncio.create_task(watch.in_thread(release.wait, 60))
        await asyncio.sleep(0)
        answer = await ask()
        release.set()
        await hanging
        return [answer, await ask()]

    during, after = asyncio.run(while_a_query_hangs())
    assert json.loads(during.content) == {"status": "unavailable", "broken": ["users"]}
    assert (during.status_code, after.status_code) == (503, 200)


def test_it_is_ok_again_once_the_database_answers(
    server: TestedServer, stalled: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def twice() -> list[int]:
        before = await ask()
        monkeypatch.setattr(module, "dsn", server.url)
        monkeypatch.setattr(module, "_PATIENCE_SECONDS", 60.0)
        return [before.status_code, (await ask()).status_code]

    assert asyncio.run(twice()) == [503, 200]
