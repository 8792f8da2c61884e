"""Endpoints of queues: push, take, acknowledge, pause."""

from __future__ import annotations

import asyncio
import os
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from ninja import Router, Status

from psqlmessages.conf import get_settings
from psqlmessages.exchanges.store.definitions import namespaces
from psqlmessages.rest import bodies, pool, schemas
from psqlmessages.rest.auth import require_csrf_header
from psqlmessages.rest.errors import ApiError, ServiceUnavailable
from psqlmessages.rest.namespaces import RestDatabase, namespace
from psqlmessages.rest.pool import TakenRow
from psqlmessages.rest.schemas import (
    REFUSALS,
    acting_ident,
    body_of,
    caller_of,
    give_thread_back,
    name_of,
)
from psqlmessages.rest.waiters import WaitingRequest

# Names may contain slashes and routes match in order, so longer paths come first.
router = Router(tags=["queues"])


def _target(
    request: HttpRequest, ns: str, queue: str, ident: str | None
) -> tuple[RestDatabase, str]:
    """Validate the arguments of a call; return the namespace and the acting node."""
    actor = acting_ident(request, ident)
    name_of(queue, "queue")
    return namespace(ns), actor


@router.get("/q", response={200: schemas.Namespaces, **REFUSALS})
async def list_namespaces(request: HttpRequest):
    """List the namespaces."""
    if not caller_of(request).allowed:
        raise ApiError(403, "no web identity allows you to act as a node")
    return {"namespaces": namespaces()}


@router.get("/q/{ns}", response={200: schemas.Queues, **REFUSALS})
async def list_queues(
    request: HttpRequest,
    ns: str,
    ident: schemas.Ident = None,
    after: schemas.After = "",
    limit: schemas.Limit = 100,
):
    """List the queues that the node may use, by name, with their status."""
    actor = acting_ident(request, ident)
    if after:
        name_of(after, "queue")
    found, following = await pool.statuses(namespace(ns).calls, actor, after, limit)
    return {"queues": found, "next": following}


@router.get("/q/{ns}/{ks_name:queue}/status", response={200: schemas.QueueStatus, **REFUSALS})
async def status(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """Return the number of elements in a queue, and its counters since it was created."""
    space, actor = _target(request, ns, queue, ident)
    return await pool.status(space.calls, actor, queue)


@router.get("/q/{ns}/{ks_name:queue}/paused", response={200: schemas.Paused, **REFUSALS})
async def paused(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """Return whether a queue is paused."""
    space, actor = _target(request, ns, queue, ident)
    return await pool.status(space.calls, actor, queue)


@router.patch("/q/{ns}/{ks_name:queue}/pause", response={200: schemas.Paused, **REFUSALS})
async def pause(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """Pause a queue in all processes: consumers wait, pushes still work."""
    space, actor = _target(request, ns, queue, ident)
    await space.calls.call("pause(%s, %s)", actor, queue)
    return {"paused": True}


@router.patch("/q/{ns}/{ks_name:queue}/resume", response={200: schemas.Paused, **REFUSALS})
async def resume(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """Resume a queue."""
    space, actor = _target(request, ns, queue, ident)
    await space.calls.call("resume(%s, %s)", actor, queue)
    return {"paused": False}


@router.patch("/q/{ns}/{ks_name:queue}/commit/{lease}", response={200: schemas.Done, **REFUSALS})
async def commit(
    request: HttpRequest, ns: str, queue: str, lease: str, ident: schemas.Ident = None
):
    """Remove a reserved element; 404 if the lease is no longer valid."""
    space, actor = _target(request, ns, queue, ident)
    name_of(lease, "lease")
    return _done(await space.calls.call("commit(%s, %s)", actor, lease), lease)


@router.patch("/q/{ns}/{ks_name:queue}/rollback/{lease}", response={200: schemas.Done, **REFUSALS})
async def rollback(
    request: HttpRequest,
    ns: str,
    queue: str,
    lease: str,
    delay: schemas.Delay = None,
    ident: schemas.Ident = None,
):
    """Give back a reserved element with one more try; 404 if the lease is no longer valid."""
    space, actor = _target(request, ns, queue, ident)
    name_of(lease, "lease")
    answer = await space.calls.call("rollback(%s, %s::float8, %s)", actor, delay, lease)
    return _done(answer, lease)


def _done(answer: dict[str, Any], lease: str) -> dict[str, bool]:
    if not answer["Done"][0]:
        raise ApiError(404, f"the lease {lease:.100} is no longer valid")
    return {"done": True}


# Consuming: GET on a queue, which may wait; the waiting requests; removing one element

# Lease between taking and responding, for requests that do not reserve.
_HAND_OVER_SECONDS: Final = 20.0
_LEASE_SECONDS: Final = 120
# Browsers must not interpret bodies, which untrusted clients may have pushed.
_CONTENT_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Disposition": "attachment",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}
_CONTENT: Final[dict[str, Any]] = {
    "responses": {
        200: {
            "description": "The body, with the content type of the push.",
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in (
                    ("x-ks-id", "The element's number."),
                    ("x-ks-lease", "With reserve: the lease for commit and rollback."),
                    ("x-ks-tries", "Number of failed attempts."),
                    ("x-ks-mature", "When it became available."),
                    ("x-ks-headers", "All its headers, as JSON."),
                )
            },
            "content": {"*/*": {"schema": {}}},
        },
    }
}


@router.get("/q/{ns}/{ks_name:queue}/consumers", response={200: schemas.Consumers, **REFUSALS})
async def consumers(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """List the requests that wait in this server process, in the order of service."""
    space, actor = _target(request, ns, queue, ident)
    await pool.status(space.calls, actor, queue)
    waiting = [
        {
            "tid": reader.tid,
            "ident": reader.ident,
            "reserve": reader.is_reserving,
            "since": reader.since.isoformat(),
            "until": reader.until.isoformat(),
        }
        for reader in space.readers(queue)
    ]
    return {"process": os.getpid(), "consumers": waiting}


@router.delete("/q/{ns}/{ks_name:queue}/consumer/{tid}", response={204: None, **REFUSALS})
async def cancel(request: HttpRequest, ns: str, queue: str, tid: str, ident: schemas.Ident = None):
    """Cancel a waiting request of this server process: one of yours, or of the acting node."""
    space, actor = _target(request, ns, queue, ident)
    reader = space.reader(queue, tid)
    user = caller_of(request).credentials.user
    if reader is None or (reader.credentials.user != user and reader.ident != actor):
        raise ApiError(404, f"no reader {tid:.64} of yours is waiting in this server process")
    reader.cancel()
    return Status(204, None)


@router.delete("/q/{ns}/{ks_name:queue}/{int:number}", response={204: None, **REFUSALS})
async def remove(
    request: HttpRequest, ns: str, queue: str, number: schemas.Number, ident: schemas.Ident = None
):
    """Remove an element that is not reserved; 404 if there is none with this number."""
    space, actor = _target(request, ns, queue, ident)
    if not (await space.calls.call("remove(%s, %s, %s)", actor, queue, number))["Done"]:
        raise ApiError(404, f"no element {number} can be removed: it is unknown or reserved")
    return Status(204, None)


@router.get(
    "/q/{ns}/{ks_name:queue}",
    response={
        200: bytes,
        **dict.fromkeys((409, 410, 429, 504), schemas.ErrorBody),
        **REFUSALS,
    },
    openapi_extra=_CONTENT,
)
async def take(
    request: HttpRequest,
    ns: str,
    queue: str,
    to: schemas.Seconds = 0,
    reserve: bool = False,
    duration: schemas.LeaseSeconds = _LEASE_SECONDS,
    tid: schemas.Tid = None,
    ident: schemas.Ident = None,
):
    """Take the next element; wait for it up to ``to`` seconds, then return 504.

    With ``reserve`` it is yours for ``duration`` seconds, under the lease in ``x-ks-lease``.
    Otherwise it is removed just before the response. Session calls need the header X-CSRFToken.
    """
    require_csrf_header(request)
    space, actor = _target(request, ns, queue, ident)
    now = datetime.now(UTC)
    reader = WaitingRequest(
        tid=tid or secrets.token_urlsafe(12),
        queue=queue,
        ident=actor,
        lease_seconds=duration if reserve else _HAND_OVER_SECONDS,
        is_reserving=reserve,
        is_hasty=not to,
        credentials=caller_of(request).credentials,
        since=now,
        until=now + timedelta(seconds=to),
    )
    if to:
        await give_thread_back()
    element = await space.take(reader)
    if not reserve:
        await _removed(space, actor, element)
    return _answer(element, is_reserved=reserve)


async def _removed(space: RestDatabase, ident: str, element: TakenRow) -> None:
    try:
        answer = await space.calls.call("commit(%s, %s)", ident, element.lease)
    except asyncio.CancelledError:
        # No effect if the commit has already begun.
        space.give_back(ident, [element])
        raise
    if not answer["Done"][0]:
        raise ServiceUnavailable(
            "the element could not be delivered in time and is available again"
        )


def _answer(element: TakenRow, *, is_reserved: bool) -> HttpResponse:
    content = bodies.answered(element.body, element.enc, element.headers)
    response = HttpResponse(content.data, content_type=content.content_type)
    headers = {
        **_CONTENT_HEADERS,
        "x-ks-id": str(element.id),
        "x-ks-tries": str(element.tries),
        "x-ks-mature": element.mature,
        **content.headers,
    }
    if is_reserved:
        headers["x-ks-lease"] = element.lease
    for name, value in headers.items():
        response.headers[name] = value
    return response


# Pushing: POST on a queue, with a body of any type

_PUSH: Final = (
    "push(client_id => %s, queue => %s, body => %s, enc => %s, headers => %s,"
    " mature => %s::timestamptz, delay => %s::float8, tries => %s::int, key => %s)"
)

ANY_BODY = {
    "requestBody": {
        "description": "Any content type: stored as JSON, as text, or else as bytes.",
        "content": {
            "application/json": {"schema": {}},
            "text/plain": {"schema": {"type": "string"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post(
    "/q/{ns}/{ks_name:queue}",
    response={(200, 201): schemas.Pushed, 413: schemas.ErrorBody, **REFUSALS},
    openapi_extra=ANY_BODY,
)
async def push(
    request: HttpRequest,
    ns: str,
    queue: str,
    delay: schemas.Delay = None,
    mature: schemas.Mature = None,
    tries: schemas.Tries = 0,
    key: schemas.Key = None,
    ident: schemas.Ident = None,
):
    """Push the body and the headers ``x-ks-hdr-*``; 201, or 200 if the key already exists."""
    space, actor = _target(request, ns, queue, ident)
    if key is not None and ("\0" in key or "\N{REPLACEMENT CHARACTER}" in key):
        raise ApiError(400, "malformed key")
    given = {name.lower(): value for name, value in request.headers.items()}
    data = body_of(request, get_settings().MAX_BODY_BYTES)
    try:
        body, headers = bodies.received(data, given.get("content-type", "").strip(), given)
    except bodies.MalformedContent as error:
        raise ApiError(400, str(error)) from None
    options = (headers, mature, delay, tries, key or None)
    answer = await space.calls.call(_PUSH, actor, queue, body.text, body.enc, *options)
    already = bool(answer.get("Already"))
    return Status(200 if already else 201, {"id": answer["Id"], "already": already})
