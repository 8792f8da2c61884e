"""Callers: programs that call the API over HTTP, each answer with its headers."""

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlencode

from psqlmessages.rest.tokens import token_for
from tests.web.site import Site

PATIENCE = 60


@dataclass(frozen=True)
class Answer:
    """A response: `headers` by lower-case names."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def detail(self) -> str:
        return self.json["detail"]

    @property
    def lease(self) -> str:
        return self.headers["x-ks-lease"]


class Caller:
    """Calls as a user by a token, or as whoever `headers` say."""

    def __init__(self, site: Site, headers: Mapping[str, str]) -> None:
        self.site = site
        self.headers = dict(headers)
        self._threads = ThreadPoolExecutor(32)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> Answer:
        """Call; `path` begins behind /api/, and is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.site.port, timeout=PATIENCE)
        try:
            address = f"/api/{path}" + (f"?{urlencode(query)}" if query else "")
            connection.request(method, address, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def begin(self, method: str, path: str, **given: Any) -> "Future[Answer]":
        """Call in a thread: for a call that waits."""
        return self._threads.submit(self.call, method, path, **given)

    def push(self, queue: str, body: bytes = b"x", content_type: str = "", **query: Any) -> Answer:
        """Push to a queue of the namespace default."""
        headers = {"Content-Type": content_type} if content_type else {}
        return self.call("POST", at(queue), body, headers, **query)

    def take(self, queue: str, **query: Any) -> Answer:
        """Take from a queue of the namespace default."""
        return self.call("GET", at(queue), **query)

    def close(self) -> None:
        """Wait for what was begun."""
        self._threads.shutdown()


def at(queue: str, *more: str) -> str:
    """Write the path of a queue of the namespace default."""
    return "/".join(["q/default", quote(queue, safe=""), *more])


def bearer(site: Site, username: str, *idents: str, **fields: Any) -> dict[str, str]:
    """Make a user who may be these nodes; return the header with the user's token."""
    user = site.user(username, idents=idents, **fields)
    return {"Authorization": f"Bearer {token_for(user, timedelta(hours=1))}"}


class Connection:
    """A connection of asyncio's that asks once, for crowds."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def asking(cls, site: Site, path: str, headers: Mapping[str, str]) -> "Connection":
        """Connect, and send a GET."""
        connection = cls(*await asyncio.open_connection("127.0.0.1", site.port))
        lines = [f"GET /api/{path} HTTP/1.0", "Host: 127.0.0.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        connection._writer.write("\r\n".join([*lines, "", ""]).encode())
        await connection._writer.drain()
        return connection

    async def answer(self) -> tuple[int, bytes]:
        """Wait for the answer: status and body."""
        head, _, body = (await self._reader.read()).partition(b"\r\n\r\n")
        return int(head.split(maxsplit=2)[1]), body

    async def leave(self) -> None:
        """Go away without a word, whether there was an answer or not."""
        self._writer.transport.abort()
        await asyncio.wait([asyncio.ensure_future(self._writer.wait_closed())])
