"""Requests: what all calls read of one: names, the body within its bounds, headers."""

from __future__ import annotations

from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async
from django.db import connections
from django.http import HttpRequest
from django.urls.converters import StringConverter

from psqlmessages.models.names import is_name
from psqlmessages.rest.admission import Caller
from psqlmessages.rest.faults import Refused

_CHUNK = 64 * 1024


class NameConverter(StringConverter):
    """A queue, topic or exchange in a path: its name may hold slashes and line ends."""

    regex = r"[\s\S]+"


def name_of(value: str, kind: str) -> str:
    """Return a name out of a path or query; refuse with 400 what can be none."""
    # Paths that are no UTF-8 come with this character: it would be another queue than was meant.
    if not is_name(value) or "\N{REPLACEMENT CHARACTER}" in value:
        raise Refused(400, f"malformed {kind}: 1 to 100 characters, as UTF-8 and without NUL")
    return value


def caller_of(request: HttpRequest) -> Caller:
    """Return who calls, as authentication found."""
    caller: Caller = request.auth  # type: ignore[attr-defined]
    return caller


def acting(request: HttpRequest, ident: str | None) -> str:
    """Choose the node that acts."""
    return caller_of(request).ident(None if ident is None else name_of(ident, "ident"))


def body_of(request: HttpRequest, most: int) -> bytes:
    """Read the body; refuse with 413, without reading on, what is larger than ``most`` bytes."""
    said = request.headers.get("Content-Length", "0")
    if said.isdecimal() and int(said[:20]) > most:
        raise Refused(413, f"the body exceeds {most:,} bytes", 51)
    data = bytearray()
    while chunk := request.read(_CHUNK):
        data += chunk
        if len(data) > most:
            raise Refused(413, f"the body exceeds {most:,} bytes", 51)
    return bytes(data)


async def give_thread_back() -> None:
    """Give back the thread that Django keeps for this request, and its database connections.

    asgiref makes one as soon as a middleware runs in it, and keeps it until the answer: a thousand
    that wait would be a thousand threads. The next that needs one makes another.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    executors = SyncToAsync.context_to_thread_executor
    # One that was supplied, or a thread that waits for us, is somebody else's.
    if (
        context is None
        or context not in executors
        or getattr(context, "_executor", None) is not None
        or getattr(AsyncToSync.executors, "current", None) is not None
    ):
        return
    await sync_to_async(connections.close_all)()
    if (executor := executors.pop(context, None)) is not None:
        executor.shutdown(wait=False)
