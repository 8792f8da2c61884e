"""WebSockets as programs and browsers open them, for the tests."""

import json
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import count
from time import monotonic
from typing import Any
from urllib.parse import urlencode

import pytest
from django.conf import settings
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.web.site import Site

TIMEOUT_SECONDS = 60


class Visitor:
    """A WebSocket of a site: it sends requests, and keeps other frames that arrive."""

    def __init__(
        self, site: Site, *, cookie: str = "", token: str = "", origin: str | None = "",
        path: str = "/ws/node/", headers: Mapping[str, str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.cookie = cookie
        headers = dict(headers or {})
        if cookie:
            headers["Cookie"] = f"{settings.SESSION_COOKIE_NAME}={cookie}"
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._stack = ExitStack()
        opening = connect(
            site.ws_url + path,
            origin=site.url if origin == "" and not token else origin or None,
            additional_headers=headers, compression=None, proxy=None,
            open_timeout=TIMEOUT_SECONDS, **{"max_size": None, **options},
        )  # fmt: skip
        self.connection: ClientConnection = self._stack.enter_context(opening)
        self._refs = count(1)
        self._waiting: deque[dict[str, Any]] = deque()

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request; return its answer without the ref."""
        ref = next(self._refs)
        self.connection.send(json.dumps({"op": op, **fields, "ref": ref}))
        return self.answer_to(ref)

    def answer_to(self, ref: object) -> dict[str, Any]:
        """Wait for the answer to a request; keep other frames."""
        while True:
            frame = self._receive()
            if "ref" not in frame:
                self._waiting.append(frame)
            else:
                assert frame.pop("ref") == ref, frame
                return frame

    def ok(self, op: str, **fields: Any) -> dict[str, Any]:
        answer = self.call(op, **fields)
        assert answer["Err"] == "0", answer
        return answer

    def error(self, op: str, **fields: Any) -> tuple[int, str]:
        answer = self.call(op, **fields)
        assert answer["Err"] != "0", answer
        return int(answer["Err"]), answer["Errstr"]

    def frame(self) -> dict[str, Any]:
        """Return the next frame that is not an answer."""
        if self._waiting:
            return self._waiting.popleft()
        frame = self._receive()
        assert "ref" not in frame, frame
        return frame

    def _next(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a frame; skip earlier ones."""
        while not is_wanted(frame := self.frame()):
            pass
        return frame

    def message(self) -> dict[str, Any]:
        return self._next(lambda frame: frame["Type"] != "Sys")

    def refusal(self) -> dict[str, Any]:
        return self._next(lambda frame: "Err" in frame)

    def event(self, name: str) -> dict[str, Any]:
        return self._next(lambda frame: frame.get("Evt") == name)

    def closed(self) -> tuple[int | None, str | None]:
        """Read until the connection ends; return its code and reason."""
        with suppress(ConnectionClosed):
            while True:
                self.connection.recv(timeout=TIMEOUT_SECONDS)
        return self.connection.close_code, self.connection.close_reason

    def close(self, code: int = 1000) -> None:
        self.connection.close(code)
        self._stack.close()

    def break_off(self) -> None:
        self.connection.socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> dict[str, Any]:
        return json.loads(self.connection.recv(timeout=TIMEOUT_SECONDS))


# Opens a WebSocket, as the fixtures `connect` and `enter` do.
Enter = Callable[..., Visitor]


class Watcher:
    """The monitor's WebSocket, of the list or of one topic."""

    def __init__(
        self, site: Site, cookie: str = "", topic: str | None = None, **given: Any
    ) -> None:
        query = f"?{urlencode({'topic': topic})}" if topic is not None else ""
        self.visitor = Visitor(site, cookie=cookie, path=f"/ws/monitor/{query}", **given)
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
        frame = json.loads(self.visitor.connection.recv(timeout=TIMEOUT_SECONDS))
        if echo:
            self.ask(op="echo", n=frame["n"])
        if frame["op"] == "snapshot":
            self.topics, self.topic, self.tail, self.events = {}, {}, [], []
        self.state = frame.get("state", self.state)
        self.health = frame.get("health", self.health)
        for row in frame.get("topics", ()):
            self.topics[row["topic"]] = row
        if "list" in frame:
            self.topics = {n: row for n, row in self.topics.items() if n in frame["list"]["names"]}
        self.topic.update(frame.get("topic", {}))
        self.tail += frame.get("topic", {}).get("tail", ())
        for event in frame.get("events", ()):
            words = (event["event"], event["ident"], event["topic"])
            self.events.append(" ".join(word for word in words if word))
        self.frames.append(frame)
        return frame

    def until(self, is_so: "Callable[[Watcher], object]") -> "Watcher":
        deadline = monotonic() + TIMEOUT_SECONDS
        while not (self.frames and is_so(self)):
            self.read()
            assert monotonic() < deadline, f"never so; the last frame was {self.frames[-1]}"
        return self

    def live(self) -> "Watcher":
        return self.until(lambda w: w.state["is"] == "live")

    def refused(self) -> tuple[int | None, str | None]:
        """Expect that the server sends nothing and closes; return its code and reason."""
        with pytest.raises(ConnectionClosed):
            self.read()
        return self.visitor.closed()

    def closed(self) -> tuple[int, str]:
        return self.visitor.closed()

    def close(self) -> None:
        self.visitor.close()
