"""Done when: 100,000 messages through all this, none lost, none doubled, none that never was."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from project.postgres import Server
from tests.own_server import own_server
from tests.reliability.counts import counted
from tests.servers import SERVER
from tests.sql.conftest import World
from tests.streams.flow import Flow, Outcome

ROOT = Path(__file__).parents[2]
GREATEST_ID_SEEN = """
    CREATE OR REPLACE FUNCTION messages._horizon(topic_id bigint)
    RETURNS bigint
    LANGUAGE plpgsql
    AS $$
    BEGIN
        RETURN (SELECT max(m.id) FROM psqlmessages_streammessage AS m
                WHERE m.topic_id = _horizon.topic_id);
    END
    $$
"""


@pytest.fixture
def unrelated(world: World) -> Iterator[None]:
    """A transaction that wrote and stays open."""
    other = world.program("user1")
    other.connection.execute("BEGIN")
    other.connection.execute("CREATE TEMP TABLE unrelated AS SELECT 1")
    yield
    assert other.query("SELECT count(*) FROM unrelated") == 1
    other.connection.execute("ROLLBACK")


@pytest.mark.slow  # 100,000 messages in about ten thousand transactions
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("unrelated")
def test_of_100_000_messages_none_is_lost_doubled_or_read_though_rolled_back(world: World) -> None:
    outcome = Flow(world.server.url(), 100_000).run()
    tell("8 publishers in random order, a tenth rolled back; the reader killed", outcome)
    assert (outcome.lost, outcome.doubled, outcome.undead) == (0, 0, 0)
    assert outcome.committed >= 100_000
    assert outcome.rolled_back > 1000
    assert min(outcome.reader.killed, outcome.reader.rolled_back, outcome.emptied) > 5


def tell(what: str, outcome: Outcome) -> None:
    """Count what came of a flow."""
    counted(
        "publishers commit in random order and roll back",
        what,
        committed=outcome.committed,
        rolled_back=outcome.rolled_back,
        reader_killed=outcome.reader.killed,
        reader_rolled_back=outcome.reader.rolled_back,
        lost=outcome.lost,
        doubled=outcome.doubled,
        read_though_rolled_back=outcome.undead,
    )


@pytest.fixture
def greatest_id_seen(world: World) -> Iterator[None]:
    """The horizon as who does not know better would compute it."""
    right = world.owner.query("SELECT pg_get_functiondef('messages._horizon'::regproc)")
    world.owner.connection.execute(GREATEST_ID_SEEN)
    yield
    world.owner.connection.execute(right)


def wait_for_readings(flow: Flow, number: int) -> None:
    """Wait until the reader has read something so often."""
    pause = threading.Event()
    while flow.readings < number and not flow.failure:
        pause.wait(0.01)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("unrelated", "greatest_id_seen")
def test_the_same_loses_messages_where_readers_go_by_the_greatest_id_seen(world: World) -> None:
    # However slow the reader is, it reads up to the newest, again and again while others publish.
    flow = Flow(world.server.url(), 8_000, most_rows=100_000)
    outcome = flow.run(beside=flow.thread(lambda: wait_for_readings(flow, 50)))
    tell("for comparison, a reader that goes by the greatest id it sees", outcome)
    assert outcome.lost > 100


@pytest.fixture
def killed(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[Server]:
    """A server that may be killed, migrated."""
    with own_server(tmp_path, pytestconfig.stash[SERVER].binaries) as own:
        yield own.server


def kill_when_busy(server: Server, flow: Flow) -> None:
    """Kill the postmaster twice, each time after some thousand effects, and start it again."""
    for effects in (2_000, 8_000):
        wait_for(server, effects)
        postmaster = server.postmaster
        assert postmaster is not None
        os.kill(postmaster.pid, signal.SIGKILL)
        server.start()
    assert flow.is_busy


def wait_for(server: Server, effects: int) -> None:
    """Wait until so much was read, for some minutes at most."""
    pause = threading.Event()
    with psycopg.connect(server.url(), autocommit=True) as owner:
        for _ in range(4000):
            row = owner.execute("SELECT count(*) FROM psqlmessages_effects").fetchone()
            if row and row[0] >= effects:
                return
            pause.wait(0.05)
    raise AssertionError(f"{effects} messages were never read")


@pytest.mark.slow  # makes a server, kills it twice and waits for its recovery
@pytest.mark.timeout(900)
def test_nothing_committed_is_lost_where_the_server_is_killed(killed: Server) -> None:
    flow = Flow(killed.url(), 24_000)
    outcome = flow.run(kills=False, beside=flow.thread(lambda: kill_when_busy(killed, flow)))
    tell("the same with the postmaster killed -9 twice", outcome)
    assert (outcome.lost, outcome.doubled, outcome.undead) == (0, 0, 0)
    assert sum(len(publisher.uncertain) for publisher in flow.publishers) > 0
