"""The monitor's figures: what its role cannot see is not known, and not nobody."""

import asyncio
from typing import Any

import pytest

from psqlmessages.commands.doctor_queue import QUEUE_LIMIT, USAGE
from psqlmessages.monitor.health import Health, read_health
from psqlmessages.monitor.reading import Reader
from tests.sql.conftest import World


class Filled(Reader):
    """Reads of a server whose notification queue is said to be so full; all else is as it is."""

    usage = 0.0

    async def rows(self, query: Any, params: Any = None) -> list[Any]:
        if query == USAGE:
            return [(self.usage,)]
        return await super().rows(query, params)


async def health(dsn: str, usage: float) -> Health:
    reader = Filled(dsn)
    reader.usage = usage
    try:
        return await read_health(reader, 0.0)
    finally:
        await reader.close()


@pytest.mark.parametrize(("usage", "holders"), [(QUEUE_LIMIT / 2, []), (QUEUE_LIMIT, None)])
def test_who_holds_a_queue_that_fills_is_not_known_where_nobody_is_seen(
    world: World, usage: float, holders: list[Any] | None
) -> None:
    found = asyncio.run(health(world.server.url("user3"), usage))
    assert (found.usage, found.holders) == (usage, holders)
    assert found.round_trip is not None
