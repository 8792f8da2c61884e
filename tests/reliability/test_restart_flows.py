"""PostgreSQL restarts amid streams, queues and exchanges: nothing is lost, nothing is doubled."""

from contextlib import suppress

import psycopg
import pytest
import pytest_django

from psqlmessages import ConnectionLost, Node
from tests.reliability.counts import counted, size
from tests.reliability.crowd import Process, write_exchange
from tests.reliability.restarts import BACKEND, IMMEDIATE, POSTMASTER, WAYS, restart, until
from tests.reliability.work import EXACT, Reader, Work
from tests.sql.conftest import World

FAULT = "PostgreSQL restarts"
EXPIRE = "UPDATE psqlmessages_element SET available_at = clock_timestamp() WHERE lease IS NOT NULL"
LEFT = """
    SELECT coalesce(array_agg(e.body::int ORDER BY e.body::int), '{}')
    FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q ON q.id = e.queue_id
    WHERE q.name = %s
"""
EXCHANGE = {
    "consumer": {"wsize": 50, "parallel": 2},
    "src": {"ns": "default", "queue": "a"},
    "dst": [{"ns": "default", "queue": queue} for queue in "bc"],
}


def left(world: World, queue: str) -> list[int]:
    """The numbers in a queue."""
    with psycopg.connect(world.server.url()) as owner:
        (numbers,) = owner.execute(LEFT, [queue]).fetchone() or ([],)
        return numbers


@pytest.mark.timeout(590)
def test_of_what_is_published_and_pushed_amid_restarts_nothing_is_lost_or_doubled(
    own_world: World, django_db_blocker: pytest_django.DjangoDbBlocker
) -> None:
    server, restarts, part = own_world.server.server, WAYS * size(1, 2), size(100, 2_000)
    own_world.rules("psqlmessages exchange.* Queue * RW 60")
    with django_db_blocker.unblock():
        write_exchange(own_world.server, "ship", EXCHANGE)
    copies = tuple(
        Reader(name, None, "a", found=lambda queue=queue: left(own_world, queue))
        for name, queue in (("exchange", "b"), ("exchange, second copy", "c"))
    )
    worker = Process(own_world.server, "exchange", "run")
    try:
        worker.wait()
        with Work(own_world, *EXACT, more=copies) as work:
            for way in restarts:
                work.go_on(part)
                restart(server, way)
            work.go_on(part)
    finally:
        worker.close()
    counted(
        FAULT, f"streams, queues and an exchange, {len(restarts)} restarts, all ways in turn",
        **work.counts(), log_lines=len(worker.said),
    )  # fmt: skip
    work.check()
    assert left(own_world, "a") == []
    assert len(worker.said) < 40, worker.said


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(IMMEDIATE, marks=pytest.mark.nightly),  # one way is enough every day
        BACKEND,
        pytest.param(POSTMASTER, marks=pytest.mark.nightly),
    ],
)
def test_what_was_reserved_just_before_a_crash_comes_again(own_world: World, way: str) -> None:
    """Reserving does not wait for the disk: a crash may forget it, and never the element."""
    number = size(500, 2_000)
    own_world.rules("psqlmessages NODE Queue Q RW 5")
    with Node("NODE", own_world.server.url()) as node:
        node.push_many("Q", [str(each) for each in range(number)])
        taken = [element for _ in range(10) for element in node.reserve("Q", number // 20)]
        restart(own_world.server.server, way)
        assert left(own_world, "Q") == list(range(number))
        with psycopg.connect(own_world.server.url(), autocommit=True) as owner:
            forgotten = number // 2 - owner.execute(EXPIRE).rowcount
        until(lambda: answers(node))
        # Whoever had reserved may still commit, where nobody has taken it since.
        done = sum(node.commit(*taken[: number // 4]))
        again = {element.body for element in node.pop("Q", number)}
    late = {element.body for element in taken[: number // 4]}
    counted(
        FAULT, f"elements reserved just before, {way}", reserved=number // 2,
        reservations_forgotten=forgotten, lost=number - len(again | late),
        came_again=len(again & {element.body for element in taken}),
    )  # fmt: skip
    assert again | late == {str(each) for each in range(number)}
    assert done == number // 4 - len(again & late)


def answers(node: Node) -> bool:
    """Whether calls of a node do not hit the connection that has ended."""
    with suppress(ConnectionLost):
        return node.sizes("Q") is not None
    return False
