"""Status of streams: their subscriptions, and samples of the number of unread messages."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from time import time
from typing import Final

from psqlmessages.monitor.formats import MAX_COUNTED
from psqlmessages.monitor.listing import PAGE_SIZE, fetch
from psqlmessages.monitor.queries import OLDEST_UNREAD, UNREAD_COUNT
from psqlmessages.monitor.queue_status import BUCKET_SECONDS, BUCKETS, polylines

# A waiting reader of the Python client reads at least every 30 s: see stream_poll_interval.
READ_RECENTLY_SECONDS: Final = 60

_STATE: Final = f"""CASE
    WHEN NOT messages._is_alive(s) THEN 'expired'
    WHEN s.pinged_at > statement_timestamp() - interval '{READ_RECENTLY_SECONDS} s' THEN 'alive'
    ELSE 'silent'
END"""
# Seconds since the oldest unread message was published; null if there is none.
_LAG: Final = f"extract(epoch FROM statement_timestamp() - {OLDEST_UNREAD})::float8"
_FROM: Final = """
    FROM psqlmessages_subscription AS s
    LEFT JOIN psqlmessages_topic AS t ON t.name = s.topic
    WHERE (%(topic)s::text IS NULL OR s.topic = %(topic)s)
      AND (%(node)s::text IS NULL OR s.ident = %(node)s)
      AND (%(search)s = '' OR strpos(lower(s.ident), lower(%(search)s)) > 0
          OR strpos(lower(s.topic), lower(%(search)s)) > 0)
"""
# The sort expressions. An expired subscription has no lag: no messages are stored for it.
ORDERS: Final[Mapping[str, str]] = {
    "node": "s.ident",
    "stream": "s.topic",
    "lag": f"CASE WHEN s.is_alive THEN coalesce({_LAG}, -1) ELSE -2 END",
    "read": "s.pinged_at",
    "expires": "s.pinged_at + make_interval(secs => s.timeout)",
}


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """One subscription. Ages are in seconds.

    ``state``: alive (read recently), silent or expired. ``unread``: the number of unread messages,
    counted up to MAX_COUNTED + 1. ``lag``: the age of the oldest unread message, None if there is
    none. ``unread`` and ``lag`` are None if the subscription has expired. ``is_recovered``: false
    after the subscription has missed messages, until its node connects again.
    """

    id: int
    node: str
    topic: str
    position: int
    timeout: int
    last_read: datetime
    read_age: float
    expires: datetime
    is_recovered: bool
    state: str
    lag: float | None
    unread: int | None

    @property
    def lines(self) -> list[str]:
        """The graph of the unread messages of the last ten minutes, for an SVG."""
        return polylines(_samples.values(self.id), self.largest)

    @property
    def largest(self) -> int:
        """The largest value of the graph."""
        values = (value for value in _samples.values(self.id) if value is not None)
        return max(values, default=0)


def read_subscriptions(
    *,
    topic: str | None = None,
    node: str | None = None,
    search: str = "",
    state: str = "",
    order: str = "lag",
    is_descending: bool = True,
    offset: int = 0,
) -> tuple[list[SubscriptionStatus], int]:
    """Read a page of subscriptions; also return the number on all pages, or 0 if the page is empty.

    Adds each number of unread messages to the samples of the graphs.
    """
    direction = "DESC" if is_descending else "ASC"
    condition = f"AND ({_STATE}) = %(state)s" if state else ""
    query = f"""
        WITH page AS MATERIALIZED (
            SELECT s.id, count(*) OVER () AS total,
                row_number() OVER (ORDER BY s.key {direction}, s.topic, s.ident) AS number
            FROM (
                SELECT s.id, s.topic, s.ident, {ORDERS[order]} AS key {_FROM} {condition}
            ) AS s
            ORDER BY number LIMIT %(size)s OFFSET %(offset)s
        )
        SELECT p.total, s.id, s.ident::text, s.topic::text, s.position, s.timeout, s.pinged_at,
            extract(epoch FROM statement_timestamp() - s.pinged_at)::float8,
            s.pinged_at + make_interval(secs => s.timeout), s.is_recovered, state.name,
            CASE WHEN state.name <> 'expired' THEN {_LAG} END,
            CASE WHEN state.name <> 'expired' THEN {UNREAD_COUNT} END
        FROM page AS p
        JOIN psqlmessages_subscription AS s ON s.id = p.id
        LEFT JOIN psqlmessages_topic AS t ON t.name = s.topic
        CROSS JOIN LATERAL (SELECT {_STATE} OFFSET 0) AS state (name)
        ORDER BY p.number
    """  # noqa: S608 - built from constants
    parameters = {
        "topic": topic, "node": node, "search": search, "state": state,
        "size": PAGE_SIZE, "offset": offset,
    }  # fmt: skip
    rows = fetch(query, parameters)
    found = [SubscriptionStatus(*row[1:]) for row in rows]
    _samples.add(found)
    return found, rows[0][0] if rows else 0


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream. ``oldest``, ``newest``: publication times of stored messages; None without any.

    ``retention``: seconds that each message is stored, even without a subscription.
    """

    retention: int
    oldest: datetime | None
    newest: datetime | None


def read_stream_status(topic: str) -> StreamStatus | None:
    """Read the status of a stream; None if there is no such topic."""
    at = """(
        SELECT m.published_at FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = t.id ORDER BY m.id {} LIMIT 1
    )"""
    query = f"""
        SELECT t.retention, {at.format("ASC")}, {at.format("DESC")}
        FROM psqlmessages_topic AS t WHERE t.name = %s
    """  # noqa: S608 - built from constants
    rows = fetch(query, [topic])
    return StreamStatus(*rows[0]) if rows else None


# Positions


def count_between(topic: str, after: int, up_to: int) -> int:
    """Count the stored messages after one position and up to another, up to MAX_COUNTED + 1."""
    query = f"""
        SELECT count(*) FROM (
            SELECT FROM psqlmessages_topic AS t
            JOIN psqlmessages_streammessage AS m ON m.topic_id = t.id
            WHERE t.name = %s AND m.id > %s AND m.id <= %s LIMIT {MAX_COUNTED + 1}
        ) AS counted
    """  # noqa: S608 - built from constants
    return int(fetch(query, [topic, after, up_to])[0][0])


def first_position(topic: str) -> int:
    """Return the position before the first stored message, or else the last position."""
    query = """
        SELECT m.id - 1 FROM psqlmessages_topic AS t
        JOIN psqlmessages_streammessage AS m ON m.topic_id = t.id
        WHERE t.name = %s ORDER BY m.id LIMIT 1
    """
    rows = fetch(query, [topic])
    return int(rows[0][0]) if rows else last_position(topic)


def last_position(topic: str) -> int:
    """Return the watermark of a stream; 0 if there is no such topic."""
    query = "SELECT messages._watermark(t.id) FROM psqlmessages_topic AS t WHERE t.name = %s"
    rows = fetch(query, [topic])
    return int(rows[0][0]) if rows else 0


def position_at(topic: str, at: datetime) -> int:
    """Return the position before the first message since a time, or else the last position."""
    query = """
        SELECT m.id, m.published_at < %s FROM psqlmessages_topic AS t
        JOIN psqlmessages_streammessage AS m ON m.topic_id = t.id
        WHERE t.name = %s AND m.id > %s ORDER BY m.id LIMIT 1
    """
    # There is no index by time, but later messages have higher ids.
    low, high = first_position(topic), last_position(topic)
    while low < high:
        middle = (low + high) // 2
        rows = fetch(query, [at, topic, middle])
        if rows and rows[0][1]:
            low = min(int(rows[0][0]), high)
        else:
            high = middle
    return low


# Samples and graphs

# The maximum number of subscriptions with samples.
_MAX_SAMPLED: Final = 2000


class UnreadSamples:
    """Numbers of unread messages in the last ten minutes, as read while pages are open.

    Only the buckets in which this process has read a subscription have a value.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._samples: OrderedDict[int, deque[tuple[int, int]]] = OrderedDict()

    def add(self, subscriptions: Sequence[SubscriptionStatus]) -> None:
        """Add the numbers just read. A bucket keeps only its last number."""
        bucket = int(time()) // BUCKET_SECONDS
        with self._lock:
            for subscription in subscriptions:
                if subscription.unread is None:
                    continue
                samples = self._samples.setdefault(subscription.id, deque(maxlen=BUCKETS))
                self._samples.move_to_end(subscription.id)
                if samples and samples[-1][0] == bucket:
                    samples.pop()
                samples.append((bucket, subscription.unread))
            while len(self._samples) > _MAX_SAMPLED:
                self._samples.popitem(last=False)

    def values(self, subscription: int) -> list[int | None]:
        """Return the value of each bucket, oldest first; None for a bucket without a value."""
        last = int(time()) // BUCKET_SECONDS
        with self._lock:
            known = dict(self._samples.get(subscription, ()))
        return [known.get(bucket) for bucket in range(last - BUCKETS + 1, last + 1)]


_samples: Final = UnreadSamples()
