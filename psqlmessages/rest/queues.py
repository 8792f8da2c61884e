"""Endpoints of queues: push, take, peek, acknowledge, status, pause, drain, settings."""

from __future__ import annotations

import asyncio
import os
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from ninja import Router, Status

from psqlmessages.client.calls import raise_for_error
from psqlmessages.conf import get_settings
from psqlmessages.exchanges.store.definitions import namespaces
from psqlmessages.orm import counting_refused_calls
from psqlmessages.rest import bodies, pool, schemas
from psqlmessages.rest.auth import require_csrf_header
from psqlmessages.rest.errors import ApiError, ServiceUnavailable
from psqlmessages.rest.namespaces import RestDatabase, get_database
from psqlmessages.rest.pool import LeasedElement
from psqlmessages.rest.schemas import (
    ERRORS,
    Ident,
    check_name,
    get_acting_ident,
    get_caller,
    read_body,
    release_thread,
)
from psqlmessages.rest.waiters import WaitingRequest

# Names may contain slashes, and the first matching route counts: define the longer paths first.
router = Router(tags=["queues"])
_QUEUE: Final = "/q/{ns}/{messages_name:queue}"


def _resolve(
    request: HttpRequest, ns: str, queue: str, ident: str | None
) -> tuple[RestDatabase, str]:
    """Check the arguments of a call; return its database, and the node that it acts as."""
    ident = get_acting_ident(request, ident)
    check_name(queue, "queue")
    return get_database(ns), ident


@router.get("/q", response={200: schemas.Namespaces, **ERRORS})
async def list_namespaces(request: HttpRequest):
    """List the namespaces."""
    if not get_caller(request).allowed_idents:
        raise ApiError(403, "no web identity allows you to act as a node")
    return {"namespaces": namespaces()}


@router.get("/q/{ns}", response={200: schemas.Queues, **ERRORS})
async def list_queues(
    request: HttpRequest,
    ns: str,
    ident: Ident = None,
    after: schemas.After = "",
    limit: schemas.Limit = 100,
):
    """List the queues that the node may use, in order of their names, with their status."""
    ident = get_acting_ident(request, ident)
    if after:
        check_name(after, "queue")
    queues, next_after = await pool.list_statuses(get_database(ns).pool, ident, after, limit)
    return {"queues": queues, "next": next_after}


@router.get(_QUEUE + "/status", response={200: schemas.QueueStatus, **ERRORS})
async def status(request: HttpRequest, ns: str, queue: str, ident: Ident = None):
    """Return the number of elements in a queue, and its counters since it was created."""
    database, ident = _resolve(request, ns, queue, ident)
    return await pool.read_status(database.pool, ident, queue)


@router.get(_QUEUE + "/paused", response={200: schemas.Paused, **ERRORS})
async def paused(request: HttpRequest, ns: str, queue: str, ident: Ident = None):
    """Return whether a queue is paused."""
    database, ident = _resolve(request, ns, queue, ident)
    # The response contains only the field of schemas.Paused.
    return await pool.read_status(database.pool, ident, queue)


@router.patch(_QUEUE + "/pause", response={200: schemas.Paused, **ERRORS})
async def pause(request: HttpRequest, ns: str, queue: str, ident: Ident = None):
    """Pause a queue: consumers in all processes wait, and pushes still work."""
    database, ident = _resolve(request, ns, queue, ident)
    await database.pool.call("pause(%s, %s)", ident, queue)
    return {"paused": True}


@router.patch(_QUEUE + "/resume", response={200: schemas.Paused, **ERRORS})
async def resume(request: HttpRequest, ns: str, queue: str, ident: Ident = None):
    """Resume a queue."""
    database, ident = _resolve(request, ns, queue, ident)
    await database.pool.call("resume(%s, %s)", ident, queue)
    return {"paused": False}


@router.patch(_QUEUE + "/drain", response={200: schemas.Drained, **ERRORS})
async def drain(request: HttpRequest, ns: str, queue: str, ident: Ident = None):
    """Remove all available elements. Scheduled and reserved elements stay."""
    database, ident = _resolve(request, ns, queue, ident)
    answer = await database.pool.call("drain(%s, %s)", ident, queue)
    return {"removed": answer["Removed"]}


@router.get(_QUEUE + "/peek", response={200: schemas.PeekedElements, **ERRORS})
async def peek(
    request: HttpRequest,
    ns: str,
    queue: str,
    max_rows: schemas.PeekRows = 10,
    with_bodies: bool = True,
    ident: Ident = None,
):
    """List the first elements, in the order in which they can be taken; they stay in the queue.

    The bodies of an answer have at most 1 MiB together, unless the first body alone is longer.
    """
    database, ident = _resolve(request, ns, queue, ident)
    elements = await pool.peek(database.pool, ident, queue, max_rows, with_bodies)
    return HttpResponse(
        f'{{"elements": {elements}}}',
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


# Leases

_DEFAULT_LEASE_SECONDS: Final = 120
# Only renew checks the queue of a lease. It also locks the element, so that the lease stays valid
# until the end of the statement. This takes 0.4 ms.
_WITH_LEASE: Final = "SELECT {} FROM messages.renew(%s, %s, %s::float8, %s)"


@router.patch(_QUEUE + "/commit/{lease}", response={200: schemas.Done, **ERRORS})
async def commit(request: HttpRequest, ns: str, queue: str, lease: str, ident: Ident = None):
    """Acknowledge a reserved element, which removes it; 404 if the lease is not valid."""
    await _call_with_lease(request, ns, queue, lease, ident, "messages.commit(%s, %s)")
    return {"done": True}


@router.patch(_QUEUE + "/rollback/{lease}", response={200: schemas.RolledBack, **ERRORS})
async def rollback(
    request: HttpRequest,
    ns: str,
    queue: str,
    lease: str,
    delay: schemas.Delay = None,
    ident: Ident = None,
):
    """Reject a reserved element, which counts a failed attempt; 404 if the lease is not valid."""
    call = "messages.rollback(%s, %s::float8, %s)"
    answer = await _call_with_lease(request, ns, queue, lease, ident, call, delay)
    return {"done": True, "dead_lettered": "DeadLettered" in answer}


@router.patch(_QUEUE + "/release/{lease}", response={200: schemas.Done, **ERRORS})
async def release(request: HttpRequest, ns: str, queue: str, lease: str, ident: Ident = None):
    """Give back an unread element without counting an attempt; 404 if the lease is not valid."""
    await _call_with_lease(request, ns, queue, lease, ident, "messages.release(%s, %s)")
    return {"done": True}


@router.patch(_QUEUE + "/renew/{lease}", response={200: schemas.Done, **ERRORS})
async def renew(
    request: HttpRequest,
    ns: str,
    queue: str,
    lease: str,
    duration: schemas.LeaseSeconds = _DEFAULT_LEASE_SECONDS,
    ident: Ident = None,
):
    """Extend a lease to ``duration`` seconds from now; 404 if the lease is not valid."""
    call = "json_build_object('Err', '0')"
    await _call_with_lease(request, ns, queue, lease, ident, call, seconds=duration)
    return {"done": True}


async def _call_with_lease(
    request: HttpRequest,
    ns: str,
    queue: str,
    lease: str,
    ident: str | None,
    call: str,
    *options: Any,
    seconds: float = 1.0,
) -> dict[str, Any]:
    """Renew a lease, and evaluate the SQL expression ``call``; raise 404 for an invalid lease."""
    database, ident = _resolve(request, ns, queue, ident)
    check_name(lease, "lease")
    params = (ident, *options, lease) if "%s" in call else ()
    renewal = (ident, queue, seconds, lease)
    rows = await database.pool.fetch(_WITH_LEASE.format(call), (*params, *renewal))
    if not rows:
        raise ApiError(404, f"the lease {lease:.100} has ended, or is of another queue")
    with counting_refused_calls(call, params):
        return raise_for_error(rows[0][0])


# Consuming

# Without ``reserve``, an element has a lease until the server removes it, before the response.
_REMOVAL_LEASE_SECONDS: Final = 20.0
# Browsers must not interpret bodies, which untrusted clients may have pushed.
_SECURITY_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Disposition": "attachment",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}
_ELEMENT_RESPONSE: Final[dict[str, Any]] = {
    "responses": {
        200: {
            "description": "The body, with the content type of the push.",
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in (
                    ("x-ks-id", "The element's number."),
                    ("x-ks-lease", "With reserve: the lease."),
                    ("x-ks-tries", "Number of failed attempts."),
                    ("x-ks-mature", "When it became available."),
                    ("x-ks-headers", "All its headers, as JSON."),
                )
            },
            "content": {"*/*": {"schema": {}}},
        },
    }
}


@router.get(_QUEUE + "/consumers", response={200: schemas.Consumers, **ERRORS})
async def consumers(request: HttpRequest, ns: str, queue: str, ident: Ident = None):
    """List the requests that wait in this server process, in the order in which they are served."""
    database, ident = _resolve(request, ns, queue, ident)
    # Raises an error if the node may not use the queue.
    await pool.read_status(database.pool, ident, queue)
    waiting = [
        {
            "tid": waiter.tid,
            "ident": waiter.ident,
            "reserve": waiter.is_reserving,
            "since": waiter.since.isoformat(),
            "until": waiter.until.isoformat(),
        }
        for waiter in database.list_waiters(queue)
    ]
    return {"process": os.getpid(), "consumers": waiting}


@router.delete(_QUEUE + "/consumer/{tid}", response={204: None, **ERRORS})
async def cancel(request: HttpRequest, ns: str, queue: str, tid: str, ident: Ident = None):
    """Cancel a request that waits in this server process: yours, or one for the acting node."""
    database, ident = _resolve(request, ns, queue, ident)
    user = get_caller(request).credentials.user
    for waiter in database.list_waiters(queue):
        if waiter.tid == tid and (waiter.credentials.user == user or waiter.ident == ident):
            waiter.cancel()
            return Status(204, None)
    raise ApiError(404, f"no request {tid:.64} that you may cancel waits in this server process")


@router.delete(_QUEUE + "/{int:number}", response={204: None, **ERRORS})
async def remove(
    request: HttpRequest, ns: str, queue: str, number: schemas.ElementId, ident: Ident = None
):
    """Remove an element that is not reserved; 404 if there is no such element."""
    database, ident = _resolve(request, ns, queue, ident)
    if not (await database.pool.call("remove(%s, %s, %s)", ident, queue, number))["Done"]:
        raise ApiError(404, f"no element {number} can be removed: it is unknown or reserved")
    return Status(204, None)


@router.get(
    _QUEUE,
    response={200: bytes, **dict.fromkeys((409, 410, 429, 504), schemas.ErrorBody), **ERRORS},
    openapi_extra=_ELEMENT_RESPONSE,
)
async def take(
    request: HttpRequest,
    ns: str,
    queue: str,
    to: schemas.WaitSeconds = 0,
    reserve: bool = False,
    duration: schemas.LeaseSeconds = _DEFAULT_LEASE_SECONDS,
    tid: schemas.Tid = None,
    ident: Ident = None,
):
    """Take the next element; wait for it up to ``to`` seconds, then return 504.

    With ``reserve``, the element is reserved for ``duration`` seconds, and ``x-ks-lease`` is its
    lease. Otherwise it is removed just before the response. If you log in with a session cookie
    rather than a token, send the header X-CSRFToken.
    """
    require_csrf_header(request)
    database, ident = _resolve(request, ns, queue, ident)
    now = datetime.now(UTC)
    waiter = WaitingRequest(
        tid=tid or secrets.token_urlsafe(12),
        queue=queue,
        ident=ident,
        lease_seconds=duration if reserve else _REMOVAL_LEASE_SECONDS,
        is_reserving=reserve,
        waits_if_empty=to > 0,
        credentials=get_caller(request).credentials,
        since=now,
        until=now + timedelta(seconds=to),
    )
    if to:
        await release_thread()
    element = await database.take(waiter)
    if not reserve:
        await _remove_taken(database, ident, element)
    return _build_response(element, is_reserved=reserve)


async def _remove_taken(database: RestDatabase, ident: str, element: LeasedElement) -> None:
    try:
        answer = await database.pool.call("commit(%s, %s)", ident, element.lease)
    except asyncio.CancelledError:
        # The release has no effect if the commit succeeds.
        database.release(ident, [element])
        raise
    if not answer["Done"][0]:
        raise ServiceUnavailable(
            "the element could not be delivered in time and is available again"
        )


def _build_response(element: LeasedElement, *, is_reserved: bool) -> HttpResponse:
    content = bodies.build_content(element.body, element.enc, element.headers)
    headers = {
        **_SECURITY_HEADERS,
        "x-ks-id": str(element.id),
        "x-ks-tries": str(element.tries),
        "x-ks-mature": element.mature,
        **content.headers,
    }
    if is_reserved:
        headers["x-ks-lease"] = element.lease
    return HttpResponse(content.data, content_type=content.content_type, headers=headers)


# Settings and removal of queues


@router.patch(_QUEUE, response={200: schemas.ConfiguredQueue, **ERRORS})
async def configure(
    request: HttpRequest,
    ns: str,
    queue: str,
    max_tries: schemas.MaxTries = None,
    dead_letter_queue: schemas.DeadLetterQueue = None,
    key_timeout: schemas.KeyTimeout = None,
    ident: Ident = None,
):
    """Change settings of a queue, and return all its settings. Creates the queue if necessary."""
    database, ident = _resolve(request, ns, queue, ident)
    if dead_letter_queue is not None:
        check_name(dead_letter_queue, "dead_letter_queue")
    options = (max_tries, dead_letter_queue, key_timeout)
    answer = await database.pool.call(
        "configure_queue(%s, %s, %s::int, %s, %s::int)", ident, queue, *options
    )
    return {
        "max_tries": answer["MaxTries"] or None,
        "dead_letter_queue": answer["DeadLetterQueue"],
        "key_timeout": answer["KeyTimeout"],
    }


@router.delete(_QUEUE, response={204: None, 409: schemas.ErrorBody, **ERRORS})
async def remove_queue(request: HttpRequest, ns: str, queue: str, ident: Ident = None):
    """Remove an empty queue with its settings; 409 if it has elements."""
    database, ident = _resolve(request, ns, queue, ident)
    await database.pool.call("remove_queue(%s, %s)", ident, queue)
    return Status(204, None)


# Pushing

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
    _QUEUE,
    response={(200, 201): schemas.Pushed, 413: schemas.ErrorBody, **ERRORS},
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
    ident: Ident = None,
):
    """Push the body with the headers ``x-ks-hdr-*``; 201, or 200 if the key already exists."""
    database, ident = _resolve(request, ns, queue, ident)
    if key is not None and ("\0" in key or "\N{REPLACEMENT CHARACTER}" in key):
        raise ApiError(400, "malformed key: use UTF-8 without NUL")
    http_headers = {name.lower(): value for name, value in request.headers.items()}
    content_type = http_headers.get("content-type", "").strip()
    data = read_body(request, get_settings().MAX_BODY_BYTES)
    body, headers = bodies.parse_request(data, content_type, http_headers)
    options = (headers, mature, delay, tries, key or None)
    answer = await database.pool.call(_PUSH, ident, queue, body.text, body.enc, *options)
    already = bool(answer.get("Already"))
    return Status(200 if already else 201, {"id": answer["Id"], "already": already})
