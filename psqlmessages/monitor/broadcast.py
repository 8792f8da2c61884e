"""Broadcast: one update per tick, encoded once for all viewers."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.monitor import frames
from psqlmessages.monitor.history import KEPT, RATE_SECONDS, TOPICS, TopicHistory
from psqlmessages.monitor.json_views import to_json
from psqlmessages.monitor.status import AWAY

if TYPE_CHECKING:
    from psqlmessages.monitor.observer import Observer
    from psqlmessages.monitor.viewer import Viewer

# Send an update at least this often, so that a page can tell a quiet system from a lost connection.
_BEAT_SECONDS: Final = 1.0
# Send more changed rows than this only once per second.
_FEW_ROWS: Final = 200
_BUCKETS: Final = KEPT // frames.BUCKET_SECONDS

# A topic that a viewer shows, and whether with message bodies.
Look = tuple[str, bool]


class Broadcast:
    """Sends the changes since the last tick. Viewers that fell behind get a snapshot instead."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._sent_at = 0.0
        # The last message or event number sent to the viewers, and the first second not yet sent.
        self._number = 0
        self._second = int(time.time())
        self._rows: dict[str, TopicHistory] = {}
        self._gone: set[str] = set()
        self._sent: dict[str, Any] = {}

    def greet(self, viewer: Viewer, now: float) -> None:
        """Send a viewer a snapshot of its page."""
        viewer.is_greeted = True
        if not viewer.is_ready():
            return
        if viewer.is_trusted:
            viewer.offer("snapshot", *self._snapshot(viewer, now))
        else:
            viewer.withhold(is_away=self._observer.status.name(now) == AWAY)

    def tick(self, now: float) -> None:
        """Send every viewer the changes; without changes, a heartbeat once per second."""
        second = int(now)
        self._collect_rows(now, is_new_second=second != self._second)
        with_rows = second != self._second or len(self._rows) <= _FEW_ROWS
        changes = self._changes(now)
        if not changes and not (with_rows and self._rows) and now - self._sent_at < _BEAT_SECONDS:
            return
        common = to_json({"now": now, **changes})
        rows = to_json(self._take_rows(second)) if with_rows else "{}"
        looks = self._looks(second)
        for viewer in list(self._observer.viewers):
            if not viewer.is_greeted or not viewer.is_ready():
                continue
            if viewer.is_behind or not viewer.is_trusted:
                self.greet(viewer, now)
            elif viewer.topic is None:
                viewer.offer("update", common, rows)
            else:
                viewer.offer("update", common, looks[viewer.topic, viewer.permit.bodies])
        self._sent_at, self._number, self._second = now, self._observer.history.number, second

    # Changes

    def _collect_rows(self, now: float, *, is_new_second: bool) -> None:
        history = self._observer.history
        changed, gone = history.take_changes()
        self._rows.update((topic.name, topic) for topic in changed)
        self._gone.update(gone)
        if is_new_second:
            # Rates fall even if no message arrives.
            falling = history.busy_since(now - RATE_SECONDS - 2)
            self._rows.update((topic.name, topic) for topic in falling)

    def _take_rows(self, second: int) -> dict[str, Any]:
        there = self._observer.history.topics
        rows = [topic for name, topic in self._rows.items() if there.get(name) is topic]
        gone = sorted(name for name in self._gone if name not in there)
        self._rows, self._gone = {}, set()
        return {"topics": [frames.row(topic, second, 2) for topic in rows], "gone": gone}

    def _changes(self, now: float) -> dict[str, Any]:
        """Collect the parts that have changed and concern every viewer."""
        history, changes = self._observer.history, {}
        if events := [event for event in history.events if event.number > self._number]:
            changes["events"] = [event._asdict() for event in events]
        for name, value in self._parts(now).items():
            if self._sent.get(name) != value:
                self._sent[name] = changes[name] = value
        return changes

    def _looks(self, second: int) -> dict[Look, str]:
        """Encode the changes of each topic that a viewer shows."""
        seconds = range(self._second, second)
        looks = {(v.topic, v.permit.bodies) for v in self._observer.viewers if v.topic}
        return {
            (name, with_bodies): to_json(
                {
                    "topic": frames.topic_frame(
                        self._topic(name),
                        second,
                        with_bodies=with_bodies,
                        after=self._number,
                        seconds=seconds,
                    )
                    | self._members(name)
                }
            )
            for name, with_bodies in looks
        }

    # Snapshots

    def _snapshot(self, viewer: Viewer, now: float) -> tuple[str, ...]:
        history, second = self._observer.history, int(now)
        common = to_json(
            {
                "now": now,
                **self._parts(now),
                "events": [event._asdict() for event in history.events],
                "limit": TOPICS,
                "may_see_bodies": viewer.permit.bodies,
            }
        )
        if viewer.topic is None:
            rows = [frames.row(topic, second, _BUCKETS) for topic in history.topics.values()]
            return common, to_json({"topics": rows})
        topic, with_bodies = self._topic(viewer.topic), viewer.permit.bodies
        shown = frames.topic_frame(topic, second, with_bodies=with_bodies)
        return common, to_json({"topic": shown | self._members(viewer.topic)})

    def _parts(self, now: float) -> dict[str, Any]:
        observer = self._observer
        return {
            "state": observer.status.as_json(now),
            "health": observer.health and asdict(observer.health),
            "topics_there": observer.history.topics_there,
        }

    def _members(self, name: str) -> dict[str, Any]:
        rules = self._observer.rules.get(name)
        return frames.members(self._topic(name)) | frames.authorized(rules)

    def _topic(self, name: str) -> TopicHistory:
        return self._observer.history.topics.get(name) or TopicHistory(name, 0)
