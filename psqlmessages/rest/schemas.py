"""Schemas of responses, types of parameters, and reading of requests (413 for large bodies)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async
from django.db import connections
from django.http import HttpRequest
from django.urls import register_converter
from ninja import Schema
from pydantic import AwareDatetime, Field

from psqlmessages.models.names import NameConverter, is_name
from psqlmessages.rest.auth import ApiCaller
from psqlmessages.rest.errors import ApiError


class ErrorBody(Schema):
    """An error: the reason; the error number and the address of its documentation if it has one."""

    detail: str
    err: int | None = None
    url: str | None = None


class ErrorList(ErrorBody):
    """An error with one line per problem."""

    errors: list[str] | None = None


class Namespaces(Schema):
    """The namespaces: aliases of DATABASES."""

    namespaces: list[str]


class QueueStatus(Schema):
    """A queue: its number of elements, and its counters since it was created.

    ``next``: when the next scheduled element becomes available; null if there is none.
    """

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
    removes: int = 0


class Queues(Schema):
    """A page of queues. ``next``: pass it as ``after`` to get the next page; null on the last."""

    queues: list[QueueStatus]
    next: str | None


class Pushed(Schema):
    """The id of the element. ``already``: the key existed, so nothing was pushed."""

    id: int
    already: bool = False


class Done(Schema):
    """Success."""

    done: bool


class RolledBack(Done):
    """Success. ``dead_lettered``: the element moved to the dead-letter queue."""

    dead_lettered: bool


class Drained(Schema):
    """How many elements were removed."""

    removed: int


class PeekedElement(Schema):
    """An element that stays in the queue. Without ``with_bodies``, ``body`` is null."""

    id: int
    body: str | None
    enc: str | None
    headers: dict[str, Any]
    mature: str
    tries: int
    hops: int
    pushed_at: str
    state: Literal["available", "scheduled", "reserved"]


class PeekedElements(Schema):
    """The first elements of a queue, in the order in which they can be taken."""

    elements: list[PeekedElement]


class ConfiguredQueue(Schema):
    """Settings of a queue. ``max_tries`` null: no maximum."""

    max_tries: int | None
    dead_letter_queue: str
    key_timeout: int


class Paused(Schema):
    """Whether the queue is paused."""

    paused: bool


class Consumer(Schema):
    """A waiting request. ``tid``: its name, chosen by its client or at random."""

    tid: str
    ident: str
    reserve: bool
    since: str
    until: str


class Consumers(Schema):
    """The waiting requests of one server process, in the order in which they are served."""

    process: int
    consumers: list[Consumer]


class ExchangeCounts(Schema):
    """Number of elements by result since the exchange was created, in all processes."""

    ok: int
    no_route: int
    discarded: int
    too_many_hops: int
    failed: int


class ExchangeState(Schema):
    """An exchange: its definition as in a file, its state and its counts.

    ``running``: it was started and not stopped. ``blocked``: it should run, but its workers lack
    rules; ``missing_rules`` lists SQL statements that add them.
    """

    name: str
    running: bool
    state: Literal["running", "stopped", "blocked"]
    missing_rules: list[str]
    definition: dict[str, Any]
    counts: ExchangeCounts


class Exchanges(Schema):
    """All exchanges, by name."""

    exchanges: list[ExchangeState]


class ExchangePut(Schema):
    """The stored exchange, and SQL statements that add its missing rules.

    ``unasked``: the namespaces whose rules could not be checked, with the reason.
    """

    name: str
    running: bool
    missing_rules: list[str]
    unasked: list[str]


class Running(Schema):
    """Whether the exchange was started and not stopped."""

    running: bool


class TopicStatus(Schema):
    """The idents of a topic's senders and listeners."""

    topic: str
    notifiers: list[str]
    listeners: list[str]


class Sent(Schema):
    """Whether there was a listener. Without one, the message is discarded."""

    heard: bool


# The errors that nearly every call may return. The keys are HTTP statuses.
ERRORS: dict[int, Any] = dict.fromkeys((400, 401, 403, 404, 503), ErrorBody)

_BILLION = 1_000_000_000

Ident = Annotated[str | None, Field(description="The node that the call acts as.")]
Namespace = Annotated[
    str | None, Field(description='The namespace; without it PSQLMESSAGES["DATABASE"].')
]
After = Annotated[str, Field(description="Start after this queue: `next` of the previous page.")]
Limit = Annotated[int, Field(ge=1, le=1000)]
Delay = Annotated[float | None, Field(ge=0, le=_BILLION, allow_inf_nan=False)]
WaitSeconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
LeaseSeconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
PeekRows = Annotated[int, Field(ge=1, le=100)]
Tid = Annotated[
    str | None,
    Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="A name, to cancel the waiting request."),
]
ElementId = Annotated[int, Field(ge=0, lt=2**63)]
Tries = Annotated[int, Field(ge=0, lt=2**31)]
MaxTries = Annotated[
    int | None, Field(ge=0, lt=2**31, description="0: no maximum. Missing: unchanged.")
]
DeadLetterQueue = Annotated[str | None, Field(description="Missing: unchanged.")]
KeyTimeout = Annotated[
    int | None, Field(gt=0, lt=2**31, description="Seconds. Missing: unchanged.")
]
Mature = Annotated[
    AwareDatetime | None, Field(description="When it becomes available: ISO 8601 with time zone.")
]
Key = Annotated[str | None, Field(max_length=200)]


# Parsing of requests

_CHUNK_BYTES = 64 * 1024

register_converter(NameConverter, "messages_name")


def check_name(value: str, kind: str) -> str:
    """Return a name from a path or query; raise ApiError 400 if it is malformed."""
    # Django decodes invalid UTF-8 to this character: several paths would mean the same queue.
    if not is_name(value) or "\N{REPLACEMENT CHARACTER}" in value:
        raise ApiError(400, f"malformed {kind}: use 1 to 100 characters in UTF-8, without NUL")
    return value


def get_caller(request: HttpRequest) -> ApiCaller:
    """Return the authenticated caller."""
    return request.auth  # type: ignore[attr-defined,no-any-return]


def get_acting_ident(request: HttpRequest, ident: str | None) -> str:
    """Return the node that a call acts as: the given one, or the caller's only exact name."""
    return get_caller(request).choose_ident(None if ident is None else check_name(ident, "ident"))


def read_body(request: HttpRequest, max_bytes: int) -> bytes:
    """Read the body; raise ApiError 413 if it is longer than ``max_bytes``."""
    too_large = ApiError(413, f"the body exceeds {max_bytes:,} bytes", number=51)
    length = request.headers.get("Content-Length", "0")
    # Python refuses to convert very long numbers: 20 digits are enough to exceed the limit.
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    data = bytearray()
    while chunk := request.read(_CHUNK_BYTES):
        data += chunk
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)


async def release_thread() -> None:
    """Release the thread that asgiref reserves for this request, and its database connections.

    The first synchronous middleware creates the thread, which stays until the response: a thousand
    waiting requests would need a thousand threads. Later synchronous code gets a new thread.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    executors = SyncToAsync.context_to_thread_executor
    # There is no thread: no synchronous code has run in this request.
    if context is None or context not in executors:
        return
    # Keep the thread: other code has supplied the executor.
    if getattr(context, "_executor", None) is not None:
        return
    # Keep the thread: a synchronous caller waits in it for this coroutine.
    if getattr(AsyncToSync.executors, "current", None) is not None:
        return
    await sync_to_async(connections.close_all)()
    if (executor := executors.pop(context, None)) is not None:
        executor.shutdown(wait=False)
