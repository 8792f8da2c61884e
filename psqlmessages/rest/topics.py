"""Endpoints of topics: status, and sending of messages."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Router

from psqlmessages.conf import get_settings
from psqlmessages.exceptions import NoListeners
from psqlmessages.orm import resolve_alias
from psqlmessages.rest import bodies, schemas
from psqlmessages.rest.namespaces import get_database
from psqlmessages.rest.queues import ANY_BODY
from psqlmessages.rest.schemas import ERRORS, check_name, get_acting_ident, read_body

router = Router(tags=["topics"])


@router.get("/topics/{messages_name:topic}", response={200: schemas.TopicStatus, **ERRORS})
async def status(
    request: HttpRequest, topic: str, ns: schemas.Namespace = None, ident: schemas.Ident = None
):
    """List the nodes that send to a topic, and the nodes that listen to it."""
    ident = get_acting_ident(request, ident)
    name = check_name(topic, "topic")
    answer = await get_database(resolve_alias(ns)).pool.call("topic_status_as(%s, %s)", ident, name)
    return {"topic": name, "notifiers": answer["Notifiers"], "listeners": answer["Listeners"]}


@router.post(
    "/topics/{messages_name:topic}",
    response={200: schemas.Sent, 413: schemas.ErrorBody, **ERRORS},
    openapi_extra=ANY_BODY,
)
async def send(
    request: HttpRequest, topic: str, ns: schemas.Namespace = None, ident: schemas.Ident = None
):
    """Send the body to all current listeners. They cannot reply: the sender has no session."""
    ident = get_acting_ident(request, ident)
    name = check_name(topic, "topic")
    data = read_body(request, get_settings().MAX_BODY_BYTES)
    body, _ = bodies.parse_request(data, request.headers.get("Content-Type", "").strip(), {})
    function = "topic_send_as(%s, %s, %s, NULL, %s)"
    try:
        await get_database(resolve_alias(ns)).pool.call(function, ident, name, body.text, body.enc)
    except NoListeners:
        return {"heard": False}
    return {"heard": True}
