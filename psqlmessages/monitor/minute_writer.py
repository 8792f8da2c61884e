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

from psqlmessages.client.connect import set_statement_timeout
from psqlmessages.client.connection import AsyncConnection
from psqlmessages.client.options import complete_conninfo
from psqlmessages.conf import get_settings
from psqlmessages.monitor.names import new_ident
from psqlmessages.monitor.refused_writer import write_repeatedly
from psqlmessages.orm import direct_dsn
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub, get_hub
from psqlmessages.retry import RateLimitedLogger, error_line

MINUTE_SECONDS: Final = 60
# The advisory lock of the process that writes. Sessions and queues have the classes before it.
LOCK_IDS: Final = (1886612841, 0)
# Processes that end soon, such as short commands, never start to count.
START_SECONDS: Final = 20.0
# How often a process tries to get the lock that another one holds.
RETRY_SECONDS: Final = 30.0
# More topics than this share one row per minute, so that the size of the table is bounded.
MAX_TOPICS: Final = 2000
_MAX_COUNTED_TOPICS: Final = 100_000
# A minute that is written later than this is not known: counts of the next one are in it.
_MAX_DELAY_SECONDS: Final = 10
_QUERY_SECONDS: Final = 20
_STOP_SECONDS: Final = 3
_PRUNED_ROWS: Final = 20_000

_TRY_LOCK: Final = "SELECT pg_try_advisory_lock(%s, %s)"
_OBSERVING: Final = """
    SELECT EXISTS (
        SELECT FROM psqlmessages_observation AS o
        JOIN psqlmessages_client AS c ON c.id = o.client_id
        WHERE c.ident = %s AND o.pattern = '*'
    )
"""
# Elements that came in, that were taken, and that were removed, since the queue was created.
_QUEUE_COUNTS: Final = """
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
# A process that crashed has not stored its end: only the minutes up to its last row are known.
_END_CRASHED_PERIODS: Final = """
    UPDATE psqlmessages_historyperiod AS p SET ends_at = greatest(p.starts_at, (
        CASE p.kind
            WHEN 'topic' THEN (SELECT max(t.minute) FROM psqlmessages_topicminute AS t)
            ELSE (SELECT max(q.minute) FROM psqlmessages_queueminute AS q)
        END + interval '1 minute'
    ))
    WHERE p.ends_at IS NULL
"""
_PRUNE: Final = tuple(
    f"""
        DELETE FROM {table} WHERE id = ANY (ARRAY(
            SELECT o.id FROM {table} AS o WHERE o.{column} < to_timestamp(%s)
            ORDER BY o.{column} LIMIT {_PRUNED_ROWS}
        ))
    """  # noqa: S608 - built from constants
    for table, column in (
        ("psqlmessages_topicminute", "minute"),
        ("psqlmessages_queueminute", "minute"),
        ("psqlmessages_historyperiod", "ends_at"),
    )
)

logger = logging.getLogger("psqlmessages")


class QueueTotals(NamedTuple):
    """Elements that came into a queue, that were taken, and that were removed."""

    puts: int
    gets: int
    removes: int

    @property
    def backlog(self) -> int:
        """The number of elements in the queue."""
        return self.puts - self.gets - self.removes


_NONE: Final = QueueTotals(0, 0, 0)


class TopicCounter:
    """A receiver at the hub that observes all topics, and counts messages and bytes of each.

    ``since``: no message has been missed since this time; None: it does not observe.
    """

    def __init__(self, hub: Hub) -> None:
        self.since: float | None = None
        self.ident = ""
        # The hub has lost its connection, and will register the node again.
        self.is_away = False
        self._hub = hub
        self._counts: dict[str, list[int]] = {}

    def deliver(self, message: HubMessage) -> None:
        """Count a message; note the loss of the connection or of the right to observe."""
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
                self.since, self.is_away = None, True
            elif event == "reconnected":
                self.since, self.is_away = time.time(), False
            elif event in ("disconnect", "topic_unobserve") and is_own:
                self.since = None

    async def observe(self) -> None:
        """Observe all topics, unless it does; without a rule, the topics stay unknown."""
        if self.since is not None or self.is_away:
            return
        await self._hub.leave(self)
        self.ident = new_ident()
        answer = await self._hub.init(self.ident, self, wants_events=False, wants_bodies=False)
        if answer["Err"] == "0":
            answer = await self._hub.run(self.ident, self, "topic_observe", "*")
        if answer["Err"] == "0":
            self.since = time.time()
        else:
            await self._hub.leave(self)

    def take(self) -> dict[str, tuple[int, int]]:
        """Return the counts since the last call: the busiest topics, and the sums of the others."""
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
        self.since, self.is_away = None, False
        self._counts.clear()
        await self._hub.leave(self)
        await self._hub.close()


class MinuteWriter:
    """Counts and writes while its connection holds the lock; otherwise tries to get the lock.

    A minute in which nothing happened writes nothing. Each known period has a row, which is written
    when it begins and when it ends.
    """

    def __init__(self) -> None:
        self._topics = TopicCounter(get_hub())
        # At the start of the present minute; None: unknown.
        self._queues: dict[str, QueueTotals] | None = None
        # By kind: the id of the open period, and the end of its last minute.
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
        dsn = complete_conninfo(direct_dsn(), "history")
        async with await AsyncConnection.connect(dsn, autocommit=True) as connection:
            connection.answer_seconds = 2.0 * _QUERY_SECONDS
            # An advisory lock needs a session of its own, which a pooler does not give.
            if not await set_statement_timeout(connection, _QUERY_SECONDS):
                return
            if not (await _fetch(connection, _TRY_LOCK, LOCK_IDS))[0][0]:
                return
            self._queues = None
            await self._end_periods(connection)
            await connection.execute(_END_CRASHED_PERIODS)
            try:
                while True:
                    await self._topics.observe()
                    # A timer may be early by a moment.
                    end = (int(time.time() + 1) // MINUTE_SECONDS + 1) * MINUTE_SECONDS
                    await asyncio.sleep(end - time.time())
                    await self.write_minute(connection, end)
            except asyncio.CancelledError:
                with suppress(psycopg.Error, OSError, TimeoutError):
                    async with asyncio.timeout(_STOP_SECONDS):
                        await self._end_periods(connection)
                raise

    async def write_minute(self, connection: AsyncConnection, end: int) -> None:
        """Write the minute that ends at this Unix time, and then remove what is too old."""
        start, topics = end - MINUTE_SECONDS, self._topics.take()
        since = self._topics.since
        queues = {
            name: QueueTotals(*totals) for name, *totals in await _fetch(connection, _QUEUE_COUNTS)
        }
        is_observing = (await _fetch(connection, _OBSERVING, [self._topics.ident]))[0][0]
        is_in_time = time.time() - end < _MAX_DELAY_SECONDS
        if not is_observing and not self._topics.is_away:
            self._topics.since = None
        knows_topics = is_in_time and is_observing and since is not None and since <= start
        previous = self._queues if is_in_time else None
        async with connection.transaction():
            await self._set_period(connection, "topic", start, is_known=knows_topics)
            await self._set_period(connection, "queue", start, is_known=previous is not None)
            if knows_topics and topics:
                columns = [list(topics), *map(list, zip(*topics.values(), strict=True))]
                await connection.execute(_ADD_TOPICS, [start, *columns])
            if previous is not None:
                rows = _changed_rows(previous, queues)
            else:
                # The next minute is the first known one: its row shows the backlog before it.
                start, rows = end, await _changed_backlogs(connection, queues)
            if rows:
                columns = list(map(list, zip(*rows, strict=True)))
                await connection.execute(_ADD_QUEUES, [start, *columns])
        self._queues = queues if is_in_time else None
        oldest = end - get_settings().HISTORY_DAYS * 24 * 60 * MINUTE_SECONDS
        for query in _PRUNE:
            await connection.execute(query, [oldest])

    async def _set_period(
        self, connection: AsyncConnection, kind: str, start: int, *, is_known: bool
    ) -> None:
        """Begin or end a period, depending on whether the minute with this start is known."""
        period = self._periods.get(kind)
        if is_known and period is None:
            ((key,),) = await _fetch(connection, _BEGIN_PERIOD, [kind, start])
            self._periods[kind] = key, start + MINUTE_SECONDS
        elif is_known and period is not None:
            self._periods[kind] = period[0], start + MINUTE_SECONDS
        elif period is not None:
            await connection.execute(_END_PERIOD, [period[1], period[0]])
            del self._periods[kind]

    async def _end_periods(self, connection: AsyncConnection) -> None:
        for key, end in self._periods.values():
            await connection.execute(_END_PERIOD, [end, key])
        self._periods.clear()


def _changed_rows(
    previous: dict[str, QueueTotals], queues: dict[str, QueueTotals]
) -> list[tuple[str, int, int, int, int]]:
    rows = []
    for name, totals in queues.items():
        before = previous.get(name, _NONE)
        if any(new < old for new, old in zip(totals, before, strict=True)):
            # It was deleted and created again.
            before = _NONE
        if totals != before:
            changes = (new - old for new, old in zip(totals, before, strict=True))
            rows.append((name, *changes, totals.backlog))
    return rows  # type: ignore[return-value]


async def _changed_backlogs(
    connection: AsyncConnection, queues: dict[str, QueueTotals]
) -> list[tuple[str, int, int, int, int]]:
    """Return rows for the queues whose backlog is not the stored one."""
    stored = dict(await _fetch(connection, _STORED_BACKLOGS))
    return [
        (name, 0, 0, 0, totals.backlog)
        for name, totals in queues.items()
        if totals.backlog != stored.get(name, 0)
    ]


async def _fetch(connection: AsyncConnection, query: str, values: Any = None) -> list[Any]:
    return await (await connection.execute(query, values)).fetchall()


# The thread of this process


class WriterThread(threading.Thread):
    """Runs the writer in an event loop of its own: it delays no page and keeps no hub connected."""

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
        """Store the end of the known periods, and disconnect."""
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
            logger.exception("the history is not written any longer: restart this process")


_threads: list[WriterThread] = []


def start_writer() -> None:
    """Start to write the history and the refused calls of this process, unless it does so."""
    if not _threads:
        _threads.append(WriterThread())
        atexit.register(stop_writer)
        _threads[0].start()


def stop_writer() -> None:
    """Stop the writer of this process if there is one; ``start_writer`` starts another."""
    while _threads:
        _threads.pop().stop()
