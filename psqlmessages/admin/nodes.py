"""Connected nodes in the admin, with an action to disconnect them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.models import DELETION
from django.db import OperationalError
from django.db.models import BooleanField, Case, Prefetch, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from psqlmessages.admin import base
from psqlmessages.admin.base import RoleFilter
from psqlmessages.admin.open_transactions import OpenTransactionsMixin
from psqlmessages.models import Client, Membership, Observation

_SHOWN = 10


class LivenessFilter(admin.SimpleListFilter):
    """Nodes whose connection is open, or gone."""

    title = "connection"
    parameter_name = "connection"

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

    class Media:
        css: ClassVar = {"all": ["psqlmessages/admin/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: a node registers itself."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Client | None = None) -> bool:
        """Return False: there is nothing to edit."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Client | None = None) -> bool:
        """Return False: the action disconnects nodes with all consequences, in SQL."""
        return False

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

    @admin.display(description="listens to")
    def listens(self, client: Client) -> str:
        """List the topics that the node listens to."""
        return _topics(client, Membership.Kind.LISTEN)

    @admin.display(description="sends to")
    def sends(self, client: Client) -> str:
        """List the topics that the node sends to."""
        return _topics(client, Membership.Kind.NOTIFY)

    @admin.display(description="observes")
    def observes(self, client: Client) -> str:
        """List the topics and patterns that the node observes."""
        return _listed([observation.pattern for observation in client.observations.all()])

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show one node, with a button to disconnect it if the user may."""
        context = {
            "may_disconnect": self.has_disconnect_permission(request),
            "checkbox": helpers.ACTION_CHECKBOX_NAME,
        }
        kwargs["extra_context"] = {**context, **(kwargs.get("extra_context") or {})}
        return super().change_view(request, object_id, *args, **kwargs)

    @admin.action(description="Disconnect selected nodes", permissions=["disconnect"])
    def disconnect(self, request: HttpRequest, queryset: QuerySet[Client]) -> HttpResponse | None:
        """Ask for confirmation, then disconnect the nodes; others of their sessions stay."""
        clients = list(queryset)
        if "confirmed" in request.POST:
            self._disconnect(request, clients)
            return None
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": "Disconnect nodes",
            "opts": self.opts,
            "media": self.media,
            "clients": clients,
            "checkbox": helpers.ACTION_CHECKBOX_NAME,
        }
        template = "admin/psqlmessages/client/disconnect.html"
        return TemplateResponse(request, template, context)

    def _disconnect(self, request: HttpRequest, clients: Iterable[Client]) -> None:
        ended, gone = [], []
        try:
            for client in clients:
                is_ended = client.is_live and base.disconnect(client.pk)
                (ended if is_ended else gone).append(client)
        except OperationalError as error:
            self.message_user(request, base.refusal(error), messages.ERROR)
        if gone:
            # A node whose connection has ended has crashed: report it.
            base.evaluate()
        texts = ((client, DELETION, f"Disconnected from {client.session}.") for client in ended)
        base.log(request, texts)
        if ended:
            idents = _listed([client.ident for client in ended])
            self.message_user(request, f"Disconnected: {idents}.", messages.SUCCESS)
        if gone:
            idents = _listed([client.ident for client in gone])
            self.message_user(request, f"Already disconnected: {idents}.", messages.INFO)


def _topics(client: Client, kind: str) -> str:
    return _listed([entry.topic.name for entry in client.memberships.all() if entry.kind == kind])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "-"
