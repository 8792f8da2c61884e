"""Schemas of requests and responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any

from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async
from django.db import connections
from django.http import HttpRequest
from django.urls.converters import StringConverter
from ninja import Schema
from pydantic import AwareDatetime, Field

from psqlmessages.models.names import is_name
from psqlmessages.rest.auth import ApiCaller
from psqlmessages.rest.errors import ApiError


class ErrorBody(Schema):
    """What was refused: why and, where PostgreSQL refused it, the number of the error."""

    detail: str
    err: int | None = None


class ErrorList(ErrorBody):
    """The same, with a line for each thing wrong."""

    errors: list[str] | None = None


class Namespaces(Schema):
    """The namespaces, which are the aliases of DATABASES."""

    namespaces: list[str]


class QueueStatus(Schema):
    """A queue: how many elements it has, and what was counted since it was made."""

    queue: str
    total: int
    available: int
    scheduled: int
    reserved: int
    next: str | None = None
    paused: bool
    max_tries: int | None = None
    dead_letter_queue: str | None = None
    key_timeout: int | None = None
    puts: int = 0
    gets: int = 0
    reserves: int = 0
    commits: int = 0
    rollbacks: int = 0
    dead_letters: int = 0


class Queues(Schema):
    """Some queues by name; ``next`` goes on after these, null where there are no more."""

    queues: list[QueueStatus]
    next: str | None


class Pushed(Schema):
    """The element's number; ``already`` where the key was there, so that nothing was pushed."""

    id: int
    already: bool = False


class Done(Schema):
    """It was done."""

    done: bool


class Paused(Schema):
    """Whether takers of the queue wait."""

    paused: bool


class Consumer(Schema):
    """A reader that waits."""

    tid: str
    ident: str
    reserve: bool
    since: str
    until: str


class Consumers(Schema):
    """Those of one server process, in the order in which they will be served."""

    process: int
    consumers: list[Consumer]


class ExchangeCounts(Schema):
    """What became of elements, since the exchange was made, in all processes."""

    ok: int
    no_route: int
    too_many_hops: int
    failed: int


class ExchangeState(Schema):
    """An exchange: its definition as files have it, whether it is to run, and what it did."""

    name: str
    running: bool
    definition: dict[str, Any]
    counts: ExchangeCounts


class Exchanges(Schema):
    """All exchanges, by name."""

    exchanges: list[ExchangeState]


class ExchangePut(Schema):
    """What was stored, and the rules that it needs and does not have."""

    name: str
    running: bool
    missing_rules: list[str]
    unasked: list[str]


class Running(Schema):
    """Whether its loops are to run."""

    running: bool


class TopicStatus(Schema):
    """Who sends to a topic and who listens, by the names of their nodes."""

    topic: str
    notifiers: list[str]
    listeners: list[str]


class Sent(Schema):
    """Whether anybody listens; where nobody does, the message is lost."""

    heard: bool


# What nearly every call may answer besides.
REFUSALS: dict[int, Any] = dict.fromkeys((400, 401, 403, 404, 503), ErrorBody)

_BILLION = 1_000_000_000

Ident = Annotated[str | None, Field(description="The node that acts.")]
After = Annotated[str, Field(description="Those behind this queue: `next` of the answer before.")]
Limit = Annotated[int, Field(ge=1, le=1000)]
Delay = Annotated[float | None, Field(ge=0, le=_BILLION, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
LeaseSeconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Tid = Annotated[str | None, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Number = Annotated[int, Field(ge=0, lt=2**63)]
Tries = Annotated[int, Field(ge=0, lt=2**31)]
Mature = Annotated[
    AwareDatetime | None, Field(description="When it becomes available: ISO 8601 with its zone.")
]
Key = Annotated[str | None, Field(max_length=200)]


# Requests: what all calls read of one: names, the body within its bounds, headers.

_CHUNK = 64 * 1024


class NameConverter(StringConverter):
    """A queue, topic or exchange in a path: its name may hold slashes and line ends."""

    regex = r"[\s\S]+"


def name_of(value: str, kind: str) -> str:
    """Return a name out of a path or query; refuse with 400 what can be none."""
    # Paths that are no UTF-8 come with this character: it would be another queue than was meant.
    if not is_name(value) or "\N{REPLACEMENT CHARACTER}" in value:
        raise ApiError(400, f"malformed {kind}: 1 to 100 characters, as UTF-8 and without NUL")
    return value


def caller_of(request: HttpRequest) -> ApiCaller:
    """Return who calls, as authentication found."""
    caller: ApiCaller = request.auth  # type: ignore[attr-defined]
    return caller


def acting_ident(request: HttpRequest, ident: str | None) -> str:
    """Choose the node that acts."""
    return caller_of(request).ident(None if ident is None else name_of(ident, "ident"))


def body_of(request: HttpRequest, most: int) -> bytes:
    """Read the body; refuse with 413, without reading on, what is larger than ``most`` bytes."""
    said = request.headers.get("Content-Length", "0")
    if said.isdecimal() and int(said[:20]) > most:
        raise ApiError(413, f"the body exceeds {most:,} bytes", 51)
    data = bytearray()
    while chunk := request.read(_CHUNK):
        data += chunk
        if len(data) > most:
            raise ApiError(413, f"the body exceeds {most:,} bytes", 51)
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
