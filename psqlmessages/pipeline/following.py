"""Following: a stream's subscriptions, which keep what it has not read yet, and its horizons."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from psqlmessages.pipeline import horizons
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.horizons import Horizons, Topic
from psqlmessages.pipeline.offsets import Offset, check_cluster, check_not_put_back, gone
from psqlmessages.pipeline.options import EARLIEST, LATEST, SourceOptions
from psqlmessages.pipeline.pinging import Pinging
from psqlmessages.pipeline.waiting import logger

_SUBSCRIBE: Final = "SELECT messages.subscribe_from(%s, %s::text[], %s::bigint[], %s::int)"
_SINCE: Final = """
    SELECT min(id) FILTER (WHERE published_at >= %s), max(id), count(*)
    FROM messages.read_stream(%s, %s, %s, %s, %s, false)
"""
_SINCE_ROWS: Final = 100_000


class Following:
    """The driver's side of a stream of topics: where it stands, told to the database.

    Lives in one worker for as long as the query runs. From its first call on it is a subscription
    at the last position that was committed, pinged three times within the timeout at least.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._database = Database(options.address)
        self._lock = threading.RLock()
        self._told: dict[str, int] = {}
        self._lost: dict[str, int] = {}
        self._pinging = Pinging(self._ping, options.timeout)

    def start(self) -> Offset:
        """Return where a new query begins, from now on subscribed to."""
        found = self._ask()
        positions = {topic.name: self._start_of(topic) for topic in found.topics.values()}
        offset = Offset(found.cluster, positions)
        self._take_up(offset, found)
        return offset

    def horizons(self, start: Offset, max_rows: int | None = None) -> Horizons:
        """Return how far topics can be read after an offset that is committed."""
        found = self._ask(start.positions, max_rows)
        check_cluster(start.cluster, found.cluster)
        if not isinstance(self._options.starting, int):
            check_not_put_back(start, {t.name: t.last for t in found.topics.values()})
        self._take_up(start, found)
        return found

    def position(self, offset: Offset, topic: Topic) -> int:
        """Return where an offset stands in a topic, be it one that came only now."""
        return offset.positions.get(topic.name, self._told.get(topic.name, topic.removed))

    def committed(self, offset: Offset) -> None:
        """Move the subscriptions on: what is before an offset is needed no more."""
        with self._lock:
            self._subscribe(
                {
                    topic: position
                    for topic, position in offset.positions.items()
                    if self._told.get(topic, position) != position
                }
            )

    def close(self) -> None:
        """Disconnect; the subscriptions stay for the timeout."""
        self._pinging.stop()
        self._database.close()

    def all_horizons(self) -> Horizons:
        """Return how far topics can be read now."""
        return self._ask()

    def _ask(self, after: Mapping[str, int] | None = None, max_rows: int | None = None) -> Horizons:
        options = self._options
        return horizons.ask(self._database, options.client, options.topics, after, max_rows)

    def _start_of(self, topic: Topic) -> int:
        starting = self._options.starting
        if starting == EARLIEST:
            return topic.removed
        newest = max(topic.horizon, topic.removed)
        if starting == LATEST:
            return newest
        if isinstance(starting, datetime):
            return self._before(starting, topic, newest)
        return max(int(starting) - 1, 0)

    def _before(self, moment: datetime, topic: Topic, newest: int) -> int:
        """Return the id before the first that was published at a moment or later."""
        position, client = topic.removed, self._options.client
        while True:
            ((first, last, count),) = self._database.rows(
                _SINCE, (moment, client, topic.name, position, newest, _SINCE_ROWS)
            )
            if first is not None:
                return int(first) - 1
            if count < _SINCE_ROWS:
                return newest
            position = int(last)

    def _take_up(self, offset: Offset, found: Horizons) -> None:
        """Subscribe to what the topics are known to be, where that is not so yet."""
        positions = {t.name: self.position(offset, t) for t in found.topics.values()}
        self._check(positions, ((t.name, t.removed) for t in found.topics.values()))
        with self._lock:
            # One that is gone cannot be subscribed to, and its subscription ends by itself.
            self._told = {t: p for t, p in self._told.items() if t in positions}
            self._subscribe({t: p for t, p in positions.items() if self._told.get(t) != p})
        self._pinging.start()

    def _ping(self) -> None:
        with self._lock:
            # One that a pattern meant, and that is gone, must not keep the others from being told.
            found = self._ask().topics
            self._subscribe({t: p for t, p in self._told.items() if t in found})

    def _subscribe(self, positions: Mapping[str, int]) -> None:
        if not positions:
            return
        options = self._options
        names, ids = list(positions), list(positions.values())
        answer = self._database.ask(_SUBSCRIBE, (options.client, names, ids, options.timeout))
        self._told.update(positions)
        self._check(positions, ((m["Topic"], int(m["Removed"])) for m in answer["Missed"]))

    def _check(self, positions: Mapping[str, int], removed: Iterable[tuple[str, int]]) -> None:
        """Raise MessagesGone, or log it, where what lies after a position is kept no more."""
        for topic, last in removed:
            if last <= positions[topic] or last <= self._lost.get(topic, 0):
                continue
            error = gone(topic, positions[topic], last, self._options.timeout)
            if self._options.fail_on_data_loss:
                raise error
            self._lost[topic] = last
            logger.warning("%s", error.text)
