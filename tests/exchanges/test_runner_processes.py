"""Several loops: others continue while one waits for a lock; freed elements are taken soon."""

from contextlib import closing
from time import monotonic

import psycopg
import pytest

from tests.conftest import TestedServer
from tests.exchanges.field import AWAITED, Field, flow, working
from tests.reliability.counts import report

pytestmark = pytest.mark.usefixtures("committing", "no_polling")

HELD_UP = """
    SELECT count(*) > 0 FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%deliver%'
"""
LATER = """
    SELECT clock_timestamp()
    FROM messages.push('W', 'a', 'mature', headers => '{"lane": "fast"}', delay => 2)
"""
WATCHED = """
    SELECT count(*) > 0 FROM pg_stat_activity
    WHERE datname = current_database() AND state = 'idle'
      AND query LIKE '%%queue_listen%%' AND query_start > %s
"""
SLOW, FAST = (("slow", 'msg.headers.lane == "slow"'), ("b", 'msg.headers.lane == "fast"'))


def test_pushes_are_taken_while_the_watching_loop_waits(field: Field, server: TestedServer):
    field.define(x1=flow("a", SLOW, FAST, parallel=2))
    with working(), closing(psycopg.connect(server.url())) as holder:
        # This open transaction creates the queue "slow", which delays deliveries to it.
        holder.execute("SELECT messages.push('W', 'slow', 'makes it')")
        field.until(lambda: field.default.query(AWAITED, "a"))
        field.default.push("a", "1", lane="fast")
        field.until(lambda: field.default.bodies("b") == ["1"])
        pushed_at = field.default.query(LATER)
        field.until(lambda: field.default.query(WATCHED, pushed_at))
        field.default.push("a", "held up", lane="slow")
        # On a slow machine "mature" may come earlier: then this shows less.
        field.until(lambda: field.default.query(HELD_UP))
        field.default.push("a", "2", lane="fast")
        field.until(lambda: sorted(field.default.bodies("b")) == ["1", "2", "mature"])
        assert field.default.query(HELD_UP)
    assert field.default.bodies("slow") == ["held up"]


def test_a_killed_sessions_elements_come_soon(field: Field, server: TestedServer):
    field.define(x1=flow("a", "b"))
    field.default.push_many("a", ["1", "2", "3"])
    holder = psycopg.connect(server.url())
    holder.execute("SELECT messages.pop('W', 'a', 3)")
    with closing(holder), working():
        field.until(lambda: field.default.query(AWAITED, "a"))
        field.default.query("SELECT pg_terminate_backend(%s)", holder.info.backend_pid)
        killed_at = monotonic()
        field.until(lambda: field.default.bodies("b") == ["1", "2", "3"])
        seconds = monotonic() - killed_at
    what = "elements taken by a killed session: time until a waiting exchange gets them"
    fault = "an exchange, worker or Spark job is killed"
    report(fault, what, elements=3, lost=0, seconds=round(seconds, 2))
    # A worker checks every second for released elements, and otherwise every half minute.
    assert seconds < 20
