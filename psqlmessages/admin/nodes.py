"""Registered nodes in the admin, with an action to disconnect them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from django.contrib import admin, messages
from django.contrib.admin.models import DELETION
from django.db import OperationalError, transaction
from django.db.models import Prefetch, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin import base
from psqlmessages.admin.base import column
from psqlmessages.admin.lists import NameFilter, StateFilter, time_column
from psqlmessages.admin.open_transactions import OpenTransactionsAdmin
from psqlmessages.models import Client, Membership, Observation
from psqlmessages.models.names import list_names

_MAX_NAMES = 10


class ConnectionFilter(StateFilter):
    """Filter nodes by the state of their connection: open or closed."""

    title = _("connection")
    parameter_name = "connection"
    states: ClassVar = {
        "open": (_("Open"), Q(is_live=True)),
        "closed": (_("Closed"), Q(is_live=False)),
    }


@admin.register(Client)
class ClientAdmin(OpenTransactionsAdmin):
    """The registered nodes, read-only. An action disconnects them."""

    list_display = ("ident", "role", "connected", "session_text", "listens", "sends", "observes")
    list_filter = (ConnectionFilter, ("role", NameFilter))
    search_fields = ("ident",)
    search_help_text = _("Searches the node.")
    fields = list_display
    readonly_fields = fields
    actions = ("disconnect",)

    # Nodes register themselves. To disconnect one, the action calls an SQL function.
    denied_permissions = ("add", "change", "delete")
    connected = time_column(_("connected at"), "connected_at")
    listens = column(_("listens to"), lambda client: _format_names(client.listened))
    sends = column(_("sends to"), lambda client: _format_names(client.sent))
    observes = column(_("observes"), lambda client: _format_names(client.observed))

    def has_disconnect_permission(self, request: HttpRequest) -> bool:
        """Return whether the user has the permission to delete nodes."""
        return request.user.has_perm("psqlmessages.delete_client")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Client]:
        """Read nodes with their topics and patterns, in a few statements."""
        patterns = Observation.objects.using(base.database()).order_by("pattern")
        return (
            super()
            .get_queryset(request)
            .select_related("session")
            .annotate(is_live=Q(session__in=base.LIVE_SESSIONS))
            .prefetch_related(
                _first_topics(Membership.Kind.LISTEN, "listened"),
                _first_topics(Membership.Kind.NOTIFY, "sent"),
                Prefetch("observations", patterns[: _MAX_NAMES + 1], to_attr="observed"),
            )
        )

    @admin.display(description=_("session"), ordering="session__pid")
    def session_text(self, client: Client) -> str:
        """Return the pid of the session; "closed (was PID)" if the session has ended."""
        pid = f"pid {client.session.pid}"
        return pid if client.is_live else _("closed (was {pid})").format(pid=pid)

    @admin.action(description=_("Disconnect selected nodes"), permissions=["disconnect"])
    def disconnect(self, request: HttpRequest, queryset: QuerySet[Client]) -> HttpResponse | None:
        """Ask for confirmation, then disconnect these nodes. Their sessions' other nodes stay."""
        clients = list(queryset)
        if "confirmed" not in request.POST:
            return self.page(request, "client/disconnect", _("Disconnect nodes"), clients=clients)
        disconnected, closed = [], []
        try:
            for client in clients:
                with transaction.atomic(using=base.database()):
                    is_disconnected = client.is_live and base.disconnect(client.pk)
                    if is_disconnected:
                        text = f"Disconnected from {client.session}."
                        base.record_history(request, [(client, DELETION, text)])
                (disconnected if is_disconnected else closed).append(client)
        except OperationalError as error:
            text = base.error_text(error, _("Not all nodes were disconnected: {error}."))
            self.message_user(request, text, messages.ERROR)
        if closed:
            # Housekeeping ends nodes without a connection, and sends their events.
            base.fetch_rows("SELECT messages.evaluate()")
        if disconnected:
            text = _("Disconnected: {nodes}.").format(nodes=list_names(disconnected, _MAX_NAMES))
            self.message_user(request, text, messages.SUCCESS)
        if closed:
            text = _("Already disconnected: {nodes}.").format(nodes=list_names(closed, _MAX_NAMES))
            self.message_user(request, text, messages.INFO)
        return None


def _first_topics(kind: str, attribute: str) -> Prefetch:
    """Prefetch the first topics of each node into an attribute. A node may have thousands."""
    members = Membership.objects.using(base.database()).filter(kind=kind)
    members = members.select_related("topic").order_by("topic__name")
    return Prefetch("memberships", members[: _MAX_NAMES + 1], to_attr=attribute)


def _format_names(entries: Iterable[Membership | Observation]) -> str:
    """List the first topics or patterns; "-" without any."""
    names = (each.topic if isinstance(each, Membership) else each.pattern for each in entries)
    return list_names(names, _MAX_NAMES) or "-"
