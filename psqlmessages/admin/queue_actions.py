"""Queue actions: pause, resume, drain and delete, with a question before what destroys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import CHANGE, DELETION
from django.db import OperationalError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from psqlmessages.admin import calls, history, queue_calls
from psqlmessages.models import Queue

_SHOWN = 20
_TEMPLATE = "admin/psqlmessages/queue/confirm.html"


class Act(NamedTuple):
    """What a button of a queue's page does: the action, and how it is called."""

    action: str
    label: str


class Question(NamedTuple):
    """What is asked before an action destroys something."""

    action: str
    title: str
    text: str
    button: str


_DRAINING = Question(
    "drain_selected",
    "Drain queues",
    "All elements that can be taken now will be removed, for good. Those that are reserved or not"
    " mature yet stay, and pushes go on.",
    "Drain",
)
_DELETING = Question(
    "delete_empty",
    "Delete queues",
    "These queues will be deleted, with their settings and what was counted. One that has elements"
    " stays. Whoever pushes into one that is gone makes it again, with the usual settings.",
    "Delete",
)


class ActionsMixin:
    """What can be done to queues, from the list and from a queue's page."""

    actions = ("pause_selected", "resume_selected", "drain_selected", "delete_empty")

    def has_drain_permission(self, request: HttpRequest) -> bool:
        """Whoever may delete elements."""
        return request.user.has_perm("psqlmessages.delete_element")

    def has_removal_permission(self, request: HttpRequest) -> bool:
        """Whoever may delete queues."""
        return request.user.has_perm("psqlmessages.delete_queue")

    def acts_on(self, request: HttpRequest, queue: Queue) -> list[Act]:
        """Return the acts that a queue's page offers to this user."""
        found = []
        if self.has_change_permission(request):
            pausing = Act("pause_selected", "Pause")
            found.append(Act("resume_selected", "Resume") if queue.is_paused else pausing)
        if self.has_drain_permission(request):
            found.append(Act("drain_selected", "Drain…"))
        if self.has_removal_permission(request):
            found.append(Act("delete_empty", "Delete…"))
        return found

    @admin.action(description="Pause selected queues", permissions=["change"])
    def pause_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Give nothing out from now on; pushes go on."""
        return self._set_paused(request, list(queryset), is_paused=True)

    @admin.action(description="Resume selected queues", permissions=["change"])
    def resume_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Give out again."""
        return self._set_paused(request, list(queryset), is_paused=False)

    @admin.action(description="Drain selected queues", permissions=["drain"])
    def drain_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Ask, naming the queues; then remove what can be taken of each."""
        queues = list(queryset)
        if "confirmed" not in request.POST:
            return self._ask(request, queues, _DRAINING)
        for queue in queues:
            removed = queue_calls.drain(queue.pk)
            elements = f"{removed:,} element{'' if removed == 1 else 's'}"
            if removed:
                history.log(request, [(queue, CHANGE, f"Drained: {elements} removed.")])
            self.message_user(request, f"Removed from {queue}: {elements}.", messages.SUCCESS)
        return self._back(request, queues)

    @admin.action(description="Delete selected empty queues", permissions=["removal"])
    def delete_empty(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Ask, naming the queues; then delete those that have no elements."""
        queues = list(queryset)
        if "confirmed" not in request.POST:
            return self._ask(request, queues, _DELETING)
        for queue in queues:
            try:
                is_gone = queue_calls.remove_empty(queue.name)
            except OperationalError as error:
                text = f"Not deleted: {queue}. {calls.refusal(error)}"
                self.message_user(request, text, messages.ERROR)
                continue
            if is_gone:
                history.log(request, [(queue, DELETION, "Deleted.")])
                self.message_user(request, f"Deleted: {queue}.", messages.SUCCESS)
            else:
                text = f"Not deleted, as it has elements: {queue}. Drain it first."
                self.message_user(request, text, messages.ERROR)
        return None

    def _set_paused(self, request: HttpRequest, queues: list[Queue], *, is_paused: bool) -> Any:
        done = "Paused" if is_paused else "Resumed"
        try:
            touched = queue_calls.set_paused((queue.pk for queue in queues), is_paused=is_paused)
        except OperationalError as error:
            self.message_user(request, calls.refusal(error), messages.ERROR)
            return self._back(request, queues)
        changed = [queue for queue in queues if queue.pk in touched]
        history.log(request, ((queue, CHANGE, f"{done}.") for queue in changed))
        if changed:
            self.message_user(request, f"{done}: {_listed(changed)}.", messages.SUCCESS)
        if unchanged := [queue for queue in queues if queue.pk not in touched]:
            text = f"{done} already: {_listed(unchanged)}."
            self.message_user(request, text, messages.INFO)
        return self._back(request, queues)

    def _back(self, request: HttpRequest, queues: list[Queue]) -> HttpResponse | None:
        """Lead back to the queue's page where the button stands there; None: to the list."""
        if "from_page" not in request.POST or len(queues) != 1:
            return None
        page = reverse("admin:psqlmessages_queue_change", args=[queues[0].pk])
        return HttpResponseRedirect(page)

    def _ask(
        self, request: HttpRequest, queues: list[Queue], question: Question
    ) -> TemplateResponse:
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": question.title,
            "opts": self.opts,
            "media": self.media,
            "question": question,
            "queues": [(queue, self.total(queue)) for queue in queues],
            "from_page": "from_page" in request.POST,
            "checkbox": helpers.ACTION_CHECKBOX_NAME,
        }
        return TemplateResponse(request, _TEMPLATE, context)


def _listed(queues: Iterable[Queue]) -> str:
    names = [queue.name for queue in queues]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
