"""Connected nodes in the admin, with an action to disconnect them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.models import DELETION
from django.db import OperationalError
from django.db.models import BooleanField, Case, Prefetch, Q, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin import base
from psqlmessages.admin.base import RoleFilter, StateFilter, column, list_names
from psqlmessages.admin.open_transactions import OpenTransactionsMixin
from psqlmessages.models import Client, Membership, Observation

_MAX_NAMES = 10


class ConnectionFilter(StateFilter):
    """Nodes by the state of their connection: open or closed."""

    title = _("connection")
    parameter_name = "connection"
    states: ClassVar = {
        "open": (_("Open"), Q(is_live=True)),
        "closed": (_("Closed"), Q(is_live=False)),
    }


@admin.register(Client)
class ClientAdmin(OpenTransactionsMixin):
    """The registered nodes: read-only, with an action to disconnect them."""

    list_display = ("ident", "role", "connected_at", "connection", "listens", "sends", "observes")
    list_filter = (ConnectionFilter, RoleFilter)
    search_fields = ("ident",)
    search_help_text = _("Searches the ident.")
    fields = ("ident", "role", "connected_at", "connection", "listens", "sends", "observes")
    readonly_fields = fields
    actions = ("disconnect",)

    # Nodes register themselves. To disconnect one, the action calls an SQL function.
    denied_permissions = ("add", "change", "delete")
    listens = column(_("listens to"), lambda found: _topics(found, Membership.Kind.LISTEN))
    sends = column(_("sends to"), lambda found: _topics(found, Membership.Kind.NOTIFY))
    observes = column(
        _("observes"),
        lambda found: _format_names(each.pattern for each in found.observations.all()),
    )

    def has_disconnect_permission(self, request: HttpRequest) -> bool:
        """Return whether the user has the permission to delete nodes."""
        return request.user.has_perm("psqlmessages.delete_client")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Client]:
        """Read nodes with their topics and patterns, in a few statements."""
        memberships = Membership.objects.select_related("topic").order_by("topic__name")
        live = When(session__in=base.live_sessions(), then=Value(True))
        return (
            super()
            .get_queryset(request)
            .select_related("session")
            .annotate(is_live=Case(live, default=Value(False), output_field=BooleanField()))
            .prefetch_related(
                Prefetch("memberships", memberships),
                Prefetch("observations", Observation.objects.order_by("pattern")),
            )
        )

    @admin.display(description=_("session"), ordering="session__pid")
    def connection(self, client: Client) -> str:
        """Describe the PostgreSQL connection."""
        pid = f"pid {client.session.pid}"
        return pid if client.is_live else _("closed (was {pid})").format(pid=pid)

    def object_context(self, request: HttpRequest, obj: Client) -> dict[str, Any]:
        """Return whether to show the button that disconnects a node."""
        return {"may_disconnect": self.has_disconnect_permission(request)}

    @admin.action(description=_("Disconnect selected nodes"), permissions=["disconnect"])
    def disconnect(self, request: HttpRequest, queryset: QuerySet[Client]) -> HttpResponse | None:
        """Ask for confirmation, then disconnect the nodes, but not others of their sessions."""
        clients = list(queryset)
        if "confirmed" not in request.POST:
            return self.page(request, "client/disconnect", _("Disconnect nodes"), clients=clients)
        self._disconnect(request, clients)
        return None

    def _disconnect(self, request: HttpRequest, clients: Iterable[Client]) -> None:
        disconnected, closed = [], []
        try:
            for client in clients:
                if client.is_live and base.disconnect(client.pk):
                    disconnected.append(client)
                else:
                    closed.append(client)
        except OperationalError as error:
            self.report_transient_error(request, error)
        if closed:
            # A node without a connection has crashed: housekeeping sends the event.
            base.fetch_rows("SELECT messages.evaluate()")
        text = "Disconnected from {}."
        base.record_history(
            request, ((each, DELETION, text.format(each.session)) for each in disconnected)
        )
        if disconnected:
            text = _("Disconnected: {nodes}.").format(nodes=_format_names(disconnected))
            self.message_user(request, text, messages.SUCCESS)
        if closed:
            text = _("Already disconnected: {nodes}.").format(nodes=_format_names(closed))
            self.message_user(request, text, messages.INFO)


def _topics(client: Client, kind: str) -> str:
    return _format_names(entry.topic for entry in client.memberships.all() if entry.kind == kind)


def _format_names(names: Iterable[Any]) -> str:
    return list_names(names, _MAX_NAMES) or "-"
