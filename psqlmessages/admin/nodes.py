"""Connected nodes in the admin, with an action to disconnect them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.models import DELETION
from django.db import OperationalError
from django.db.models import BooleanField, Case, Prefetch, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse

from psqlmessages.admin import base
from psqlmessages.admin.base import RoleFilter, column, listed
from psqlmessages.admin.open_transactions import OpenTransactionsMixin
from psqlmessages.models import Client, Membership, Observation

_SHOWN = 10


class LivenessFilter(admin.SimpleListFilter):
    """Nodes whose connection is open, or gone."""

    title = parameter_name = "connection"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the two states."""
        return [("there", "Open"), ("gone", "Closed")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Client]) -> QuerySet[Client]:
        """Keep the nodes in the chosen state."""
        return (
            queryset if self.value() is None else queryset.filter(is_live=self.value() == "there")
        )


class ClientAdmin(OpenTransactionsMixin):
    """The registered nodes: read-only, with an action to disconnect them."""

    list_display = ("ident", "role", "connected_at", "connection", "listens", "sends", "observes")
    list_filter = (LivenessFilter, RoleFilter)
    search_fields = ("ident",)
    search_help_text = "Searches the ident."
    fields = ("ident", "role", "connected_at", "connection", "listens", "sends", "observes")
    readonly_fields = fields
    actions = ("disconnect",)

    # A node registers itself, and the action disconnects it with all consequences, in SQL.
    refused = ("add", "change", "delete")
    listens = column("listens to", lambda found: _topics(found, Membership.Kind.LISTEN))
    sends = column("sends to", lambda found: _topics(found, Membership.Kind.NOTIFY))
    observes = column(
        "observes", lambda found: _listed(each.pattern for each in found.observations.all())
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

    @admin.display(description="session", ordering="session__pid")
    def connection(self, client: Client) -> str:
        """Describe the PostgreSQL connection."""
        pid = f"pid {client.session.pid}"
        return pid if client.is_live else f"closed (was {pid})"

    def context_of(self, request: HttpRequest, found: Client) -> dict[str, Any]:
        """Return whether to show the button that disconnects a node."""
        return {"may_disconnect": self.has_disconnect_permission(request)}

    @admin.action(description="Disconnect selected nodes", permissions=["disconnect"])
    def disconnect(self, request: HttpRequest, queryset: QuerySet[Client]) -> HttpResponse | None:
        """Ask for confirmation, then disconnect the nodes; others of their sessions stay."""
        clients = list(queryset)
        if "confirmed" not in request.POST:
            return self.page(request, "client/disconnect", "Disconnect nodes", clients=clients)
        self._disconnect(request, clients)
        return None

    def _disconnect(self, request: HttpRequest, clients: Iterable[Client]) -> None:
        ended, gone = [], []
        try:
            for client in clients:
                is_ended = client.is_live and base.disconnect(client.pk)
                (ended if is_ended else gone).append(client)
        except OperationalError as error:
            self.report(request, error)
        if gone:
            # A node whose connection has ended has crashed: report it.
            base.rows("SELECT messages.evaluate()")
        texts = ((client, DELETION, f"Disconnected from {client.session}.") for client in ended)
        base.log(request, texts)
        if ended:
            self.message_user(request, f"Disconnected: {_listed(ended)}.", messages.SUCCESS)
        if gone:
            self.message_user(request, f"Already disconnected: {_listed(gone)}.", messages.INFO)


def _topics(client: Client, kind: str) -> str:
    return _listed(entry.topic for entry in client.memberships.all() if entry.kind == kind)


def _listed(names: Iterable[Any]) -> str:
    return listed(names, _SHOWN) or "-"
