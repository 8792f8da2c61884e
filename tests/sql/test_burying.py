"""Burying: who is told of the end of a session, while rules change and where very many hear."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sql.conftest import World
from tests.sql.simultaneous import begins_with, in_background

# So many ids of audiences are kept at most.
KEPT = 100_000
HEARERS, TOPICS = 500, 210
LEFT = """
    SELECT jsonb_build_object('D1', l.topics, 'D2', l.topics)
    FROM (
        SELECT jsonb_agg(jsonb_build_array('listen', t.name, false)) AS topics
        FROM psqlmessages_topic AS t
    ) AS l
"""


@pytest.fixture
def pause(world: World) -> Iterator[None]:
    """Let whoever tells of a crash wait until nobody holds advisory lock 77."""
    # Not by asking for the lock: evaluation does not wait so long for one.
    statement = """
        WHILE EXISTS (
            SELECT FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' AND l.objid = 77
        ) LOOP PERFORM pg_sleep(0.01); END LOOP;
    """
    with begins_with(world, "_hearing_of", statement):
        yield


@pytest.mark.usefixtures("pause")
def test_who_loses_its_right_during_a_burial_hears_no_more_of_it(world: World) -> None:
    world.rules(
        "user1 D1 Topic T R 10", "user1 D2 Topic T R 10", "user2 STAYS Topic T R 10",
        "user3 LOSES Topic T R 10", "user3 LOSES Topic OTHER R 10",
    )  # fmt: skip
    stays, loses = world.node("user2", "STAYS"), world.node("user3", "LOSES")
    dead = world.gateway("user1", "D1", "D2")
    for ident in "D1", "D2":
        dead.ok("use", ident)
        dead.ok("topic_listen", "T")
    for program in stays, loses:
        program.payloads()
    world.owner.query("SELECT pg_advisory_lock(77)::text")
    world.kill(dead)
    with in_background(lambda: stays.ok("topic_status", "T")):
        world.wait_for(
            "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s", stays.pid
        )
        world.execute("DELETE FROM messages.auth WHERE ident = 'LOSES' AND dest = 'T'")
        world.owner.query("SELECT pg_advisory_unlock(77)")
    gone = ["topic_unlisten D1 T", "crash D1", "topic_unlisten D2 T", "topic_none_listen T"]
    assert stays.events() == [*gone, "crash D2"]
    # This was told before.
    assert loses.events() == gone[:1]


# A hundred thousand ids take half a minute to tell of.
@pytest.mark.nightly
def test_topics_and_hearers_beyond_what_is_kept_are_told_all_the_same(world: World) -> None:
    world.rules("user1 D* Topic T* R 10", "user2 H* Topic T* R 10")
    gateway = world.gateway("user2", *(f"H{number}" for number in range(HEARERS)))
    dead = world.gateway("user1", "D1", "D2")
    for ident in "D1", "D2":
        dead.ok("use", ident)
        for number in range(TOPICS):
            dead.ok("topic_listen", f"T{number}")
    gateway.payloads()
    kept = world.owner.query(
        f"SELECT count(*) FROM jsonb_object_keys(messages._shared_audiences(({LEFT})))"
    )
    assert 0 < kept <= KEPT / HEARERS < TOPICS
    world.kill(dead)
    gateway.ok("evaluate")
    assert Counter(event.split()[0] for event in gateway.events()) == {
        "topic_unlisten": 2 * TOPICS,
        "topic_none_listen": TOPICS,
        "crash": 2,
    }
