"""What a role that may use one queue cannot do to the others, nor to the whole."""

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import World

PUSHES = {"push": "forged", "push_many": ["forged"]}
READS = ("pop", "reserve", "take", "peek")


def test_the_rule_of_another_role_takes_nothing(queue: Queue):
    queue.push("x")
    queue.world.rules("user1 GET Queue ELSE R 1")
    refused = {function: queue.pusher.error(function, "GET", "Q", 1) for function in READS}
    assert refused == dict.fromkeys(READS, (2, "cannot use Queue to Q"))
    # Nor does it push.
    for options in ((), (None, "{}")):
        assert queue.reader.error("push", "PUT", "Q", "forged", *options)[0] == 2
    assert queue.pop(5) == ["x"]
    assert queue.pusher.error("queue_listen", "GET", "NEW")[0] == 2
    made = "SELECT count(*) FROM psqlmessages_queue WHERE name = 'NEW'"
    assert queue.world.owner.query(made) == 0


def test_a_rule_for_something_else_pushes_nothing(queue: Queue):
    queue.push("x")
    queue.world.rules("user1 PUT Topic KNOWN R 1")
    for rule in ("ELSE Queue Q", "PUT Queue ELSE", "PUT Topic Q", "PUT Rpc Q"):
        others = "ident IN ('PUT', 'ELSE') AND dest <> 'KNOWN'"
        queue.world.execute(f"DELETE FROM messages.auth WHERE {others}")
        queue.world.rules(f"user1 {rule} W 1")
        for function, body in PUSHES.items():
            assert queue.pusher.error(function, "PUT", "Q", body)[0] == 2, (rule, function)
    assert queue.pop(5) == ["x"]


def test_a_stolen_lease_is_of_no_use_to_another_role(queue: Queue):
    queue.push("x")
    lease = queue.lease()
    for function, *given in ("commit",), ("rollback", 0), ("release",):
        assert queue.pusher.error(function, "GET", *given, lease)[0] == 2, function
        assert queue.sizes()["Reserved"] == 1, function


@pytest.mark.parametrize("max_tries", [None, 3])
def test_the_largest_number_of_tries_delays_no_call(queue: Queue, max_tries: int | None):
    queue.limit(max_tries)
    queue.push("bomb", tries=2**31 - 1)
    queue.push("next")
    queue.reserve()
    queue.age(61)
    assert queue.tend() == (0 if max_tries is None else 1)
    rows = [*queue.reserve(5), *queue.reserve(5, queue="__deadletter__")]
    assert {row.body for row in rows} == {"bomb", "next"}
    assert queue.done("rollback", None, *(row.lease for row in rows)) == [True, True]


def test_the_view_shows_the_queues_that_a_rule_allows(queue: Queue, world: World):
    queue.push("x")
    world.execute("INSERT INTO psqlmessages_queue (name) VALUES ('HIDDEN')")
    assert queue.reader.query("SELECT array_agg(queue) FROM messages.queues") == ["Q"]
    assert world.program("user3").query("SELECT count(*) FROM messages.queues") == 0
    # Nor does it leak a row to a function in the query.
    queue.reader.execute(
        "CREATE FUNCTION pg_temp.leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001"
        " AS $$ BEGIN RAISE NOTICE '%', $1; RETURN true; END $$"
    )
    queue.reader.execute("SELECT FROM messages.queues WHERE pg_temp.leak(queue)")
    assert queue.reader.warnings == ["NOTICE: Q"]
