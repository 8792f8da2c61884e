"""A crowd of WebSockets shares a session, and does not notice one that stops reading."""

import asyncio
from collections.abc import Callable

from tests.conftest import TestedServer
from tests.web.crowd import allow, measure
from tests.web.site import Site


def test_a_crowd_shares_a_session_and_loses_nothing_beside_a_reader_that_stops(
    new_site: Callable[..., Site], server: TestedServer
) -> None:
    site = new_site(PSQLMESSAGES={"RELAY_SOCKETS": 51})
    allow(server)
    site.user("crowd", idents=["crowd.*"])
    cookie = site.login("crowd")
    figures = asyncio.run(measure(site, server, cookie, sockets=50, messages=20, per_second=20))
    assert figures.sessions == 1
    assert figures.delivered == 50 * 20
    assert len(figures.latencies_beside_slow) == 50 * 20
    assert figures.code_of_slow == 4408
    assert max(figures.latencies_beside_slow) < 30
    assert figures.memory_after - figures.memory_before < 50 * 2**20
