"""Actions on topics: send or publish a test message; add the rule to observe all topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from psqlmessages.client import calls, stream_calls
from psqlmessages.models import Auth, Subscription, Topic
from psqlmessages.models.names import isolate
from psqlmessages.models.rules import database
from psqlmessages.monitor.access import SEND_TEST_MESSAGES
from psqlmessages.monitor.actions import Action, Fields, field_value, log_action, perform, read_body
from psqlmessages.monitor.names import ident_pattern, object_url
from psqlmessages.monitor.views import ADD_RULE, require_monitor_access, require_topic_name
from psqlmessages.orm import direct_alias, fetch, own_ident, run
from psqlmessages.wire import EncodedBody

# The timeout in the monitor's rule has no effect, since observing stores no bodies.
_RULE_TIMEOUT_SECONDS: Final = 60
_MAX_NODES: Final = 10
_LISTENERS: Final = "SELECT v.listeners FROM messages.list_topics(%s::text[]) AS v"


def _describe(topic: Topic, fields: Fields) -> Sequence[str]:
    size = len(EncodedBody.of(read_body(fields)).text.encode())
    text = _("A message of {size:,} bytes will be sent to the topic as the node {node}.")
    rows = fetch(_LISTENERS, [[topic.name]], database())
    subscriptions = Subscription.objects.using(database()).filter(topic=topic.name, is_alive=True)
    subscribers = list(subscriptions.values_list("ident", flat=True)[: _MAX_NODES + 1])
    sentences = [
        text.format(size=size, node=isolate(own_ident())),
        _("Nodes that listen now: {nodes}.").format(nodes=_join_names(rows[0][0] if rows else [])),
    ]
    if _is_published(fields):
        sentences += [
            _("It will be stored, and these subscriptions will read it: {nodes}.").format(
                nodes=_join_names(subscribers)
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


def _join_names(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _MAX_NODES else ""
    return ", ".join(map(isolate, names[:_MAX_NODES])) + more or _("none")


SEND: Final[Action[Topic]] = Action(
    label=gettext_lazy("Send a test message"),
    permission=SEND_TEST_MESSAGES,
    describe=_describe,
    run=_send,
)


@require_POST
@require_monitor_access
def send_test_message(request: HttpRequest) -> HttpResponse:
    """Send a message to the topic in ``?topic=``, after a confirmation."""
    name = require_topic_name(request.GET.get("topic", ""))
    topic = Topic.objects.using(database()).filter(name=name).first() or Topic(name=name)
    return perform(request, SEND, topic, object_url("topic", name))


@require_POST
@require_monitor_access
def add_rule(request: HttpRequest) -> HttpResponse:
    """Add the rule that lets the monitor observe all topics; it takes effect within two seconds."""
    if not request.user.has_perm(ADD_RULE):
        text = _("The permission {permission} is missing.").format(permission=ADD_RULE)
        return JsonResponse({"error": text}, status=403)
    # The monitor observes on the connection for sessions that LISTEN, which may have another role.
    ((role,),) = fetch("SELECT session_user::text", [], direct_alias())
    try:
        rule, is_new = Auth.objects.get_or_create(
            role=role,
            ident=ident_pattern(),
            type=Auth.Type.TOPIC,
            dest="*",
            defaults={"mode": Auth.Mode.OBSERVE, "timeout": _RULE_TIMEOUT_SECONDS},
        )
    except DatabaseError as error:
        return JsonResponse({"error": str(error).strip()}, status=503)
    if is_new:
        log_action(request, rule, f"Added {rule}.", is_addition=True)
    elif rule.mode != Auth.Mode.OBSERVE:
        text = _("The rule exists with mode {mode}: change its mode to O.")
        text = text.format(mode=rule.mode)
        return JsonResponse({"error": text}, status=409)
    return JsonResponse({"error": ""})
