"""Endpoints of topics: status and sending."""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS
from django.http import HttpRequest
from ninja import Router

from psqlmessages.conf import get_settings
from psqlmessages.exceptions import NoListeners
from psqlmessages.rest import bodies, schemas
from psqlmessages.rest.errors import ApiError
from psqlmessages.rest.namespaces import namespace
from psqlmessages.rest.queues import ANY_BODY
from psqlmessages.rest.schemas import REFUSALS, acting_ident, body_of, name_of

router = Router(tags=["topics"])


@router.get("/topics/{ks_name:topic}", response={200: schemas.TopicStatus, **REFUSALS})
async def status(
    request: HttpRequest, topic: str, ns: str = DEFAULT_DB_ALIAS, ident: schemas.Ident = None
):
    """List the nodes that send to a topic, and the nodes that listen to it."""
    actor = acting_ident(request, ident)
    name = name_of(topic, "topic")
    answer = await namespace(ns).calls.call("topic_status_as(%s, %s)", actor, name)
    return {"topic": name, "notifiers": answer["Notifiers"], "listeners": answer["Listeners"]}


@router.post(
    "/topics/{ks_name:topic}",
    response={200: schemas.Sent, 413: schemas.ErrorBody, **REFUSALS},
    openapi_extra=ANY_BODY,
)
async def send(
    request: HttpRequest, topic: str, ns: str = DEFAULT_DB_ALIAS, ident: schemas.Ident = None
):
    """Send the body to all current listeners, without a session and without a reply."""
    actor = acting_ident(request, ident)
    name = name_of(topic, "topic")
    data = body_of(request, get_settings().MAX_BODY_BYTES)
    try:
        body, _ = bodies.received(data, request.headers.get("Content-Type", "").strip(), {})
    except bodies.MalformedContent as error:
        raise ApiError(400, str(error)) from None
    call = "topic_send_as(%s, %s, %s, NULL, %s)"
    try:
        await namespace(ns).calls.call(call, actor, name, body.text, body.enc)
    except NoListeners:
        return {"heard": False}
    return {"heard": True}
