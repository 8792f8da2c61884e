"""Queue calls: what the admin does to queues. Django is the owner, so no rule is asked."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import transaction

from psqlmessages.admin.calls import bound_waits, database, execute, rows

# While a queue is removed all others wait: not for long.
_PATIENCE = "2s"
_SET_PAUSED = """
    WITH changed AS (
        UPDATE psqlmessages_queue AS q SET is_paused = %(is_paused)s
        WHERE q.id = ANY (%(ids)s) AND q.is_paused <> %(is_paused)s RETURNING q AS queue
    )
    SELECT (c.queue).id, messages._wake_readers(c.queue) FROM changed AS c
"""
_DRAIN = """
    WITH locked AS MATERIALIZED (
        SELECT e.id FROM psqlmessages_element AS e
        WHERE e.queue_id = %s AND e.available_at <= clock_timestamp() FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM psqlmessages_element AS e USING locked AS l WHERE e.id = l.id RETURNING 1
    )
    SELECT count(*) FROM gone
"""
_REMOVE = """
    SELECT CASE WHEN EXISTS (
        SELECT FROM psqlmessages_element AS e
        JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %(name)s
    ) THEN false ELSE messages._remove_queue(%(name)s) END
"""


def make(name: str) -> int:
    """Make a queue, unless it is there; return its key."""
    ((key,),) = rows("SELECT (messages._queue(%s)).id", [name])
    return int(key)


def set_paused(ids: Iterable[int], *, is_paused: bool) -> set[int]:
    """Pause queues or resume them, and tell who waits; return those that were not so.

    Raises OperationalError where a transaction that uses one of them holds it up for 10 s.
    """
    with transaction.atomic(using=database()):
        bound_waits()
        return {key for key, _ in rows(_SET_PAUSED, {"ids": list(ids), "is_paused": is_paused})}


def drain(queue: int) -> int:
    """Remove what can be taken now, also while the queue is paused; return how many."""
    with transaction.atomic(using=database()):
        ((removed,),) = rows(_DRAIN, [queue])
        if removed:
            rows("SELECT messages._count(%s, gets => %s)", [queue, removed])
    return int(removed)


def remove_empty(name: str) -> bool:
    """Remove a queue; False where it has elements, or is no more.

    Raises OperationalError where transactions that use queues hold it up for 2 s.
    """
    with transaction.atomic(using=database()):
        rows("SELECT set_config('lock_timeout', %s, true)", [_PATIENCE])
        execute("LOCK TABLE psqlmessages_queue IN EXCLUSIVE MODE")
        ((is_removed,),) = rows(_REMOVE, {"name": name})
    return bool(is_removed)


def put_back(elements: Iterable[int]) -> int:
    """Return dead letters to the queues they came from; how many: those reserved stay."""
    ((moved,),) = rows("SELECT messages._put_back(%s)", [list(elements)])
    return int(moved)
