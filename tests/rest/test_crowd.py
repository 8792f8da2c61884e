"""Many waiting readers: their cost, and the order in which they get elements."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from psqlmessages.client import wakeups
from psqlmessages.relay.revalidation import Credentials
from psqlmessages.rest import namespaces
from psqlmessages.rest.namespaces import RestDatabase
from psqlmessages.rest.waiters import WaitingRequest
from tests.django.waiting import wait_until
from tests.rest.callers import Caller, Connection, at
from tests.sql.conftest import World
from tests.web.site import Site

ALL = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
CONNECTIONS = f"{ALL} AND application_name LIKE 'psqlmessages rest%%'"
ALL_CONNECTIONS = f"{ALL} AND usename = session_user AND pid <> pg_backend_pid()"


def threads_of(site: Site) -> int:
    return len([*Path(f"/proc/{site.pid}/task").iterdir()])


async def ask(site: Site, worker: Caller, tid: str, until: AsyncExitStack) -> Connection:
    reader = await Connection().ask(site, f"{at('orders')}?to=3600&tid={tid}", worker.headers)
    until.push_async_callback(reader.leave)
    return reader


async def all_waiting(worker: Caller, number: int) -> list[str]:
    async with asyncio.timeout(300):
        while len(found := await asyncio.to_thread(worker.waiting, "orders")) != number:
            pass
    return found


# A thousand connections are opened: 200 show whether each costs a thread or a connection.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("many", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_waiting_readers_cost_little_in_turn(site: Site, worker: Caller, rest: World, many: int):
    worker.push("orders", b"first")
    worker.take("orders")
    before, connections = threads_of(site), rest.owner.query(ALL_CONNECTIONS)

    async def scenario() -> None:
        async with AsyncExitStack() as until:
            readers = {f"r{n}": await ask(site, worker, f"r{n}", until) for n in range(many)}
            line = await all_waiting(worker, many)
            assert threads_of(site) <= before + 4
            # Closed connections may not have ended yet.
            wait_until(lambda: rest.owner.query(CONNECTIONS) <= 7)
            wait_until(lambda: rest.owner.query(ALL_CONNECTIONS) <= connections + 8)
            for number, tid in enumerate(line[:5]):
                await asyncio.to_thread(worker.push, "orders", b"%d" % number)
                assert await readers[tid].answer() == (200, b"%d" % number)
                assert await asyncio.to_thread(worker.waiting, "orders") == line[number + 1 :]

    asyncio.run(scenario())


def test_disconnected_readers_lose_their_place_and_take_no_element(site: Site, worker: Caller):
    async def scenario() -> None:
        async with AsyncExitStack() as until:
            for number in range(20):
                await ask(site, worker, f"gone{number}", until)
            await all_waiting(worker, 20)
        async with AsyncExitStack() as until:
            stays = await ask(site, worker, "stays", until)
            # The server may not know yet that the other readers have disconnected.
            await asyncio.to_thread(worker.push, "orders", b"for who stays")
            async with asyncio.timeout(60):
                assert await stays.answer() == (200, b"for who stays")
        assert await all_waiting(worker, 0) == []

    asyncio.run(scenario())
    assert worker.call("GET", at("orders", "status")).json["total"] == 0


def reader_of_orders(tid: str = "tid", *, waits: bool) -> WaitingRequest:
    now, who = datetime.now(UTC), Credentials(1, "")
    later = now + timedelta(hours=1)
    return WaitingRequest(tid, "orders", "worker", 120.0, False, waits, who, now, later)


def test_a_push_for_a_thousand_readers_is_cheap(rest: World, monkeypatch):
    # Only notifications let waiting requests read.
    monkeypatch.setattr(wakeups, "MIN_POLL_SECONDS", 3600.0)
    monkeypatch.setattr(namespaces, "get_credential_monitor", Mock())

    async def scenario() -> None:
        space = RestDatabase("default")
        listening = asyncio.Event()
        fetch, listen = Mock(wraps=space.pool.fetch), Mock(wraps=space.listener.listen)
        listen.side_effect = lambda *_, **__: listening.set() or DEFAULT
        monkeypatch.setattr(space.pool, "fetch", fetch)
        monkeypatch.setattr(space.listener, "listen", listen)

        def join(number: int) -> list[asyncio.Task[Any]]:
            readers = [reader_of_orders(f"{len(tasks)} {n}", waits=True) for n in range(number)]
            return [asyncio.create_task(space.take(reader)) for reader in readers]

        tasks: list[asyncio.Task[Any]] = []
        tasks += join(900)
        await listening.wait()
        tasks += join(100)
        for number in range(3):
            await asyncio.to_thread(rest.owner.ok, "push", "worker", "orders", str(number))
            assert (await tasks[number]).body == str(number)
        # A few statements per push, not one per reader.
        assert fetch.call_count + listen.call_count < 30
        assert not any(task.done() for task in tasks[3:])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await space.listener.close()
        space.pool._close_idle()

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_a_reader_that_disconnects_when_served_returns_the_element(rest: World):
    rest.owner.ok("push", "worker", "orders", "x")

    async def scenario() -> None:
        space, reader = RestDatabase("default"), reader_of_orders(waits=False)
        # This runs before the waiting task continues.
        reader.result.add_done_callback(lambda _: task.cancel())
        task = asyncio.create_task(space.take(reader))
        await asyncio.wait([task])
        assert task.cancelled()
        assert reader.result.result().body == "x"
        await asyncio.wait(space._release_tasks)
        space.pool._close_idle()

    asyncio.run(scenario())
    assert rest.owner.ok("sizes", "worker", "orders")["Available"] == 1
