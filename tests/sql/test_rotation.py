"""Removal of kept bodies: tables in rotation, emptied when all in them has expired."""

from collections.abc import Iterator
from itertools import product

import pytest

from tests.sql.conftest import Pair, Program, World

pytestmark = pytest.mark.versions
LONG = "x" * 20_000
# Long enough for no period to end during a test: bodies kept for 10^5 to 10^6 seconds.
CLASS = 5
PUT = """
    INSERT INTO psqlmessages_body (slot, id, topic_id, expires_at, header, body)
    SELECT messages._slot(%s, %s), gen_random_uuid(), t.id, now() + %s::interval, '"Id":1', 'kept'
    FROM (VALUES (1)) AS one LEFT JOIN psqlmessages_topic AS t ON t.name = 'T'
    RETURNING format(
        '{"Dkey":"9.%%s.9999999999999.%%s"}', slot, replace(id::text, '-', '')
    )
"""
COUNT = "SELECT count(*) FROM psqlmessages_body"


def put(world: World, turn: int, interval: str) -> str:
    """Keep a body in the table of a turn, expiring after that time; a payload to fetch it with."""
    return world.owner.query(PUT, CLASS, turn, interval)


def test_any_call_that_evaluates_empties_the_table_of_which_all_has_expired(
    world: World, pair: Pair
) -> None:
    for call in ("evaluate",), ("topic_status", "T"), ("topic_listen", "T"):
        put(world, 0, "1 hour")
        put(world, 1, "-1 hour")
        put(world, 2, "1 hour")
        pair[1].ok(*call)
        assert world.owner.query(COUNT) == 2, "those of this period and of the last one stay"
        world.execute("TRUNCATE psqlmessages_body")


def test_a_reader_in_an_open_transaction_delays_removal_and_blocks_nobody(
    world: World, pair: Pair
) -> None:
    sender, listener = pair
    payload = put(world, 1, "1 hour")
    listener.execute("BEGIN")
    fetched = listener.data(payload)
    sender.execute("SET statement_timeout = '30s'")
    sender.ok("evaluate")
    meanwhile = world.owner.query(COUNT)
    again = listener.data(payload)
    listener.execute("COMMIT")
    sender.ok("evaluate")
    assert fetched == again == ({"Err": "0", "Id": 1}, "kept")
    assert (meanwhile, world.owner.query(COUNT)) == (1, 0)


def test_a_sender_in_an_open_transaction_delays_nothing(world: World, pair: Pair) -> None:
    sender, listener = pair
    put(world, 1, "-1 hour")
    sender.execute("BEGIN")
    sender.ok("topic_send", "T", LONG)
    listener.execute("SET statement_timeout = '30s'")
    listener.ok("evaluate")
    removed = world.owner.query(COUNT)
    sender.execute("COMMIT")
    assert removed == 0
    assert listener.data(listener.payloads()[-1])[1] == LONG


def test_who_has_no_node_delays_nothing(world: World, pair: Pair) -> None:
    payload = put(world, 1, "1 hour")
    for nobody in world.program("hostile"), world.program("user1"):
        nobody.execute("BEGIN")
        assert nobody.data(payload)[0]["Err"] == "50"
    pair[0].ok("evaluate")
    assert world.owner.query(COUNT) == 0


def test_an_uncommitted_removal_is_never_seen_by_readers(world: World, pair: Pair) -> None:
    sender, listener = pair
    put(world, 1, "-1 hour")
    payload = put(world, 1, "1 hour")
    sender.execute("BEGIN")
    sender.ok("evaluate")
    listener.execute("SET statement_timeout = '30s'")
    fetched = listener.data(payload)
    sender.execute("COMMIT")
    assert fetched[1] == "kept"


@pytest.fixture
def clock(world: World) -> Iterator[Program]:
    """The owner in a transaction whose functions take the time from the setting test.clock."""
    owner = world.owner
    owner.execute("BEGIN")
    for name in ("_slot", "_keep"):
        source = owner.query("SELECT pg_get_functiondef(%s::regproc)", f"messages.{name}")
        assert "clock_timestamp()" in source
        owner.execute(
            source.replace("clock_timestamp()", "current_setting('test.clock')::timestamptz")
        )
    yield owner
    owner.execute("ROLLBACK")


def at(clock: Program, moment: float) -> None:
    """Set the time to that many seconds since 1970."""
    clock.execute(
        "SELECT set_config('test.clock', to_timestamp(%s::numeric)::text, true)", [moment]
    )


PERIODS = [10, 100, 1000, 10_000, 100_000, 1_000_000]
TIMEOUTS = [period + more for period in PERIODS for more in (0, 1)]


def test_nothing_unexpired_is_ever_removed_and_all_that_expired_is(clock: Program) -> None:
    wrong = []
    for timeout, part in product([1, 9, *TIMEOUTS, 2**31 - 1], [0, 0.5, 0.999999]):
        period = next((period for period in PERIODS if timeout <= period), 2**31 - 1)
        kept_at = period * (10**10 // period + 1 + part)
        at(clock, kept_at)
        clock.query("SELECT messages._keep(%s, '', 'body', NULL, NULL)", timeout)
        counts = []
        for age in (0, timeout / 3, timeout / 2, timeout * 0.999, 3 * period):
            at(clock, kept_at + age)
            clock.query("SELECT messages._rotate_bodies()")
            counts.append(clock.query(COUNT))
        for step in range(3):
            at(clock, kept_at + (3 + step) * period)
            clock.query("SELECT messages._rotate_bodies()")
        if counts[:4] != [1] * 4 or clock.query(COUNT):
            wrong.append((timeout, part))
            clock.execute("TRUNCATE psqlmessages_body")
    assert not wrong
