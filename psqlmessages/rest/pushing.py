"""Pushing: POST on a queue, with a body of any type."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Status

from psqlmessages.conf import get_settings
from psqlmessages.rest import bodies, elements, schemas
from psqlmessages.rest.elements import Push
from psqlmessages.rest.faults import Refused
from psqlmessages.rest.queues import place, router
from psqlmessages.rest.requests import body_of
from psqlmessages.rest.schemas import REFUSALS

ANY_BODY = {
    "requestBody": {
        "description": "Any content type: JSON as JSON, text as text, all else as bytes.",
        "content": {
            "application/json": {"schema": {}},
            "text/plain": {"schema": {"type": "string"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post(
    "/q/{ns}/{ks_name:queue}",
    response={(200, 201): schemas.Pushed, 413: schemas.Fault, **REFUSALS},
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
    """Push the body, and headers ``x-ks-hdr-*``; 201, or 200 where the key was there already."""
    space, actor = place(request, ns, queue, ident)
    if key is not None and not _is_text(key):
        raise Refused(400, "malformed key")
    given = {name.lower(): value for name, value in request.headers.items()}
    data = body_of(request, get_settings().MAX_BODY_BYTES)
    try:
        body, headers = bodies.received(data, given.get("content-type", "").strip(), given)
    except bodies.MalformedContent as error:
        raise Refused(400, str(error)) from None
    extra = Push(headers, mature, delay, tries, key or None)
    answer = await elements.push(space.calls, actor, queue, body.text, body.enc, extra)
    already = bool(answer.get("Already"))
    return Status(200 if already else 201, {"id": answer["Id"], "already": already})


def _is_text(value: str) -> bool:
    return "\0" not in value and "\N{REPLACEMENT CHARACTER}" not in value
