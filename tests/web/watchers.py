"""A page of the monitor as a program plays it: it echoes what it reads, and keeps what it knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic
from typing import Any
from urllib.parse import urlencode

import pytest
from websockets.exceptions import ConnectionClosed

from tests.web.site import Site
from tests.web.sockets import Visitor

SECONDS = 60


class Watcher:
    """The monitor's WebSocket, of the list or of one topic."""

    def __init__(
        self, site: Site, cookie: str = "", topic: str | None = None, **options: Any
    ) -> None:
        query = f"?{urlencode({'topic': topic})}" if topic is not None else ""
        self.visitor = Visitor(site, cookie=cookie, path=f"/ws/monitor/{query}", **options)
        self.frames: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.topics: dict[str, dict[str, Any]] = {}
        self.topic: dict[str, Any] = {}
        self.tail: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.health: dict[str, Any] | None = None

    def ask(self, **request: Any) -> None:
        self.visitor.connection.send(json.dumps(request))

    def read(self, *, echo: bool = True) -> dict[str, Any]:
        frame = json.loads(self.visitor.connection.recv(timeout=SECONDS))
        if echo:
            self.ask(op="echo", n=frame["n"])
        if frame["op"] == "snapshot":
            self.topics, self.topic, self.tail, self.events = {}, {}, [], []
        self.state = frame.get("state", self.state)
        self.health = frame.get("health", self.health)
        for row in frame.get("topics", ()):
            self.topics[row["topic"]] = row
        for name in frame.get("gone", ()):
            self.topics.pop(name, None)
        self.topic.update(frame.get("topic", {}))
        self.tail += frame.get("topic", {}).get("tail", ())
        for event in frame.get("events", ()):
            words = (event["event"], event["ident"], event["topic"])
            self.events.append(" ".join(word for word in words if word))
        self.frames.append(frame)
        return frame

    def until(self, is_so: Callable[[Watcher], object]) -> Watcher:
        deadline = monotonic() + SECONDS
        while monotonic() < deadline:
            if self.frames and is_so(self):
                return self
            self.read()
        raise AssertionError(f"never so; the last frame was {self.frames[-1]}")

    def live(self) -> Watcher:
        return self.until(lambda w: w.state["is"] == "live")

    def refused(self) -> tuple[int, str]:
        """Wait until the server closes, before anything else comes: its code and reason."""
        with pytest.raises(ConnectionClosed) as ended:
            self.read()
        assert ended.value.rcvd is not None
        return ended.value.rcvd.code, ended.value.rcvd.reason

    def closed(self) -> tuple[int, str]:
        return self.visitor.closed()

    def close(self) -> None:
        self.visitor.close()
