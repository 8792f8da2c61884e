"""Taking: GET on a queue, which may wait; those who wait; removing one element."""

from __future__ import annotations

import asyncio
import os
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from ninja import Status

from psqlmessages.rest import bodies, elements, schemas
from psqlmessages.rest.admission import see_csrf_header
from psqlmessages.rest.elements import Element
from psqlmessages.rest.faults import Refused, Unavailable
from psqlmessages.rest.namespaces import Namespace
from psqlmessages.rest.queues import place, router
from psqlmessages.rest.readers import Reader
from psqlmessages.rest.requests import caller_of, give_thread_back
from psqlmessages.rest.schemas import REFUSALS

# Between the taking and the answer, for those who do not reserve.
_HAND_OVER_SECONDS: Final = 20.0
_LEASE_SECONDS: Final = 120
# No browser is to make anything of what strangers have pushed.
_CONTENT_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Disposition": "attachment",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}
_CONTENT: Final[dict[str, Any]] = {
    "responses": {
        200: {
            "description": "The body, of the type with which it was pushed.",
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in (
                    ("x-ks-id", "The element's number."),
                    ("x-ks-lease", "With reserve: what commit and rollback need."),
                    ("x-ks-tries", "How often it was taken in vain."),
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
    """List who waits for elements in this server process, in the order they will be served."""
    space, actor = place(request, ns, queue, ident)
    await elements.status(space.calls, actor, queue)
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
    """Cancel a reader of this server process: one of yours, or of the node that acts."""
    space, actor = place(request, ns, queue, ident)
    reader = space.reader(queue, tid)
    user = caller_of(request).credentials.user
    if reader is None or (reader.credentials.user != user and reader.ident != actor):
        raise Refused(404, f"no reader {tid:.64} of yours waits in this server process")
    reader.cancel()
    return Status(204, None)


@router.delete("/q/{ns}/{ks_name:queue}/{int:number}", response={204: None, **REFUSALS})
async def remove(
    request: HttpRequest, ns: str, queue: str, number: schemas.Number, ident: schemas.Ident = None
):
    """Remove an element that is not reserved; 404 where there is none of this number."""
    space, actor = place(request, ns, queue, ident)
    if not await elements.remove(space.calls, actor, queue, number):
        raise Refused(404, f"no element {number} can be removed: it is unknown or reserved")
    return Status(204, None)


@router.get(
    "/q/{ns}/{ks_name:queue}",
    response={
        200: bytes,
        **dict.fromkeys((409, 410, 429, 504), schemas.Fault),
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
    """Take the next element; wait for it ``to`` seconds at most, then 504.

    With ``reserve`` it is yours for ``duration`` seconds, by the lease in ``x-ks-lease``; else it
    is removed just before this answers. By session it needs the header X-CSRFToken, as it takes.
    """
    see_csrf_header(request)
    space, actor = place(request, ns, queue, ident)
    now = datetime.now(UTC)
    reader = Reader(
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


async def _removed(space: Namespace, ident: str, element: Element) -> None:
    try:
        is_removed = await elements.commit(space.calls, ident, element.lease)
    except asyncio.CancelledError:
        # Of no effect where the statement was under way already.
        space.give_back(ident, [element])
        raise
    if not is_removed:
        raise Unavailable("the element could not be handed over in time, and is there again")


def _answer(element: Element, *, is_reserved: bool) -> HttpResponse:
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
