"""Status of queues: sizes, rates and backlogs; rates come from sampled counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from time import monotonic, time
from typing import Final

from psqlmessages.exchanges.store.stats import EXISTS, SIZES, size_limits
from psqlmessages.models.rules import database
from psqlmessages.monitor.listing import fetch, read_shared
from psqlmessages.monitor.queries import IS_HEARTBEAT

# Count at most this number of elements of each state: in the list, and on the page of one queue.
MAX_IN_LIST: Final = 1000
MAX_ON_PAGE: Final = 100_000

_COUNTERS_QUERY: Final = f"""
    SELECT psqlmessages_queue.id, psqlmessages_queue.name::text, psqlmessages_queue.is_paused,
        psqlmessages_queue.dead_letter_queue::text,
        psqlmessages_queue.awaited_until > statement_timestamp(),
        coalesce(c.puts, 0), coalesce(c.removed, 0), coalesce(c.handed_out, 0),
        coalesce(c.dead_letters, 0), coalesce(e.names[:5], '{{}}')
    FROM psqlmessages_queue
    LEFT JOIN (
        SELECT n.queue_id, sum(n.puts)::bigint AS puts,
            sum(n.gets + n.commits + n.dead_letters + n.removes)::bigint AS removed,
            sum(n.gets + n.reserves)::bigint AS handed_out,
            sum(n.dead_letters)::bigint AS dead_letters
        FROM psqlmessages_queuecount AS n GROUP BY n.queue_id
    ) AS c ON c.queue_id = psqlmessages_queue.id
    LEFT JOIN (
        SELECT x.source_queue, array_agg(x.name::text ORDER BY x.name) AS names
        FROM psqlmessages_exchange AS x
        WHERE x.source_namespace = %s AND x.is_running
          AND EXISTS (SELECT FROM psqlmessages_exchangecount AS c WHERE {IS_HEARTBEAT})
        GROUP BY x.source_queue
    ) AS e ON e.source_queue = psqlmessages_queue.name
    WHERE {EXISTS}
"""  # noqa: S608 - built from constants
_SIZES_QUERY: Final = f"""
    SELECT psqlmessages_queue.id, {SIZES}, (
        SELECT extract(epoch FROM statement_timestamp() - e.available_at)::float8
        FROM psqlmessages_element AS e
        WHERE e.queue_id = psqlmessages_queue.id AND e.available_at <= statement_timestamp()
          AND e.available_at >= (SELECT messages._get_scan_start(psqlmessages_queue.id))
        ORDER BY e.available_at, e.id + 0 LIMIT 1
    )
    FROM psqlmessages_queue WHERE psqlmessages_queue.id = ANY (%s)
"""  # noqa: S608 - built from constants

# A rate is the mean of about this time.
_WINDOW_SECONDS: Final = 10.0
# Graphs have a value for each of the last 60 buckets of ten seconds.
BUCKET_SECONDS: Final = 10
BUCKETS: Final = 60


@dataclass(slots=True)
class MonitoredQueue:
    """One queue. Rates are per second, and None until there are two samples.

    :func:`add_sizes` sets the fields from ``available`` on. Elements of each state are counted up
    to ``limit`` + 1, which means more than ``limit``. ``oldest``: seconds that the first available
    element has waited. ``exchanges``: up to five running exchanges that take from this queue.

    Counters, since the queue was created: ``puts``, ``removed`` (elements that left the queue for
    any reason), ``handed_out`` (elements popped or reserved) and ``dead_letters``.
    """

    id: int
    name: str
    is_paused: bool
    dead_letter_queue: str
    is_awaited: bool
    puts: int
    removed: int
    handed_out: int
    dead_letters: int
    exchanges: Sequence[str]
    is_dead_letter_queue: bool = False
    rate_in: float | None = None
    rate_out: float | None = None
    is_taking: bool = False
    available: int = 0
    scheduled: int = 0
    reserved: int = 0
    limit: int = 0
    oldest: float | None = None
    graph: list[int | None] = field(default_factory=list)

    @property
    def backlog(self) -> int:
        """The number of elements of any state, from the counters."""
        return max(0, self.puts - self.removed)

    @property
    def elements(self) -> int:
        """The number of elements; an estimate if ``is_estimate``."""
        listed = self.available + self.scheduled + self.reserved
        return max(listed, self.backlog) if self.is_estimate else listed

    @property
    def is_estimate(self) -> bool:
        """Whether a state has more than ``limit`` elements."""
        return max(self.available, self.scheduled, self.reserved) > self.limit

    @property
    def lacks_consumer(self) -> bool:
        """Whether the queue has elements but no known consumer; false for dead-letter queues."""
        has_consumer = self.is_taking or self.is_awaited or bool(self.exchanges)
        return self.backlog > 0 and not has_consumer and not self.is_dead_letter_queue


def read_queues() -> list[MonitoredQueue]:
    """Read all queues with their counters and rates; a result is shared for one second."""
    return read_shared("queues", _read_queues)


def _read_queues() -> list[MonitoredQueue]:
    rows = fetch(_COUNTERS_QUERY, [database()])
    queues = [MonitoredQueue(*row) for row in rows]
    dead_letter_queues = {queue.dead_letter_queue for queue in queues}
    for queue in queues:
        queue.is_dead_letter_queue = queue.name in dead_letter_queues
    _samples.add(queues)
    return queues


def read_queue(key: int) -> MonitoredQueue | None:
    """Read one queue with its sizes up to MAX_ON_PAGE; None if it no longer exists."""
    queues = [queue for queue in read_queues() if queue.id == key]
    add_sizes(queues, MAX_ON_PAGE)
    return queues[0] if queues else None


def add_sizes(queues: Sequence[MonitoredQueue], limit: int) -> None:
    """Read the sizes of some queues, and their graphs."""
    parameters = [*size_limits(limit), [queue.id for queue in queues]]
    rows = {row[0]: row[1:] for row in fetch(_SIZES_QUERY, parameters)}
    for queue in queues:
        sizes, queue.oldest = rows.get(queue.id, ((0, 0, 0), None))
        queue.available, queue.scheduled, queue.reserved = sizes
        queue.limit = limit
        # The counters may have lost counts: shift the graph, so that it ends at the present number.
        correction = 0 if queue.is_estimate else queue.elements - (queue.puts - queue.removed)
        queue.graph = [
            None if value is None else max(0, value[0] - value[1] + correction)
            for value in _samples.history(queue.id)
        ]


def read_rates(queue: int) -> list[list[float | None]]:
    """Return the rates in and the rates out of a queue by bucket; None if a rate is unknown."""
    values = list(_samples.history(queue))
    return [
        [
            None
            if first is None or last is None
            else max(0, last[position] - first[position]) / BUCKET_SECONDS
            for first, last in pairwise(values)
        ]
        for position in (0, 1)
    ]


class CounterSamples:
    """Counters of queues in the last 10 s and the last ten minutes, read while pages are open.

    The history of a queue has entries only for the buckets in which its counters changed, so idle
    queues need little memory.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._recent: deque[tuple[float, dict[int, tuple[int, int, int]]]] = deque()
        self._buckets: deque[int] = deque(maxlen=BUCKETS)
        self._changes: dict[int, deque[tuple[int, int, int]]] = {}

    def add(self, queues: Sequence[MonitoredQueue]) -> None:
        """Add the counters that were just read, and set the rates of the queues."""
        now, bucket = monotonic(), int(time()) // BUCKET_SECONDS
        with self._lock:
            while len(self._recent) > 1 and self._recent[1][0] <= now - _WINDOW_SECONDS:
                self._recent.popleft()
            # After a pause without viewers, older samples say nothing about the present rate.
            if self._recent and self._recent[-1][0] < now - 2 * _WINDOW_SECONDS:
                self._recent.clear()
            self._set_rates(queues, now)
            counters = {queue.id: (queue.puts, queue.removed, queue.handed_out) for queue in queues}
            self._recent.append((now, counters))
            if not self._buckets or self._buckets[-1] != bucket:
                self._buckets.append(bucket)
            self._add_changes(queues, bucket)

    def _set_rates(self, queues: Sequence[MonitoredQueue], now: float) -> None:
        if not self._recent:
            return
        began, before = self._recent[0]
        seconds = now - began
        for queue in queues:
            puts, removed, handed_out = before.get(queue.id, (0, 0, 0))
            # The counters begin again if a queue was removed and created again.
            if seconds > 0 and puts <= queue.puts and removed <= queue.removed:
                queue.rate_in = (queue.puts - puts) / seconds
                queue.rate_out = (queue.removed - removed) / seconds
                queue.is_taking = queue.handed_out > handed_out

    def _add_changes(self, queues: Sequence[MonitoredQueue], bucket: int) -> None:
        for queue in queues:
            changes = self._changes.setdefault(queue.id, deque(maxlen=BUCKETS + 1))
            if changes and (queue.puts < changes[-1][1] or queue.removed < changes[-1][2]):
                changes.clear()
            if changes and changes[-1][1:] == (queue.puts, queue.removed):
                continue
            if changes and changes[-1][0] == bucket:
                changes.pop()
            changes.append((bucket, queue.puts, queue.removed))
        if len(self._changes) > 2 * len(queues) + 100:
            known = {queue.id for queue in queues}
            self._changes = {key: value for key, value in self._changes.items() if key in known}

    def history(self, queue: int) -> Iterator[tuple[int, int] | None]:
        """Yield ``puts`` and ``removed`` at the end of each bucket; None if it was not read."""
        with self._lock:
            changes = deque(self._changes.get(queue, ()))
            seen = set(self._buckets)
        last = max(seen, default=0)
        current: tuple[int, int] | None = None
        for bucket in range(last - BUCKETS + 1, last + 1):
            while changes and changes[0][0] <= bucket:
                current = changes.popleft()[1:]
            yield current if bucket in seen else None


_samples: Final = CounterSamples()


# Graphs

_HEIGHT: Final = 20


def polylines(values: Sequence[float | None], largest: float) -> list[str]:
    """Return the points of lines for an SVG of height 20: a line for each run of known values."""
    lines: list[list[str]] = [[]]
    for x, value in enumerate(values):
        if value is None:
            lines.append([])
        else:
            y = _HEIGHT - 1.5 - value / max(largest, 1e-9) * (_HEIGHT - 3)
            lines[-1].append(f"{x},{y:.1f}")
    # A line with a single point is invisible.
    return [" ".join(line if len(line) > 1 else line * 2) for line in lines if line]
