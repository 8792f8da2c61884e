"""Lines: a transaction ahead of time is there, or nothing is left of it."""

import asyncio
from collections.abc import Awaitable, Callable

import psycopg
import pytest

from psqlmessages.graph.lines import Line, Query
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


def test_what_fails_ahead_leaves_what_is_committed(server: TestedServer) -> None:
    async def act(line: Line) -> None:
        done, answers = await line.ask_on(NOW, (Query("BEGIN"), Query("SELECT 2")))
        assert (done[1], answers) == ([(1,)], [[], [(2,)]])
        await line.ask(Query("COMMIT"))
        for error in ("SELECT 1/0", "SELECT nothing FROM nowhere"):
            ahead = (Query("BEGIN"), Query("SELECT 2"), Query(error), Query("SELECT 3"))
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


def test_a_line_that_ends_leaves_its_transaction_first(server: TestedServer) -> None:
    async def act(line: Line) -> None:
        await line.ask(Query("BEGIN"), Query("SELECT pg_advisory_xact_lock(4711)"))
        await line.end(60)
        with psycopg.connect(server.url()) as other:
            row = other.execute("SELECT pg_try_advisory_xact_lock(4711)").fetchone()
        assert row == (True,)

    on_line(server, act)
