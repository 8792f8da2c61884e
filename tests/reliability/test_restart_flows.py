"""PostgreSQL restarts amid streams, queues and exchanges: nothing is lost, nothing is doubled."""

import threading
from contextlib import suppress

import psycopg
import pytest
import pytest_django

from psqlmessages import ConnectionLost, Node
from tests.conftest import TestedServer
from tests.reliability.client_flow import ClientFlow
from tests.reliability.counts import counted, size
from tests.reliability.crowd import Process, write_exchange
from tests.reliability.queue_flow import QueueFlow, insist
from tests.reliability.restarts import (
    BACKEND,
    IMMEDIATE,
    POSTMASTER,
    WAYS,
    restart,
    restarting,
    until,
)
from tests.sql.conftest import World
from tests.streams.flow import Flow

FAULT = "PostgreSQL restarts"
# A server is restarted several times, and recovers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]
ALL_WAYS = [*WAYS] * size(1, 2)
EXPIRE = "UPDATE psqlmessages_element SET available_at = clock_timestamp() WHERE lease IS NOT NULL"
LEFT = """
    SELECT coalesce(array_agg(e.body::int ORDER BY e.body::int), '{}')
    FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q ON q.id = e.queue_id
    WHERE q.name = %s
"""
ROUTED = """
    SELECT count(*) FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'b'
"""


def test_of_what_is_published_amid_restarts_nothing_is_lost_or_doubled(own_world: World) -> None:
    server, messages = own_world.server.server, size(6_000, 100_000)
    flow = Flow(own_world.server.url(), messages)
    with restarting(server, ALL_WAYS, lambda: committed(flow), messages):
        outcome = flow.run(kills=False)
    counted(
        FAULT,
        f"a stream, {len(ALL_WAYS)} restarts, all ways in turn",
        committed=outcome.committed,
        rolled_back=outcome.rolled_back,
        lost=outcome.lost,
        doubled=outcome.doubled,
        read_though_rolled_back=outcome.undead,
    )
    assert (outcome.lost, outcome.doubled, outcome.undead) == (0, 0, 0)
    assert outcome.committed >= messages
    assert any(publisher.uncertain for publisher in flow.publishers)


def committed(flow: Flow) -> int:
    return sum(len(publisher.committed) for publisher in flow.publishers)


def test_nodes_that_publish_and_read_amid_restarts_lose_and_double_nothing(
    own_world: World,
) -> None:
    server, messages = own_world.server.server, size(800, 8_000)
    flow = ClientFlow(own_world, messages)
    with restarting(server, list(WAYS), lambda: flow.tried, messages):
        flow.run()
    lost, doubled, undead = flow.counts()
    counted(
        FAULT,
        "a stream of Node and AsyncNode, each way once",
        published=len(flow.published),
        publishes_cut_off=len(flow.uncertain),
        lost=lost,
        doubled=doubled,
        read_though_never_published=undead,
    )
    assert (lost, doubled, undead) == (0, 0, 0)


def test_of_what_is_pushed_amid_restarts_nothing_is_lost(own_world: World) -> None:
    server, pushes = own_world.server.server, size(2_000, 20_000)
    flow = QueueFlow(own_world, pushes)
    with restarting(server, ALL_WAYS, lambda: len(flow.pushed), pushes):
        flow.run()
    outcome = flow.outcome()
    counted(
        FAULT,
        f"a queue, {len(ALL_WAYS)} restarts, all ways in turn",
        pushed=outcome.pushed,
        pushes_made_again=outcome.pushed_again,
        lost=outcome.lost,
        pushed_twice=outcome.pushed_twice,
        popped_in_a_transaction=outcome.popped,
        with_two_effects=outcome.doubled,
        reserved_and_done=outcome.consumed,
        of_which_came_again=outcome.came_again,
    )
    assert (outcome.lost, outcome.pushed_twice, outcome.doubled) == (0, 0, 0)
    assert outcome.pushed == pushes
    assert min(outcome.popped, outcome.consumed) > 0


def until_back(node: Node) -> None:
    """Wait until calls of a node do not hit the connection that has ended."""
    pause = threading.Event()
    for _ in range(600):
        try:
            node.sizes("Q")
        except ConnectionLost:
            pause.wait(0.1)
        else:
            return
    raise AssertionError("the node has not come back")


@pytest.mark.parametrize("way", [IMMEDIATE, BACKEND, POSTMASTER])
def test_what_was_reserved_just_before_a_crash_comes_again(own_world: World, way: str) -> None:
    """Reserving does not wait for the disk: a crash may forget it, and never the element."""
    number = size(500, 2_000)
    own_world.rules("psqlmessages NODE Queue Q RW 5")
    with Node("NODE", own_world.server.url()) as node:
        node.push_many("Q", [str(each) for each in range(number)])
        taken = [element for _ in range(10) for element in node.reserve("Q", number // 20)]
        restart(own_world.server.server, way)
        with psycopg.connect(own_world.server.url(), autocommit=True) as owner:
            left = owner.execute(LEFT, ["Q"]).fetchone()
            assert left == (list(range(number)),)
            forgotten = number // 2 - owner.execute(EXPIRE).rowcount
        # Whoever had reserved may still commit, where nobody has taken it since.
        until_back(node)
        done = sum(node.commit(*taken[: number // 4]))
        again = {element.body for element in node.pop("Q", number)}
    late = {element.body for element in taken[: number // 4]}
    counted(
        FAULT,
        f"elements reserved just before, {way}",
        reserved=number // 2,
        reservations_forgotten=forgotten,
        lost=number - len(again | late),
        came_again=len(again & {element.body for element in taken}),
    )
    assert again | late == {str(each) for each in range(number)}
    assert done == number // 4 - len(again & late)


def test_an_exchange_moves_each_element_once_amid_crashes(
    own_world: World, django_db_blocker: pytest_django.DjangoDbBlocker
) -> None:
    number, ways = size(1_000, 10_000), [BACKEND, POSTMASTER]
    own_world.rules("psqlmessages exchange.* Queue * RW 60", "psqlmessages W Queue a W 60")
    definition = {
        "consumer": {"wsize": 50, "parallel": 2},
        "src": {"ns": "default", "queue": "a"},
        "dst": [{"ns": "default", "queue": queue} for queue in "bc"],
    }
    with django_db_blocker.unblock():
        write_exchange(own_world.server, "ship", definition)
    worker = Process(own_world.server, "exchange", "run")
    try:
        worker.wait()
        with restarting(own_world.server.server, ways, lambda: routed(own_world.server), number):
            push(own_world.server, number)
            until(lambda: routed(own_world.server) == number)
        with psycopg.connect(own_world.server.url(), autocommit=True) as owner:
            until(lambda: owner.execute(LEFT, ["a"]).fetchone() == ([],))
    finally:
        worker.close()
    with psycopg.connect(own_world.server.url(), autocommit=True) as owner:
        copies = [owner.execute(LEFT, [queue]).fetchone()[0] for queue in "bc"]  # type: ignore[index]
    counted(
        FAULT,
        f"an exchange within the database, {' and '.join(ways)}",
        elements=number,
        lost=2 * number - sum(len(set(bodies)) for bodies in copies),
        doubled=sum(len(bodies) - len(set(bodies)) for bodies in copies),
        log_lines=len(worker.said),
    )
    assert copies == [list(range(number))] * 2
    assert len(worker.said) < 40, worker.said


def push(server: TestedServer, number: int) -> None:
    """Push numbers, each with a key and until it is known to be there."""
    with Node("W", server.url()) as node:
        for start in range(0, number, 50):
            bodies = [str(each) for each in range(start, start + 50)]
            insist(lambda: node.push_many("a", bodies, keys=bodies))  # noqa: B023


def routed(server: TestedServer) -> int:
    with suppress(psycopg.OperationalError), psycopg.connect(server.url()) as owner:
        (count,) = owner.execute(ROUTED).fetchone() or (0,)
        return int(count)
    return 0
