"""Topics in the admin: permissions, senders and listeners, live messages."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, transaction
from django.db.models import Count, IntegerField, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.forms import ModelForm
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_POST

from psqlmessages import archive_marks
from psqlmessages.admin import base
from psqlmessages.admin.base import HeldUpMixin
from psqlmessages.exceptions import IdentNotExistent, MessagesError, NotAuthorized
from psqlmessages.models import Auth, Client, Membership, Subscription, Topic

# Topic archive: a mark that stores a topic's messages until the pipeline has archived them

IDENT: Final = "pipeline.archive"


class ArchiveMixin:
    """The button of a topic's page that sets or removes the mark."""

    def get_urls(self) -> list[URLPattern]:
        """Add the URL of the button before the admin's own."""
        view = self.admin_site.admin_view(require_POST(self.archive_view))
        return [
            path("<int:key>/archive/", view, name="psqlmessages_topic_archive"),
            *super().get_urls(),
        ]

    def archive_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Set or remove the mark, as the button requests."""
        topic = Topic.objects.filter(pk=key).first()
        if topic is None:
            raise Http404("There is no such topic.")
        if not self.has_change_permission(request, topic):
            raise PermissionDenied
        wanted = request.POST.get("archive") == "yes"
        text, level = _set(topic.name, is_marked=wanted)
        if level == messages.SUCCESS:
            base.log(request, [(topic, CHANGE, text)])
        self.message_user(request, text, level)
        return HttpResponseRedirect(reverse("admin:psqlmessages_topic_change", args=[key]))


def mark_of(topic: Topic) -> dict[str, Any]:
    """Return whether a topic is marked, and the id up to which it is archived."""
    mark = Subscription.objects.filter(ident=IDENT, topic=topic.name).first()
    return {"is_set": mark is not None, "position": mark.position if mark else None}


def _set(topic: str, *, is_marked: bool) -> tuple[str, int]:
    """Set or remove the mark; return the message for the user, and its level."""
    using = base.database()
    try:
        change = archive_marks.mark if is_marked else archive_marks.unmark
        with transaction.atomic(using=using):
            base.bound_waits()
            is_new = change(topic, using)
    except (IdentNotExistent, NotAuthorized):
        rule = f"role {base.role()}, ident pipeline.*, type Topic, destination *, mode R"
        text = f"Nothing was changed: the archive may not read {topic}. Add a rule: {rule}."
        return text, messages.ERROR
    except MessagesError as error:
        return f"Nothing was changed: {error}.", messages.ERROR
    except OperationalError as error:
        return base.refusal(error), messages.ERROR
    if not is_new:
        return "Nothing changed.", messages.INFO
    if is_marked:
        return "From now on its messages are stored until they are archived.", messages.SUCCESS
    return "Its messages are no longer stored for the archive.", messages.SUCCESS


class TopicAdmin(HeldUpMixin, ArchiveMixin, ModelAdmin):
    """The topics. Rules create them, and so do nodes that a pattern allows to use them."""

    list_display = ("name", "listeners_now", "notifiers_now", "subscriptions", "retention")
    search_fields = ("name",)
    search_help_text = "Searches the name."
    fields = ("name", "retention")
    readonly_fields = ("name",)

    class Media:
        css: ClassVar = {"all": ["psqlmessages/admin/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: a rule that names a topic creates it."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Topic | None = None) -> bool:
        """Return False: nodes and rules may refer to it, and an unused topic costs nothing."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Topic]:
        """Read topics with their numbers of listeners and senders."""
        live = base.live_sessions()
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
        """Return the number of listeners."""
        return topic.listening

    @admin.display(description="notifiers", ordering="sending")
    def notifiers_now(self, topic: Topic) -> int:
        """Return the number of senders."""
        return topic.sending

    def save_model(self, request: HttpRequest, obj: Topic, form: ModelForm, change: bool) -> None:
        """Save only edited fields: SQL functions own the others, and may have changed them."""
        base.bound_waits()
        obj.save(update_fields=form.changed_data)

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show one topic with its status, which the page keeps current, and its rules."""
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
        memberships__topic=topic, memberships__kind=kind, session__in=base.live_sessions()
    )
    return list(members.order_by("ident").values_list("ident", flat=True))


def _rules_for(name: str) -> QuerySet[Auth]:
    """Return the rules that match a topic by name or pattern."""
    return Auth.objects.filter(type="Topic", dest__in=base.patterns(name))
