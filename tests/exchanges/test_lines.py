"""Lines: a transaction ahead of time is there, or nothing is left of it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from psqlmessages.graph.lines import Line, Query
from tests.client.proxy import Proxy
from tests.conftest import TestedServer

NOW = (Query("BEGIN"), Query("SELECT 1"), Query("COMMIT"))


def on_line(server: TestedServer, act: Callable[[Line], Awaitable[None]]) -> None:
    async def run() -> None:
        line = Line(server.url(), 60)
        try:
            await act(line)
        finally:
            await line.close()

    asyncio.run(run())


def test_both_are_answered_in_one_trip(server: TestedServer) -> None:
    async def act(line: Line) -> None:
        done, ahead = await line.ask_on(NOW, (Query("BEGIN"), Query("SELECT 2")))
        assert (done[1], ahead) == ([(1,)], [[], [(2,)]])
        await line.ask(Query("COMMIT"))

    on_line(server, act)


@pytest.mark.parametrize("fault", ["SELECT 1/0", "SELECT nothing FROM nowhere"])
def test_what_fails_ahead_leaves_what_is_committed(server: TestedServer, fault: str) -> None:
    async def act(line: Line) -> None:
        ahead = (Query("BEGIN"), Query("SELECT 2"), Query(fault), Query("SELECT 3"))
        done, answers = await line.ask_on(NOW, ahead)
        assert (done[1], answers) == ([(1,)], None)
        assert (await line.ask(Query("SELECT 4")))[0] == [(4,)]

    on_line(server, act)


def test_what_fails_before_is_raised_and_nothing_is_begun_ahead(server: TestedServer) -> None:
    async def act(line: Line) -> None:
        now = (Query("BEGIN"), Query("SELECT 1/0"), Query("COMMIT"))
        with pytest.raises(psycopg.errors.DivisionByZero):
            await line.ask_on(now, (Query("BEGIN"), Query("SELECT 2")))
        await line.reset()
        assert (await line.ask(Query("SELECT now() = statement_timestamp()")))[0] == [(True,)]

    on_line(server, act)


def test_a_connection_that_ends_ahead_keeps_what_was_answered(server: TestedServer) -> None:
    async def act(line: Line) -> None:
        ahead = (Query("BEGIN"), Query("SELECT pg_terminate_backend(pg_backend_pid())"))
        for _ in range(50):
            # What had come may go with the connection that is reset: then nobody can know.
            with suppress(psycopg.OperationalError):
                done, answers = await line.ask_on(NOW, ahead)
                assert (done[1], answers, line.is_open) == ([(1,)], None, False)
                return
            assert not line.is_open
        raise AssertionError("no answer ever came before the end")

    on_line(server, act)


def test_a_line_ends_though_the_server_is_silent(server: TestedServer) -> None:
    known = conninfo_to_dict(server.url())
    with Proxy(str(known["host"]), int(str(known["port"]))).serve() as proxy:

        async def act() -> float:
            line = Line(make_conninfo(server.url(), port=proxy.port), 60)
            await line.ask(Query("BEGIN"), Query("SELECT 1"))
            proxy.stall()
            began = monotonic()
            await line.end(0.3)
            assert not line.is_open
            return monotonic() - began

        assert asyncio.run(act()) < 30


def test_a_line_that_ends_leaves_its_transaction_first(server: TestedServer) -> None:
    async def act(line: Line) -> None:
        await line.ask(Query("BEGIN"), Query("SELECT pg_advisory_xact_lock(4711)"))
        await line.end(60)
        with psycopg.connect(server.url()) as other:
            row = other.execute("SELECT pg_try_advisory_xact_lock(4711)").fetchone()
        assert row == (True,)

    on_line(server, act)
