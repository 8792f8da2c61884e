"""Messages through bad conditions: none is lost, none doubled, none read that was rolled back."""

import os
import signal
from collections.abc import Iterator

import psycopg
import pytest

from project.postgres import Server
from tests.django.waiting import wait_until
from tests.reliability.counts import report, size
from tests.sql.conftest import World
from tests.streams.flow import Flow

FAULT = "publishers commit in random order and roll back"
BAD = "lost", "duplicated", "rolled_back_but_read"


def sizes(everyday: int, full: int) -> pytest.MarkDecorator:
    """How many messages: fewer every day; the nightly run takes the minutes of the full size."""
    numbers = [size(everyday, full), pytest.param(full, marks=pytest.mark.nightly)]
    return pytest.mark.parametrize("messages", numbers)


@pytest.fixture
def unrelated(world: World) -> Iterator[None]:
    other = world.program("user1")
    other.execute("BEGIN")
    other.execute("CREATE TEMP TABLE unrelated AS SELECT 1")
    yield
    assert other.query("SELECT count(*) FROM unrelated") == 1
    other.execute("ROLLBACK")


@pytest.mark.versions
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("unrelated")
@sizes(3_000, 100_000)
def test_no_message_is_lost_doubled_or_read_if_rolled_back(world: World, messages: int):
    flow = Flow(world.server.url(), messages, is_prepared=True)
    counts = flow.run()
    report(FAULT, "8 publishers, a tenth rolled back; the reader is killed", **counts)
    assert [counts[bad] for bad in BAD] == [0, 0, 0]
    assert counts["committed"] >= messages
    assert counts["rolled_back"] > messages / 100
    assert min(counts["reader_kills"], counts["reader_rollbacks"]) > 0
    assert messages < 100_000 or flow.emptied > 5


def kill_when_busy(server: Server, flow: Flow, effects: list[int]) -> None:
    """Kill the postmaster each time so many messages were read, and start it again."""
    count = "SELECT count(*) FROM psqlmessages_effects"
    for number in effects:
        with psycopg.connect(server.url(), autocommit=True) as owner:
            wait_until(lambda n=number, o=owner: o.execute(count).fetchone()[0] >= n, 200)
        postmaster = server.postmaster
        assert postmaster is not None
        os.kill(postmaster.pid, signal.SIGKILL)
        server.start()
    assert flow.is_busy


@pytest.mark.timeout(900)
@sizes(1_000, 24_000)
def test_nothing_committed_is_lost_if_the_server_is_killed(mortal: Server, messages: int):
    kills = [messages // 12] if messages < 24_000 else [2_000, 8_000]
    flow = Flow(mortal.url(), messages)
    beside = flow.thread(lambda: kill_when_busy(mortal, flow, kills))
    counts = flow.run(kills=False, beside=beside)
    report(FAULT, "the same; the postmaster is killed twice with -9", **counts)
    assert [counts[bad] for bad in BAD] == [0, 0, 0]
    assert sum(len(publisher.uncertain) for publisher in flow.publishers) > 0
