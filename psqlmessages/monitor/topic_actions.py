"""Action on a topic: send a test message, or publish it to the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_POST

from psqlmessages.client import calls, stream_calls
from psqlmessages.models import Subscription, Topic
from psqlmessages.models.names import isolate, list_names
from psqlmessages.models.rules import database
from psqlmessages.monitor.access import SEND_TEST_MESSAGES
from psqlmessages.monitor.actions import Action, Fields, field_value, perform, read_body
from psqlmessages.monitor.formats import MAX_NAMES
from psqlmessages.monitor.names import object_url
from psqlmessages.monitor.views import require_monitor_access, require_name
from psqlmessages.orm import fetch, own_ident, run
from psqlmessages.wire import EncodedBody

_LISTENERS: Final = "SELECT v.listeners FROM messages.list_topics(%s::text[]) AS v"


def _describe(topic: Topic, fields: Fields) -> Sequence[str]:
    size = len(EncodedBody.of(read_body(fields)).text.encode())
    text = ngettext(
        "A message of {size:,} byte will be sent to the topic as the node {node}.",
        "A message of {size:,} bytes will be sent to the topic as the node {node}.",
        size,
    )
    rows = fetch(_LISTENERS, [[topic.name]], database())
    subscriptions = Subscription.objects.using(database()).filter(topic=topic.name, is_alive=True)
    subscribers = subscriptions.values_list("ident", flat=True)[: MAX_NAMES + 1]
    listeners = list_names(rows[0][0] if rows else [], MAX_NAMES)
    sentences = [
        text.format(size=size, node=isolate(own_ident())),
        _("Nodes that listen now: {nodes}.").format(nodes=listeners or _("none")),
    ]
    if _is_published(fields):
        sentences += [
            _("It will be stored, and these subscriptions will read it: {nodes}.").format(
                nodes=list_names(subscribers, MAX_NAMES) or _("none")
            ),
            _("Their nodes will process it like any other message."),
        ]
    return sentences


def _send(topic: Topic, fields: Fields) -> str:
    body = read_body(fields)
    if _is_published(fields):
        published = run(stream_calls.publish(own_ident(), topic.name, body), database())
        return _("Published a test message: stored as {id}.").format(id=published.id)
    run(calls.topic_send_as(own_ident(), topic.name, body, ""), database())
    return _("Sent a test message.")


def _is_published(fields: Fields) -> bool:
    return field_value(fields, "as") == "stored"


SEND: Final[Action[Topic]] = Action(
    gettext_lazy("Send a test message"), (SEND_TEST_MESSAGES,), _describe, _send
)


@require_POST
@require_monitor_access
def send_test_message(request: HttpRequest) -> HttpResponse:
    """Send a message to the topic in ``?topic=``, after a confirmation."""
    name = require_name(request.GET.get("topic", ""))
    topic = Topic.objects.using(database()).filter(name=name).first() or Topic(name=name)
    return perform(request, SEND, topic, object_url("topic", name))
