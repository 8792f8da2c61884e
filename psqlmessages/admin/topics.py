"""Topics in the admin: who may, who does now, and what happens, live."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin import ModelAdmin
from django.db.models import Count, IntegerField, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse

from psqlmessages.admin import calls
from psqlmessages.admin.held_up import HeldUpMixin
from psqlmessages.admin.topic_archive import ArchiveMixin, mark_of
from psqlmessages.models import Auth, Client, Membership, Topic


class TopicAdmin(HeldUpMixin, ArchiveMixin, ModelAdmin):
    """The topics. They are made by rules, and by nodes that a pattern lets use them."""

    list_display = ("name", "listeners_now", "notifiers_now", "subscriptions", "retention")
    search_fields = ("name",)
    search_help_text = "Looks for a part of the name."
    fields = ("name", "retention")
    readonly_fields = ("name",)

    class Media:
        css: ClassVar = {"all": ["psqlmessages/admin/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody: a rule that names a topic makes it."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Topic | None = None) -> bool:
        """Nobody: nodes and rules may mean it; without a listener it costs nothing."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Topic]:
        """Read each topic with its numbers of listeners and notifiers."""
        live = calls.live_sessions()
        return (
            super()
            .get_queryset(request)
            .defer("channels", "wakes")
            .annotate(
                listening=_number(Membership.Kind.LISTEN, live),
                sending=_number(Membership.Kind.NOTIFY, live),
            )
        )

    @admin.display(description="listeners", ordering="listening")
    def listeners_now(self, topic: Topic) -> int:
        """Tell how many nodes listen."""
        return topic.listening

    @admin.display(description="notifiers", ordering="sending")
    def notifiers_now(self, topic: Topic) -> int:
        """Tell how many nodes send."""
        return topic.sending

    def save_model(self, request: HttpRequest, obj: Topic, form: ModelForm, change: bool) -> None:
        """Write what was edited: the rest of the row is SQL's, and may have changed meanwhile."""
        calls.bound_waits()
        obj.save(update_fields=form.changed_data)

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show one topic: its status, which the page keeps current by itself, and the rules."""
        topic = self.get_object(request, object_id)
        if topic is not None:
            extra = {
                "status": {kind.value: _idents(topic, kind) for kind in Membership.Kind},
                "rules": _rules_for(topic.name),
                "may_view_rules": request.user.has_perm("psqlmessages.view_auth"),
                "archive": mark_of(topic),
                "may_change": self.has_change_permission(request, topic),
                "may_watch": request.user.has_perm("psqlmessages.view_monitor"),
            }
            kwargs["extra_context"] = {**extra, **(kwargs.get("extra_context") or {})}
        return super().change_view(request, object_id, *args, **kwargs)


def _number(kind: str, live: list[int]) -> Coalesce:
    members = (
        Membership.objects.filter(topic=OuterRef("pk"), kind=kind, client__session__in=live)
        .order_by()
        .values("topic")
        .annotate(number=Count("pk"))
        .values("number")
    )
    return Coalesce(Subquery(members), 0, output_field=IntegerField())


def _idents(topic: Topic, kind: str) -> list[str]:
    members = Client.objects.filter(
        memberships__topic=topic, memberships__kind=kind, session__in=calls.live_sessions()
    )
    return list(members.order_by("ident").values_list("ident", flat=True))


def _rules_for(name: str) -> QuerySet[Auth]:
    """Return the rules that name a topic, or a pattern of it."""
    return Auth.objects.filter(type="Topic", dest__in=calls.patterns(name))
