"""Plans: loops and batches of a definition. Connections: prefetching the next batch."""

from psqlmessages.exchanges import CompiledDestination, CompiledExchange, QueueRef, Selector
from psqlmessages.exchanges.engine.batch import ExchangePlan
from psqlmessages.exchanges.engine.sql import Query, ReconnectingConnection
from tests.client.nodes import in_a_loop
from tests.conftest import TestedServer


def plan(*destinations: str, **options: object) -> ExchangePlan:
    compiled = tuple(CompiledDestination(QueueRef(*each.split("/"))) for each in destinations)
    return ExchangePlan.of(CompiledExchange("x1", QueueRef("here", "a"), compiled, **options))


def test_the_loops_share_the_window_and_a_batch_fits_one_call():
    expected = {
        (4, 100, 1): (4, 25), (16, 3, 1): (3, 1), (16, 10, 1): (10, 1), (1, 100, 0): (1, 100),
        (1, 4096, 16): (1, 4096), (1, 4096, 20): (1, 3276), (1, 4096, 1000): (1, 65),
        (4, 100, 1000): (4, 25),
    }  # fmt: skip
    for (parallel, wsize, destinations), loops_and_batch in expected.items():
        queues = [f"here/b{number}" for number in range(destinations)]
        found = plan(*queues, parallel=parallel, wsize=wsize)
        assert (found.consumers, found.batch_size) == loops_and_batch


def test_bodies_are_fetched_only_if_a_selector_needs_them_or_they_leave_the_database():
    for selector, fetches in (('msg.headers.n == "1"', False), ('msg.body == "1"', True)):
        destination = CompiledDestination(QueueRef("here", "b"), Selector(selector))
        found = ExchangePlan.of(CompiledExchange("x1", QueueRef("here", "a"), (destination,)))
        assert found.fetches_body == fetches
    assert plan("there/b").fetches_body
    assert not plan("there/b").needs_body


@in_a_loop
async def test_a_failure_of_a_later_batch_keeps_committed_ones(server: TestedServer):
    now = (Query("BEGIN"), Query("SELECT 1"), Query("COMMIT"))
    line = ReconnectingConnection(server.url(), 60)
    done, answers = await line.execute_and_prefetch(now, (Query("BEGIN"), Query("SELECT 2")))
    assert (done[1], answers) == ([(1,)], [[], [(2,)]])
    await line.execute(Query("COMMIT"))
    for error in ("SELECT 1/0", "SELECT nothing FROM nowhere"):
        ahead = (Query("BEGIN"), Query("SELECT 2"), Query(error), Query("SELECT 3"))
        done, answers = await line.execute_and_prefetch(now, ahead)
        assert (done[1], answers) == ([(1,)], None)
        assert (await line.execute(Query("SELECT 4")))[0] == [(4,)]
    await line.close()
