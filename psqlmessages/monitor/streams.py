"""Pages of streams: all subscriptions, one stream, and actions on subscriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.utils.timezone import get_current_timezone_name
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_POST, require_safe

from psqlmessages import orm
from psqlmessages.client import stream_calls
from psqlmessages.models import Subscription
from psqlmessages.models.names import isolate
from psqlmessages.models.rules import database
from psqlmessages.monitor.actions import (
    Action,
    Fields,
    allowed_actions,
    field_value,
    parse_time,
    perform,
)
from psqlmessages.monitor.formats import format_age, format_count
from psqlmessages.monitor.listing import (
    Column,
    ListDefinition,
    ListPage,
    ListQuery,
    check_parameters,
    fetch,
    read_shared,
    render_page,
)
from psqlmessages.monitor.names import object_url
from psqlmessages.monitor.queries import STREAMS_DISK_SIZE
from psqlmessages.monitor.stream_status import (
    SubscriptionStatus,
    count_between,
    first_position,
    last_position,
    position_at,
    read_stream_status,
    read_subscriptions,
)
from psqlmessages.monitor.views import (
    admin_page,
    common_context,
    require_monitor_access,
    require_name,
)

_LIST: Final = ListDefinition(
    "subscriptions",
    gettext_lazy("Streams"),
    (
        Column(gettext_lazy("Subscription of"), "node"),
        Column(gettext_lazy("Stream"), "stream"),
        Column(gettext_lazy("State")),
        Column(gettext_lazy("Unread"), kind="number"),
        Column(gettext_lazy("Lag"), "lag", "number"),
        Column(gettext_lazy("Last read"), "read", "wide"),
        Column(gettext_lazy("Expires"), "expires", "wide"),
    ),
    "-lag",
    {
        "alive": gettext_lazy("alive"),
        "silent": gettext_lazy("silent"),
        "expired": gettext_lazy("expired"),
    },
)


@require_safe
@require_monitor_access
def streams(request: HttpRequest) -> HttpResponse:
    """Show all subscriptions, by default the largest lag first; or the stream in ``?name=``."""
    if "name" in request.GET:
        return stream(request)
    return _LIST.render(request, _read_page, common_context(request))


def _read_page(query: ListQuery) -> ListPage:
    subscriptions, total = read_subscriptions(
        search=query.search,
        state=query.state,
        order=query.column,
        is_descending=query.is_descending,
        offset=query.offset,
    )
    disk_size = fetch(f"SELECT {STREAMS_DISK_SIZE}")[0][0]
    return ListPage(query, subscriptions, total, disk_size)


@require_safe
@require_monitor_access
def stream(request: HttpRequest, name: str = "") -> HttpResponse:
    """Show one stream with its subscriptions."""
    check_parameters(request, ["name"])
    name = require_name(name or request.GET.get("name", ""))
    status = read_shared(("stream", name), lambda: read_stream_status(name))
    subscriptions, total = read_shared(
        ("subscriptions of", name), lambda: read_subscriptions(topic=name)
    )
    if status is None and not subscriptions:
        raise Http404("There is no stream with this name.")
    context = {
        **common_context(request),
        "stream": name,
        "status": status,
        "subscriptions": subscriptions,
        "total": total,
        "topic_url": object_url("topic", name),
        "admin_topics_url": admin_page(request, "topic", {"q": name}),
        "allowed": allowed_actions(request, ACTIONS),
        "zone": get_current_timezone_name(),
    }
    fragments = {"stream": "psqlmessages/monitor/_stream.html"}
    return render_page(request, "psqlmessages/monitor/stream.html", fragments, context)


# Actions


def _read_status(subscription: Subscription) -> SubscriptionStatus:
    found, _total = read_subscriptions(topic=subscription.topic, node=subscription.ident)
    if not found:
        raise ValidationError(_("The subscription has ended in the meantime."))
    return found[0]


def _texts(status: SubscriptionStatus) -> dict[str, Any]:
    return {
        "node": isolate(status.node),
        "stream": isolate(status.topic),
        "number": format_count(status.unread or 0),
        "age": format_age(status.read_age),
        "timeout": status.timeout,
    }


def _new_position(subscription: Subscription, fields: Fields) -> int:
    topic = subscription.topic
    match field_value(fields, "to"):
        case "start":
            return first_position(topic)
        case "end":
            return last_position(topic)
        case "time":
            return position_at(topic, parse_time(field_value(fields, "time")))
    raise ValidationError(_("Choose where to move the position: start, end or time."))


def _describe_move(subscription: Subscription, position: int, *, is_done: bool = False) -> str:
    """Return a sentence with the number of messages that are read again or skipped."""
    names = {"node": isolate(subscription.ident), "stream": isolate(subscription.topic)}
    old = subscription.position
    number = count_between(subscription.topic, min(old, position), max(old, position))
    values = {**names, "number": format_count(number), "old": old, "new": position}
    if position < old:
        text = ngettext(
            "%(node)s will read %(number)s message of %(stream)s again.",
            "%(node)s will read %(number)s messages of %(stream)s again.",
            number,
        )
        done = ngettext(
            "Moved from %(old)d to %(new)d: %(number)s message is read again.",
            "Moved from %(old)d to %(new)d: %(number)s messages are read again.",
            number,
        )
    else:
        text = ngettext(
            "%(node)s will skip %(number)s message of %(stream)s and never read it.",
            "%(node)s will skip %(number)s messages of %(stream)s and never read them.",
            number,
        )
        done = ngettext(
            "Moved from %(old)d to %(new)d: %(number)s message is skipped.",
            "Moved from %(old)d to %(new)d: %(number)s messages are skipped.",
            number,
        )
    return (done if is_done else text) % values


def _describe_reader(status: SubscriptionStatus) -> str:
    if status.state == "expired":
        text = _("The subscription has expired. It starts again, with the timeout %(timeout)d s.")
    elif status.state == "alive":
        text = _("%(node)s last read %(age)s ago. It will continue at the new position.")
    else:
        text = _("%(node)s has not read for %(age)s. It will continue at the new position.")
    return text % _texts(status)


def _describe_reset(subscription: Subscription, fields: Fields) -> list[str]:
    position = _new_position(subscription, fields)
    status = _read_status(subscription)
    return [_describe_move(subscription, position), _describe_reader(status)]


def _reset(subscription: Subscription, fields: Fields) -> str:
    """Move the position with a call as the subscription's node. A rule must allow the call."""
    current = _lock(subscription)
    status = _read_status(current)
    position = _new_position(current, fields)
    text = _describe_move(current, position, is_done=True)
    move = stream_calls.subscribe_from(current.ident, {current.topic: position}, current.timeout)
    orm.run(move, database())
    if status.state != "expired":
        # The call has recorded a read, but the node has not read: restore the last read.
        Subscription.objects.using(database()).filter(pk=current.pk).update(
            pinged_at=current.pinged_at, is_recovered=current.is_recovered
        )
    orm.fetch(
        "SELECT messages._notify_subscribers(t.name::text, t.subscriber_channels)"
        " FROM psqlmessages_topic AS t WHERE t.name = %s",
        [current.topic],
        database(),
    )
    return text


def _describe_deletion(subscription: Subscription, _fields: Fields) -> list[str]:
    status = _read_status(subscription)
    text = ngettext(
        "%(node)s will not read %(number)s unread message of %(stream)s.",
        "%(node)s will not read %(number)s unread messages of %(stream)s.",
        status.unread or 0,
    )
    sentences = [
        text % _texts(status),
        _("A message is removed unless another subscription or the retention needs it."),
    ]
    if status.state == "alive":
        text = _(
            "%(node)s last read %(age)s ago. If this node still runs, it will subscribe again, at"
            " the end of the stream."
        )
        sentences.append(text % _texts(status))
    return sentences


def _delete(subscription: Subscription, _fields: Fields) -> str:
    status = _read_status(_lock(subscription))
    orm.run(stream_calls.unsubscribe(status.node, status.topic), database())
    return ngettext(
        "Deleted the subscription of %(node)s to %(stream)s, with %(number)s unread message.",
        "Deleted the subscription of %(node)s to %(stream)s, with %(number)s unread messages.",
        status.unread or 0,
    ) % _texts(status)


def _lock(subscription: Subscription) -> Subscription:
    try:
        return Subscription.objects.using(database()).select_for_update().get(pk=subscription.pk)
    except Subscription.DoesNotExist:
        raise ValidationError(_("The subscription has ended in the meantime.")) from None


ACTIONS: Final[Mapping[str, Action[Subscription]]] = {
    "reset": Action(
        gettext_lazy("Reset the position"),
        ("psqlmessages.change_subscription",),
        _describe_reset,
        _reset,
        is_destructive=True,
    ),
    "delete": Action(
        gettext_lazy("Delete the subscription"),
        ("psqlmessages.delete_subscription",),
        _describe_deletion,
        _delete,
        is_destructive=True,
    ),
}


@require_POST
@require_monitor_access
def operate(request: HttpRequest, pk: int, action: str) -> HttpResponse:
    """Reset the position of a subscription, or delete it, after a confirmation."""
    if action not in ACTIONS:
        raise Http404("There is no such action.")
    subscription = get_object_or_404(Subscription.objects.using(database()), pk=pk)
    back_url = object_url("stream", subscription.topic)
    return perform(request, ACTIONS[action], subscription, back_url)
