"""Topics in the admin: senders and listeners, rules, retention, archive mark."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, transaction
from django.db.models import Count, IntegerField, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import get_script_prefix
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from psqlmessages import archive_marks
from psqlmessages.admin import base
from psqlmessages.admin.base import BaseAdmin, LockTimeoutMixin, column, rules_context
from psqlmessages.exceptions import IdentNotExistent, MessagesError, NotAuthorized
from psqlmessages.models import Auth, Client, Membership, Subscription, Topic

# Archive mark of a topic: its messages are stored until the pipeline has archived them

ARCHIVE_IDENT: Final = "pipeline.archive"


def _set_mark(request: HttpRequest, topic: Topic, *, is_marked: bool) -> tuple[str, int]:
    """Set or remove the archive mark; return the text for the user, and the text's level."""
    using = base.database()
    if is_marked:
        change = archive_marks.mark
        done = _("From now on, messages of this topic are stored until they are archived.")
    else:
        change = archive_marks.unmark
        done = _("Messages of this topic are no longer stored for the archive.")
    try:
        with transaction.atomic(using=using):
            base.limit_lock_waits()
            if not change(topic.name, using):
                return _("Nothing changed."), messages.INFO
            base.record_history(request, [(topic, CHANGE, done)])
    except (IdentNotExistent, NotAuthorized):
        rule = f"role {base.current_role()}, node pipeline.*, type Topic, destination *, mode R"
        text = _("Nothing was changed: the archive may not read {topic}. Add a rule: {rule}.")
        return text.format(topic=topic.name, rule=rule), messages.ERROR
    except MessagesError as error:
        return _("Nothing was changed: {error}.").format(error=error), messages.ERROR
    except OperationalError as error:
        return base.error_text(error), messages.ERROR
    return done, messages.SUCCESS


@admin.register(Topic)
class TopicAdmin(LockTimeoutMixin, BaseAdmin):
    """The topics.

    Saving a rule creates the topic that it names. If the rule has a pattern, a node creates a topic
    when it first uses it.
    """

    list_display = ("name", "listeners_now", "senders_now", "subscriptions", "retention")
    search_fields = ("name",)
    search_help_text = _("Searches the name.")
    fields = ("name", "retention")
    readonly_fields = ("name",)

    # Rules and nodes create topics. Unused topics cost nothing, so there is no need to delete them.
    denied_permissions = ("add", "delete")
    fragments = ("rules",)
    pages: ClassVar = {"archive": "<int:key>/archive/"}
    # Sorting by these numbers would count the nodes of all topics.
    listeners_now = column(_("listeners"), lambda topic: topic.listening)
    senders_now = column(_("senders"), lambda topic: topic.sending)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Topic]:
        """Read topics with their numbers of listeners and senders."""
        return (
            super()
            .get_queryset(request)
            .defer("channels", "subscriber_channels")
            .annotate(
                listening=_count_nodes(Membership.Kind.LISTEN),
                sending=_count_nodes(Membership.Kind.NOTIFY),
            )
        )

    def save_model(self, request: HttpRequest, obj: Topic, form: ModelForm, change: bool) -> None:
        """Save only edited fields, because SQL functions may have changed the other fields."""
        base.limit_lock_waits()
        obj.save(update_fields=form.changed_data)

    def object_context(self, request: HttpRequest, obj: Topic) -> dict[str, Any]:
        """Return the live status, the rules and the archive mark of a topic, for its page."""
        subscriptions = Subscription.objects.using(base.database())
        mark = subscriptions.filter(ident=ARCHIVE_IDENT, topic=obj.name).first()
        return {
            "status": {kind.value: _idents(obj, kind) for kind in Membership.Kind},
            **rules_context(Auth.Type.TOPIC, obj.name),
            "archive": {"is_set": mark is not None, "position": mark.position if mark else None},
            "may_change": self.has_change_permission(request, obj),
            "socket_path": f"{get_script_prefix()}ws/monitor/",
        }

    @method_decorator(require_POST)
    def archive_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Set the archive mark if the form's field ``archive`` is "yes", or else remove it."""
        topic = get_object_or_404(Topic.objects.using(base.database()), pk=key)
        if not self.has_change_permission(request, topic):
            raise PermissionDenied("psqlmessages.change_topic")
        text, level = _set_mark(request, topic, is_marked=request.POST.get("archive") == "yes")
        self.message_user(request, text, level)
        return self.redirect("change", key)


def _count_nodes(kind: str) -> Coalesce:
    live = Membership.objects.filter(kind=kind, client__session__in=base.LIVE_SESSIONS)
    members = live.filter(topic=OuterRef("pk")).order_by().values("topic")
    numbers = members.annotate(number=Count("pk")).values("number")
    return Coalesce(Subquery(numbers), 0, output_field=IntegerField())


def _idents(topic: Topic, kind: str) -> list[str]:
    members = Client.objects.using(base.database()).filter(
        memberships__topic=topic, memberships__kind=kind, session__in=base.LIVE_SESSIONS
    )
    return list(members.order_by("ident").values_list("ident", flat=True))
