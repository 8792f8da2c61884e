"""Subscriptions in the admin: reader, topic, backlog, expiry."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar

from django.contrib import admin
from django.db.models import DateTimeField, ExpressionWrapper, F, Q, QuerySet, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin.base import BaseAdmin
from psqlmessages.admin.lists import StateFilter, time_column
from psqlmessages.models import Subscription

_MAX_COUNTED = 1000
_BACKLOG = """(
    SELECT count(*) FROM (
        SELECT FROM psqlmessages_topic AS t
        JOIN psqlmessages_streammessage AS m ON m.topic_id = t.id
        WHERE t.name = psqlmessages_subscription.topic
          AND m.id > psqlmessages_subscription.position
        LIMIT %s
    ) AS unread
)"""


class SubscriptionStateFilter(StateFilter):
    """Filter subscriptions by state: alive or expired."""

    title = _("state")
    parameter_name = "state"
    states: ClassVar = {
        "alive": (_("Alive"), Q(expires_at__gt=Now())),
        "expired": (_("Expired"), Q(expires_at__lte=Now())),
    }


@admin.register(Subscription)
class SubscriptionAdmin(BaseAdmin):
    """The subscriptions. Nodes create, renew and end them."""

    list_display = ("ident", "topic", "backlog", "expires", "state", "last_read")
    list_filter = (SubscriptionStateFilter,)
    search_fields = ("ident", "topic")
    search_help_text = _("Searches the node and the topic.")
    fields = ("ident", "topic", "backlog", "state", "expires", "timeout", "started", "last_read")
    readonly_fields = fields

    # Nodes create subscriptions, and unused subscriptions expire. If a user changed a position,
    # the subscription could miss messages.
    denied_permissions = ("add", "change", "delete")
    expires = time_column(_("expires"), "expires_at")
    started = time_column(_("started at"), "started_at")
    last_read = time_column(_("last read"), "pinged_at")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Subscription]:
        """Read subscriptions with their expiry and their backlog, counted up to a limit."""
        expires_at = ExpressionWrapper(
            F("pinged_at") + F("timeout") * Value(timedelta(seconds=1)),
            output_field=DateTimeField(),
        )
        # The ORM cannot count up to a limit per row.
        unread = RawSQL(_BACKLOG, [_MAX_COUNTED + 1])  # noqa: S611 - contains no input
        return super().get_queryset(request).annotate(expires_at=expires_at, unread=unread)

    @admin.display(description=_("backlog"))
    def backlog(self, subscription: Subscription) -> str:
        """Return the number of unread messages; "-" if the subscription has expired."""
        if _is_expired(subscription):
            return "-"
        if subscription.unread > _MAX_COUNTED:
            return _("over {number}").format(number=f"{_MAX_COUNTED:,}")
        return f"{subscription.unread:,}"

    @admin.display(description=_("state"))
    def state(self, subscription: Subscription) -> str:
        """Return whether the subscription is alive, and whether it has missed messages."""
        if _is_expired(subscription):
            return _("expired")
        return _("alive") if subscription.is_recovered else _("alive, has missed messages")


def _is_expired(subscription: Subscription) -> bool:
    return subscription.expires_at <= datetime.now(subscription.expires_at.tzinfo)
