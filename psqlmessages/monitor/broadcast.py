"""Broadcast: sends each viewer a snapshot, then updates, and builds these frames."""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.monitor.history import HISTORY_SECONDS, RATE_SECONDS, MessageRecord, TopicHistory
from psqlmessages.monitor.json_views import to_json
from psqlmessages.monitor.queries import MAX_RULES
from psqlmessages.monitor.status import UNREACHABLE
from psqlmessages.monitor.topic_list import PAGE_SIZE, TopicPage, TopicQuery

if TYPE_CHECKING:
    from psqlmessages.monitor.observer import Observer
    from psqlmessages.monitor.viewer import Viewer

# Send an update at least this often: a page without updates shows that its connection is lost.
_HEARTBEAT_SECONDS: Final = 1.0
# If more rows of the topic list than this have changed, send them only once per second.
_MAX_ROWS_PER_TICK: Final = 200
# Each point of a sparkline is the message count of this many seconds.
BUCKET_SECONDS: Final = 10
_BUCKETS: Final = HISTORY_SECONDS // BUCKET_SECONDS
_MAX_NAMES_IN_ROW: Final = 3
_MAX_NAMES: Final = 200
# Frames contain only the beginning of a body.
BODY_BYTES: Final = 4096


class Broadcast:
    """Sends the changes since the last tick to all viewers; encodes them once for each page.

    A viewer that fell behind gets a snapshot instead.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._sent_at = 0.0
        # The highest number of the messages and events that were sent.
        self._sent_number = 0
        # The first second whose counts were not sent yet.
        self._first_unsent_second = int(time.time())
        # Changes of the topic list that were not sent yet.
        self._changed_topics: dict[str, TopicHistory] = {}
        # The viewed pages of the list, as they were sent.
        self._sent_pages: dict[TopicQuery, TopicPage] = {}
        self._sent_fields: dict[str, Any] = {}

    def send_snapshot(self, viewer: Viewer, now: float) -> None:
        """Send all data of the viewer's page, unless too many of its frames are unread.

        If the user's permissions were not checked recently, send only a status.
        """
        viewer.has_started = True
        if not viewer.check_ready():
            return
        if viewer.is_checked:
            viewer.send_frame("snapshot", *self._snapshot(viewer, now))
        else:
            viewer.send_status_only(is_unreachable=self._observer.status.name(now) == UNREACHABLE)

    def tick(self, now: float) -> None:
        """Send the changes to every viewer; without changes, an empty update once per second."""
        second = int(now)
        is_new_second = second != self._first_unsent_second
        self._collect_changed_topics(now, is_new_second=is_new_second)
        sends_rows = is_new_second or len(self._changed_topics) <= _MAX_ROWS_PER_TICK
        changes = self._common_changes(now)
        has_changes = (
            bool(changes)
            or (sends_rows and bool(self._changed_topics))
            or self._sent_pages != self._observer.pages
        )
        if not has_changes and now - self._sent_at < _HEARTBEAT_SECONDS:
            return
        common = to_json({"now": now, **changes})
        changed_topics = self._changed_topics if sends_rows else {}
        updates: dict[tuple[Any, ...], str] = {}
        for viewer in list(self._observer.viewers):
            if not viewer.has_started or not viewer.check_ready():
                continue
            if viewer.is_behind or not viewer.is_checked:
                self.send_snapshot(viewer, now)
                continue
            # Keys of the two kinds are never equal: a query has three fields.
            is_list = viewer.topic is None
            key = viewer.query if is_list else (viewer.topic, viewer.access.can_view_bodies)
            if key not in updates:
                updates[key] = self._encode_update(viewer, second, changed_topics)
            viewer.send_frame("update", common, updates[key])
        if sends_rows:
            self._changed_topics = {}
        self._sent_pages = dict(self._observer.pages)
        self._sent_at = now
        self._sent_number = self._observer.history.last_number
        self._first_unsent_second = second

    # Changes

    def _collect_changed_topics(self, now: float, *, is_new_second: bool) -> None:
        history = self._observer.history
        changed = history.take_changes()
        self._changed_topics.update((topic.name, topic) for topic in changed)
        if is_new_second:
            # Rates of recently active topics change even if no message arrives.
            since = now - RATE_SECONDS - 2
            active = {name: t for name, t in history.topics.items() if t.last_at >= since}
            self._changed_topics.update(active)

    def _common_changes(self, now: float) -> dict[str, Any]:
        """Collect the changes that every page shows: new events, status, health, topic count."""
        history, changes = self._observer.history, {}
        if events := [event for event in history.events if event.number > self._sent_number]:
            changes["events"] = [event._asdict() for event in events]
        for name, value in self._common_fields(now).items():
            if self._sent_fields.get(name) != value:
                self._sent_fields[name] = changes[name] = value
        return changes

    def _encode_update(
        self, viewer: Viewer, second: int, changed_topics: dict[str, TopicHistory]
    ) -> str:
        if viewer.topic is None:
            sent = self._sent_pages.get(viewer.query)
            return self._encode_list(viewer.query, second, sent, changed_topics)
        seconds = range(self._first_unsent_second, second)
        with_bodies = viewer.access.can_view_bodies
        return self._encode_topic(viewer.topic, with_bodies, second, self._sent_number, seconds)

    # Snapshots

    def _snapshot(self, viewer: Viewer, now: float) -> tuple[str, ...]:
        history, second = self._observer.history, int(now)
        common = to_json(
            {
                "now": now,
                **self._common_fields(now),
                "events": [event._asdict() for event in history.events],
                "may_see_bodies": viewer.access.can_view_bodies,
            }
        )
        if viewer.topic is None:
            return common, self._encode_list(viewer.query, second)
        return common, self._encode_topic(viewer.topic, viewer.access.can_view_bodies, second)

    def _common_fields(self, now: float) -> dict[str, Any]:
        observer = self._observer
        return {
            "state": observer.status.as_json(now),
            "health": observer.health and asdict(observer.health),
            "topic_count": observer.history.topic_count,
        }

    def _encode_list(
        self,
        query: TopicQuery,
        second: int,
        sent: TopicPage | None = None,
        changed_topics: Container[str] = (),
    ) -> str:
        """Encode a page of the topic list: the rows that changed, or are not in ``sent``."""
        topics, page = self._observer.history.topics, self._observer.pages.get(query)
        names = page.names if page else ()
        new = set(names).difference(sent.names if sent else ())
        # A row that is not new gets the last two points of the sparkline: the first of the two may
        # have been sent before its interval ended.
        rows = [
            topic_row(topics[name], second, _BUCKETS if name in new else 2)
            for name in names
            if name in topics and (name in new or name in changed_topics)
        ]
        contents: dict[str, Any] = {"topics": rows}
        if page is not None and page != sent:
            contents["list"] = {**query._asdict(), "size": PAGE_SIZE, **page._asdict()}
        return to_json(contents)

    def _encode_topic(
        self,
        name: str,
        with_bodies: bool,
        second: int,
        after: int = 0,
        seconds: range | None = None,
    ) -> str:
        topic = self._observer.history.topics.get(name) or TopicHistory(name, 0)
        details = topic_details(
            topic, second, with_bodies=with_bodies, after=after, seconds=seconds
        )
        # None if they could not be read.
        rules = self._observer.rules.get(name)
        details["rules"] = rules and [rule._asdict() for rule in rules[:MAX_RULES]]
        details["has_more_rules"] = len(rules or ()) > MAX_RULES
        return to_json({"topic": {**details, **topic_members(topic)}})


# Contents of frames


def topic_row(topic: TopicHistory, second: int, bucket_count: int) -> dict[str, Any]:
    """Describe a topic for the topic list, with the last points of its sparkline."""
    return {
        "topic": topic.name,
        **topic_totals(topic, second),
        **topic_members(topic, _MAX_NAMES_IN_ROW),
        "buckets": _buckets(topic, second // BUCKET_SECONDS, bucket_count),
    }


def topic_totals(topic: TopicHistory, second: int) -> dict[str, Any]:
    """Return a topic's totals since the monitor started, and its rates per second."""
    recent = topic.total_for_rate(second)
    return {
        "count": topic.count,
        "size": topic.size,
        "last": topic.last_at or None,
        "rate": recent.messages / RATE_SECONDS,
        "size_rate": recent.size / RATE_SECONDS,
    }


def _buckets(topic: TopicHistory, newest: int, count: int) -> list[int]:
    """Return the number of the first bucket, then all message counts; [] if all are 0."""
    first = newest - count + 1
    if topic.per_second is None or topic.last_at < first * BUCKET_SECONDS:
        return []
    return [first, *topic.per_second.intervals(first * BUCKET_SECONDS, BUCKET_SECONDS, count)]


def topic_details(
    topic: TopicHistory,
    second: int,
    *,
    with_bodies: bool,
    after: int = 0,
    seconds: range | None = None,
) -> dict[str, Any]:
    """Describe a topic for its own page, with its last messages and its counts per second.

    Includes messages numbered above ``after``, and counts of ``seconds``; by default all.
    """
    if seconds is None:
        seconds = range(second - HISTORY_SECONDS + 1, second)
    ring = topic.per_second
    counts = [(at, *ring.total(at, at)) for at in seconds] if ring is not None else []
    return {
        "name": topic.name,
        "is_there": topic.exists,
        **topic_totals(topic, second),
        "seconds": [(at, count, size) for at, count, size in counts if count],
        "tail": [
            message_json(message, with_body=with_bodies)
            for message in topic.tail
            if message.number > after
        ],
    }


def topic_members(topic: TopicHistory, limit: int = _MAX_NAMES) -> dict[str, Any]:
    """Return the first ``limit`` senders and listeners of a topic, and how many there are."""
    return {
        "senders": sorted(topic.senders)[:limit],
        "sender_count": len(topic.senders),
        "listeners": sorted(topic.listeners)[:limit],
        "listener_count": len(topic.listeners),
    }


def message_json(message: MessageRecord, *, with_body: bool) -> dict[str, Any]:
    """Describe a message. Omits its reply token: whoever knows the token can answer the message."""
    content = {
        "number": message.number,
        "at": message.at,
        "from": message.sender,
        "size": message.size,
        "enc": message.enc,
        "wants_answer": message.wants_answer,
        "is_large": message.is_large,
    }
    if with_body and message.body is not None:
        start = message.body.encode(errors="replace")[:BODY_BYTES].decode(errors="ignore")
        content["body"] = start
        content["is_cut"] = message.is_cut or len(start) < len(message.body)
    return content
