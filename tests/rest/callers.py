"""Callers: programs that call the API over HTTP, each answer with its headers."""

import asyncio
import http.client
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlencode

from psqlmessages.rest.auth import token_for
from tests.web.site import Site

Headers = Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """A response; the names of `headers` are in lower case."""

    status: int
    headers: Headers
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
    def __init__(self, site: Site, headers: Headers) -> None:
        self.site = site
        self.headers = dict(headers)
        self._threads = ThreadPoolExecutor(32)

    def call(
        self, method: str, path: str, body: Any = None, headers: Headers | None = None, **query: Any
    ) -> Answer:
        made = http.client.HTTPConnection("127.0.0.1", self.site.port, timeout=60)
        with closing(made) as connection:
            address = f"/api/{path}" + (f"?{urlencode(query)}" if query else "")
            connection.request(method, address, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def begin(self, method: str, path: str, **given: Any) -> "Future[Answer]":
        return self._threads.submit(self.call, method, path, **given)

    def push(self, queue: str, body: bytes = b"x", content_type: str = "", **query: Any) -> Answer:
        headers = {"Content-Type": content_type} if content_type else {}
        return self.call("POST", at(queue), body, headers, **query)

    def take(self, queue: str, **query: Any) -> Answer:
        return self.call("GET", at(queue), **query)

    def waiting(self, queue: str) -> list[str]:
        """Return the names of waiting readers in order."""
        answer = self.call("GET", at(queue, "consumers"))
        return [reader["tid"] for reader in answer.json.get("consumers", [])]

    def close(self) -> None:
        self._threads.shutdown()


def at(queue: str, *more: str) -> str:
    return "/".join(["q/default", quote(queue, safe=""), *more])


def bearer(site: Site, username: str, *idents: str, **fields: Any) -> dict[str, str]:
    """Create a user with these nodes; return the header with the user's token."""
    user = site.user(username, idents=idents, **fields)
    return {"Authorization": f"Bearer {token_for(user, timedelta(hours=1))}"}


class Connection:
    async def ask(self, site: Site, path: str, headers: Headers) -> "Connection":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", site.port)
        given = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = f"GET /api/{path} HTTP/1.0\r\nHost: 127.0.0.1\r\n{given}\r\n"
        self._writer.write(request.encode())
        await self._writer.drain()
        return self

    async def answer(self) -> tuple[int, bytes]:
        head, _, body = (await self._reader.read()).partition(b"\r\n\r\n")
        return int(head.split(maxsplit=2)[1]), body

    async def leave(self) -> None:
        """Close the connection without waiting for the answer."""
        self._writer.transport.abort()
        await asyncio.wait([asyncio.ensure_future(self._writer.wait_closed())])
