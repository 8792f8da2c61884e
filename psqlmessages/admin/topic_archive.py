"""Topic archive: the mark that a topic's messages are kept until the pipeline has archived them."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_POST

from psqlmessages import archiving
from psqlmessages.admin import calls, history
from psqlmessages.exceptions import IdentNotExistent, MessagesError, NotAuthorized
from psqlmessages.models import Subscription, Topic

IDENT: Final = "pipeline.archive"


class ArchiveMixin:
    """The button of a topic's page that sets the mark, or takes it away."""

    def get_urls(self) -> list[URLPattern]:
        """Return the admin's own addresses, after that of the button."""
        view = self.admin_site.admin_view(require_POST(self.archive_view))
        return [
            path("<int:key>/archive/", view, name="psqlmessages_topic_archive"),
            *super().get_urls(),
        ]

    def archive_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Mark the topic where the button says so, else take the mark away."""
        topic = Topic.objects.filter(pk=key).first()
        if topic is None:
            raise Http404("There is no such topic.")
        if not self.has_change_permission(request, topic):
            raise PermissionDenied
        wanted = request.POST.get("archive") == "yes"
        text, level = _set(topic.name, is_marked=wanted)
        if level == messages.SUCCESS:
            history.log(request, [(topic, CHANGE, text)])
        self.message_user(request, text, level)
        return HttpResponseRedirect(reverse("admin:psqlmessages_topic_change", args=[key]))


def mark_of(topic: Topic) -> dict[str, Any]:
    """Return whether a topic is marked, and up to which id it is archived."""
    mark = Subscription.objects.filter(ident=IDENT, topic=topic.name).first()
    return {"is_set": mark is not None, "position": mark.position if mark else None}


def _set(topic: str, *, is_marked: bool) -> tuple[str, int]:
    """Set or take away; return what to say, and how loud."""
    using = calls.database()
    try:
        change = archiving.mark if is_marked else archiving.unmark
        with transaction.atomic(using=using):
            calls.bound_waits()
            is_new = change(topic, using)
    except (IdentNotExistent, NotAuthorized):
        rule = f"role {calls.role()}, ident pipeline.*, type Topic, destination *, mode R"
        text = f"Nothing was changed: the archive may not read {topic}. Add a rule: {rule}."
        return text, messages.ERROR
    except MessagesError as error:
        return f"Nothing was changed: {error}.", messages.ERROR
    except OperationalError as error:
        return calls.refusal(error), messages.ERROR
    if not is_new:
        return "It was so already.", messages.INFO
    if is_marked:
        return "From now on its messages are kept until they are archived.", messages.SUCCESS
    return "Its messages are not kept for the archive any more.", messages.SUCCESS
