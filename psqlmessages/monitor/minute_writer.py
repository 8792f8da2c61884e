"""Writer of the history: counts messages and elements per minute, in one process at a time.

Its thread also writes the refused calls of this process.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import threading
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

import psycopg
from django.core.exceptions import ImproperlyConfigured

from psqlmessages.client.connection import AsyncConnection
from psqlmessages.conf import get_settings
from psqlmessages.monitor.names import new_ident
from psqlmessages.monitor.queries import OBSERVING_QUERY, connect
from psqlmessages.monitor.refused_writer import write_repeatedly
from psqlmessages.orm import direct_dsn
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub, get_hub
from psqlmessages.retry import RateLimitedLogger, error_line

MINUTE_SECONDS: Final = 60
# Class and object of the writer's advisory lock. Locks of sessions and queues have other classes.
LOCK_IDS: Final = (1886612841, 0)
# Start to count after this time, so that short commands never count.
START_SECONDS: Final = 20.0
# Try again after about this time if another process holds the lock, or after an error.
RETRY_SECONDS: Final = 30.0
# Topics beyond this number share one row per minute, which limits the size of the table.
MAX_TOPICS: Final = 2000
_MAX_COUNTED_TOPICS: Final = 100_000
# A minute written later than this is unknown: its counts include messages of the next minute.
_MAX_DELAY_SECONDS: Final = 10
_QUERY_SECONDS: Final = 20
_STOP_SECONDS: Final = 3
_PRUNED_ROWS: Final = 20_000

_TRY_LOCK: Final = "SELECT pg_try_advisory_lock(%s, %s)"
# Elements pushed, taken and removed since the queue was created.
_QUEUE_TOTALS: Final = """
    SELECT q.name::text, coalesce(sum(c.puts), 0)::bigint,
        coalesce(sum(c.gets + c.commits), 0)::bigint,
        coalesce(sum(c.removes + c.dead_letters), 0)::bigint
    FROM psqlmessages_queue AS q LEFT JOIN psqlmessages_queuecount AS c ON c.queue_id = q.id
    GROUP BY q.id
"""
_STORED_BACKLOGS: Final = """
    SELECT q.name::text, m.backlog FROM psqlmessages_queue AS q CROSS JOIN LATERAL (
        SELECT n.backlog FROM psqlmessages_queueminute AS n WHERE n.queue = q.name
        ORDER BY n.minute DESC LIMIT 1
    ) AS m
"""
_ADD_TOPICS: Final = """
    INSERT INTO psqlmessages_topicminute AS m (topic, minute, messages, bytes)
    SELECT v.topic, to_timestamp(%s), v.messages, v.bytes
    FROM unnest(%s::text[], %s::bigint[], %s::bigint[]) AS v(topic, messages, bytes)
    ON CONFLICT (topic, minute) DO UPDATE
    SET messages = m.messages + excluded.messages, bytes = m.bytes + excluded.bytes
"""
_ADD_QUEUES: Final = """
    INSERT INTO psqlmessages_queueminute AS m (queue, minute, puts, gets, removes, backlog)
    SELECT v.queue, to_timestamp(%s), v.puts, v.gets, v.removes, v.backlog
    FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
        AS v(queue, puts, gets, removes, backlog)
    ON CONFLICT (queue, minute) DO UPDATE
    SET puts = m.puts + excluded.puts, gets = m.gets + excluded.gets,
        removes = m.removes + excluded.removes, backlog = excluded.backlog
"""
_BEGIN_PERIOD: Final = """
    INSERT INTO psqlmessages_historyperiod (kind, starts_at, pid)
    VALUES (%s, to_timestamp(%s), pg_backend_pid()) RETURNING id
"""
_END_PERIOD: Final = """
    UPDATE psqlmessages_historyperiod SET ends_at = greatest(starts_at, to_timestamp(%s))
    WHERE id = %s
"""
# A crashed process has not stored the end of its period ``p``: it ended after the last minute.
END_OF_LAST_MINUTE: Final = """(
    CASE p.kind
        WHEN 'topic' THEN (SELECT max(t.minute) FROM psqlmessages_topicminute AS t)
        ELSE (SELECT max(q.minute) FROM psqlmessages_queueminute AS q)
    END + interval '1 minute'
)"""
_END_CRASHED_PERIODS: Final = f"""
    UPDATE psqlmessages_historyperiod AS p
    SET ends_at = greatest(p.starts_at, {END_OF_LAST_MINUTE}) WHERE p.ends_at IS NULL
"""  # noqa: S608 - built from constants
_PRUNE: Final = tuple(
    f"""
        DELETE FROM {table} WHERE id = ANY (ARRAY(
            SELECT o.id FROM {table} AS o WHERE o.{column} < to_timestamp(%s)
            ORDER BY o.{column} LIMIT {_PRUNED_ROWS}
        ))
    """  # noqa: S608
    for table, column in (
        ("psqlmessages_topicminute", "minute"),
        ("psqlmessages_queueminute", "minute"),
        ("psqlmessages_historyperiod", "ends_at"),
    )
)

logger = logging.getLogger("psqlmessages")


class QueueTotals(NamedTuple):
    """The numbers of elements that were pushed, taken and removed since a queue was created."""

    pushed: int
    taken: int
    removed: int

    @property
    def backlog(self) -> int:
        """The number of elements in the queue."""
        return self.pushed - self.taken - self.removed


_NONE: Final = QueueTotals(0, 0, 0)


class TopicCounter:
    """A receiver at the hub that observes all topics, and counts messages and bytes of each.

    ``observed_since``: all messages since this time were counted; None: not observing.
    """

    def __init__(self, hub: Hub) -> None:
        self.observed_since: float | None = None
        self.ident = ""
        # The hub has lost its connection, and will register the node again.
        self.is_disconnected = False
        self._hub = hub
        self._counts: dict[str, list[int]] = {}

    def deliver(self, message: HubMessage) -> None:
        """Count a message, or record that observing has stopped or resumed."""
        header = message.header
        if header["Type"] == "Topic":
            topic = str(header.get("To", ""))
            if topic not in self._counts and len(self._counts) >= _MAX_COUNTED_TOPICS:
                topic = ""
            count = self._counts.setdefault(topic, [0, 0])
            count[0] += 1
            count[1] += int(header.get("Size", 0))
        elif header["Type"] == "Sys":
            event, is_own = header["Evt"], header.get("Ident") == self.ident
            if event == "connection_lost":
                self.observed_since, self.is_disconnected = None, True
            elif event == "reconnected":
                self.observed_since, self.is_disconnected = time.time(), False
            elif event in ("disconnect", "topic_unobserve") and is_own:
                self.observed_since = None

    async def observe(self) -> None:
        """Start to observe all topics if necessary. If this is refused, counts stay unknown."""
        if self.observed_since is not None or self.is_disconnected:
            return
        await self._hub.leave(self)
        self.ident = new_ident()
        answer = await self._hub.init(self.ident, self, wants_events=False, wants_bodies=False)
        if answer["Err"] == "0":
            answer = await self._hub.run(self.ident, self, "topic_observe", "*")
        if answer["Err"] == "0":
            self.observed_since = time.time()
        else:
            await self._hub.leave(self)

    def take(self) -> dict[str, tuple[int, int]]:
        """Return the counts of the busiest topics since the last call; ``""`` sums all others."""
        counts, self._counts = self._counts, {}
        names = sorted(counts, key=lambda name: (name == "", -counts[name][0]))
        result = {name: (counts[name][0], counts[name][1]) for name in names[:MAX_TOPICS]}
        if others := names[MAX_TOPICS:]:
            result[""] = (
                sum(counts[name][0] for name in others),
                sum(counts[name][1] for name in others),
            )
        return result

    async def close(self) -> None:
        """Deregister the node, disconnect, and forget the counts."""
        self.observed_since, self.is_disconnected = None, False
        self._counts.clear()
        await self._hub.leave(self)
        await self._hub.close()


class MinuteWriter:
    """Counts and writes while its connection holds the lock; otherwise tries to get the lock.

    A topic or queue has no row for a minute without changes. A period is an unbroken sequence of
    known minutes. Its row is inserted when the period begins, and updated when the period ends.
    """

    def __init__(self) -> None:
        self._topics = TopicCounter(get_hub())
        # The totals at the start of the present minute; None if they are unknown.
        self._queue_totals: dict[str, QueueTotals] | None = None
        # The id of the open period of each kind, topic or queue, and the end of its last minute.
        self._periods: dict[str, tuple[int, int]] = {}
        self._log = RateLimitedLogger(logger)

    async def run(self) -> None:
        """Write until cancelled."""
        await asyncio.sleep(START_SECONDS)
        while True:
            try:
                await self._write_while_locked()
            except (psycopg.Error, OSError, ImproperlyConfigured) as error:
                self._log.warning("the history cannot be written: %s", error_line(error))
            finally:
                await self._topics.close()
            await asyncio.sleep(RETRY_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311

    async def _write_while_locked(self) -> None:
        async with await connect(direct_dsn(), "history", _QUERY_SECONDS) as connection:
            # A pooler may give the session with the lock to another client.
            if connection.is_pooled or not (await _fetch(connection, _TRY_LOCK, LOCK_IDS))[0][0]:
                return
            self._queue_totals = None
            await self._end_periods(connection)
            await connection.execute(_END_CRASHED_PERIODS)
            try:
                while True:
                    await self._topics.observe()
                    # Add a second: if the last sleep ended just before its end, the same end must
                    # not be computed again.
                    end = (int(time.time() + 1) // MINUTE_SECONDS + 1) * MINUTE_SECONDS
                    await asyncio.sleep(end - time.time())
                    await self.write_minute(connection, end)
            except asyncio.CancelledError:
                with suppress(psycopg.Error, OSError, TimeoutError):
                    async with asyncio.timeout(_STOP_SECONDS):
                        await self._end_periods(connection)
                raise

    async def write_minute(self, connection: AsyncConnection, end: int) -> None:
        """Write the minute that ends at this Unix time; delete rows older than HISTORY_DAYS."""
        start, topics = end - MINUTE_SECONDS, self._topics.take()
        since = self._topics.observed_since
        queues = {
            name: QueueTotals(*totals) for name, *totals in await _fetch(connection, _QUEUE_TOTALS)
        }
        is_observing = (await _fetch(connection, OBSERVING_QUERY, [self._topics.ident]))[0][0]
        is_in_time = time.time() - end < _MAX_DELAY_SECONDS
        if not is_observing and not self._topics.is_disconnected:
            self._topics.observed_since = None
        are_topics_known = is_in_time and is_observing and since is not None and since <= start
        previous = self._queue_totals if is_in_time else None
        async with connection.transaction():
            await self._set_period(connection, "topic", start, is_known=are_topics_known)
            await self._set_period(connection, "queue", start, is_known=previous is not None)
            if are_topics_known and topics:
                columns = [list(topics), *map(list, zip(*topics.values(), strict=True))]
                await connection.execute(_ADD_TOPICS, [start, *columns])
            if previous is not None:
                rows = _changed_rows(previous, queues)
            else:
                # The changes since the stored backlogs are unknown. Store the present backlogs, in
                # the next minute.
                stored = dict(await _fetch(connection, _STORED_BACKLOGS))
                start = end
                rows = [
                    (name, 0, 0, 0, totals.backlog)
                    for name, totals in queues.items()
                    if totals.backlog != stored.get(name, 0)
                ]
            if rows:
                columns = list(map(list, zip(*rows, strict=True)))
                await connection.execute(_ADD_QUEUES, [start, *columns])
        self._queue_totals = queues if is_in_time else None
        oldest = end - get_settings().HISTORY_DAYS * 24 * 60 * MINUTE_SECONDS
        for query in _PRUNE:
            await connection.execute(query, [oldest])

    async def _set_period(
        self, connection: AsyncConnection, kind: str, start: int, *, is_known: bool
    ) -> None:
        """Begin or extend a period if the minute that starts at ``start`` is known; else end it."""
        period = self._periods.get(kind)
        if is_known and period is None:
            ((period_id,),) = await _fetch(connection, _BEGIN_PERIOD, [kind, start])
            self._periods[kind] = period_id, start + MINUTE_SECONDS
        elif is_known and period is not None:
            self._periods[kind] = period[0], start + MINUTE_SECONDS
        elif period is not None:
            await connection.execute(_END_PERIOD, [period[1], period[0]])
            del self._periods[kind]

    async def _end_periods(self, connection: AsyncConnection) -> None:
        for period_id, end in self._periods.values():
            await connection.execute(_END_PERIOD, [end, period_id])
        self._periods.clear()


def _changed_rows(
    previous: dict[str, QueueTotals], queues: dict[str, QueueTotals]
) -> list[tuple[str, int, int, int, int]]:
    rows = []
    for name, totals in queues.items():
        before = previous.get(name, _NONE)
        if any(new < old for new, old in zip(totals, before, strict=True)):
            # The queue was deleted and created again.
            before = _NONE
        if totals != before:
            changes = (new - old for new, old in zip(totals, before, strict=True))
            rows.append((name, *changes, totals.backlog))
    return rows  # type: ignore[return-value]


async def _fetch(connection: AsyncConnection, query: str, values: Any = None) -> list[Any]:
    return await (await connection.execute(query, values)).fetchall()


# The thread of this process


class WriterThread(threading.Thread):
    """Runs both writers in an event loop of their own, so that they delay no page."""

    def __init__(self) -> None:
        super().__init__(name="psqlmessages history", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._write())

    def run(self) -> None:
        """Write until ``stop``."""
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def stop(self) -> None:
        """Cancel the writers, and wait at most 6 s while they store the ends of open periods."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join(2 * _STOP_SECONDS)

    async def _write(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(write_repeatedly())
                if get_settings().HISTORY_DAYS:
                    group.create_task(MinuteWriter().run())
        except Exception:
            logger.exception("no longer writing history and refused calls: restart this process")


_threads: list[WriterThread] = []
_starting: Final = threading.Lock()


def start_history_writer() -> None:
    """Start the thread that writes history and refused calls, unless it is running."""
    # Two requests may come at the same time, in two threads.
    with _starting:
        if not _threads:
            _threads.append(WriterThread())
            atexit.register(stop_history_writer)
            _threads[0].start()


def stop_history_writer() -> None:
    """Stop the thread if it is running; ``start_history_writer`` starts a new thread."""
    while _threads:
        _threads.pop().stop()
