"""Queues in the admin: sizes, settings, actions."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, DELETION
from django.contrib.postgres.fields import ArrayField
from django.db import OperationalError, transaction
from django.db.models import BigIntegerField, Exists, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.expressions import Combinable, RawSQL
from django.db.models.functions import Coalesce
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from psqlmessages.admin import base, queue_elements
from psqlmessages.admin.base import (
    BaseAdmin,
    HistoryMixin,
    LockTimeoutMixin,
    VerbatimForm,
    column,
    rules_context,
)
from psqlmessages.admin.lists import StateFilter
from psqlmessages.admin.queue_elements import ElementsMixin
from psqlmessages.exchanges.store.definitions import name_error
from psqlmessages.exchanges.store.stats import (
    COUNTS,
    MAX_LISTED,
    SIZES,
    ElementCounts,
    QueueCounters,
    size_limits,
)
from psqlmessages.models import Auth, Element, Queue, QueueCount
from psqlmessages.models.names import isolate, list_names

_MAX_NAMES = 20
_NUMBERS = ArrayField(BigIntegerField())
# The list counts at most this number of elements in each state; the page of a queue counts more.
MAX_IN_LIST = 1000
_HAS_ELEMENTS = Exists(Element.objects.filter(queue=OuterRef("pk")))


class QueueStateFilter(StateFilter):
    """Queues by state: paused, filled, empty, or a dead-letter queue."""

    title = _("state")
    parameter_name = "state"
    states: ClassVar = {
        "paused": (_("Paused"), Q(is_paused=True)),
        "filled": (_("With elements"), Q(_HAS_ELEMENTS)),
        "empty": (_("Empty"), ~Q(_HAS_ELEMENTS)),
        "dead": (_("Dead-letter queues"), Q(name__in=Queue.objects.values("dead_letter_queue"))),
    }


class QueueForm(VerbatimForm):
    """The settings of a queue. The name cannot be changed later."""

    def clean(self) -> dict[str, Any]:
        """Check the names of the queue and its dead-letter queue."""
        cleaned = super().clean() or self.cleaned_data
        for field in ("name", "dead_letter_queue"):
            if field in cleaned and (sentence := name_error(cleaned[field])):
                self.add_error(field, sentence)
        return cleaned


@admin.register(Queue)
class QueueAdmin(LockTimeoutMixin, HistoryMixin, ElementsMixin, BaseAdmin):
    """The queues. The first push or `queue_listen` that a rule allows also creates a queue."""

    form = QueueForm
    list_display = (
        *("name", "state", "backlog", "available", "scheduled", "reserved", "dead_letters"),
        "tries",
    )
    list_filter = (QueueStateFilter,)
    search_fields = ("name",)
    search_help_text = _("Searches the name.")
    fields = ("name", "max_tries", "dead_letter_queue", "key_timeout")

    actions = ("pause_selected", "resume_selected", "drain_selected", "delete_empty")
    # An action deletes empty queues instead.
    denied_permissions = ("delete",)
    fragments = ("state",)

    state = column(
        _("state"), lambda queue: _("paused") if queue.is_paused else _("open"), order="is_paused"
    )
    backlog = column(_("backlog"), lambda queue: f"{max(0, queue.backlog):,}", order="-backlog")
    available = column(_("available"), lambda queue: sizes_of(queue).format_count("available"))
    scheduled = column(_("scheduled"), lambda queue: sizes_of(queue).format_count("scheduled"))
    reserved = column(_("reserved"), lambda queue: sizes_of(queue).format_count("reserved"))
    dead_letters = column(_("dead letters"), lambda queue: f"{queue.died:,}", order="-died")

    def get_readonly_fields(self, request: HttpRequest, obj: Queue | None = None) -> list[str]:
        """Make the name of an existing queue read-only."""
        return ["name"] if obj else []

    def get_queryset(self, request: HttpRequest) -> QuerySet[Queue]:
        """Read queues with their sizes and counters, in one statement."""
        sizes = RawSQL(SIZES, size_limits(MAX_IN_LIST), _NUMBERS)  # noqa: S611 - contains no input
        queues = super().get_queryset(request).defer("channel", "awaited_until")
        return queues.annotate(
            sizes=sizes,
            backlog=_sum_counts(
                F("puts") - F("gets") - F("commits") - F("dead_letters") - F("removes")
            ),
            died=_sum_counts(F("dead_letters")),
        )

    @admin.display(description=_("max attempts"), ordering="max_tries")
    def tries(self, queue: Queue) -> str:
        """Return the maximum of failed attempts and the dead-letter queue; "-" without one."""
        if queue.max_tries is None:
            return "-"
        text = ngettext(
            "{number} failed attempt, to {queue}",
            "{number} failed attempts, to {queue}",
            queue.max_tries,
        )
        return text.format(number=f"{queue.max_tries:,}", queue=isolate(queue.dead_letter_queue))

    # Adding and changing

    def save_model(self, request: HttpRequest, obj: Queue, form: ModelForm, change: bool) -> None:
        """Save only edited fields, because SQL functions may have changed the other fields."""
        base.limit_lock_waits()
        if not change:
            # The SQL function creates the queue, because it chooses the channel.
            statement = "SELECT (messages._get_or_create_queue(%s)).id"
            ((obj.pk,),) = base.fetch_rows(statement, [obj.name])
            obj._state.adding = False
        obj.save(update_fields=[name for name in form.changed_data if name != "name"])

    def object_context(self, request: HttpRequest, obj: Queue) -> dict[str, Any]:
        """Return the sizes, counters, rules and actions of a queue."""
        kinds = ("total", "available", "scheduled", "reserved")
        sizes, counters = _read_numbers(obj)
        return {
            "sizes": {kind: sizes.format_count(kind) for kind in kinds},
            "counts": counters._asdict(),
            "actions": self._actions_on(request, obj),
            "may_view_elements": self.has_view_elements_permission(request),
            "destructive": ("drain_selected", "delete_empty"),
            **rules_context(Auth.Type.QUEUE, obj.name),
        }

    # Actions: pause, resume, drain and delete; the last two need a confirmation

    def has_drain_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may delete elements."""
        return request.user.has_perm("psqlmessages.delete_element")

    def has_removal_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may delete queues."""
        return request.user.has_perm("psqlmessages.delete_queue")

    def _actions_on(self, request: HttpRequest, queue: Queue) -> list[tuple[str, str]]:
        """Return the actions that a queue's page offers to this user, and their labels."""
        pausing = (
            ("resume_selected", _("Resume")) if queue.is_paused else ("pause_selected", _("Pause"))
        )
        return [
            *([pausing] if self.has_change_permission(request) else ()),
            *([("drain_selected", _("Drain…"))] if self.has_drain_permission(request) else ()),
            *([("delete_empty", _("Delete…"))] if self.has_removal_permission(request) else ()),
        ]

    @admin.action(description=_("Pause selected queues"), permissions=["change"])
    def pause_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Stop delivering elements; pushes still work."""
        return self._set_paused(request, list(queryset), is_paused=True)

    @admin.action(description=_("Resume selected queues"), permissions=["change"])
    def resume_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Deliver elements again."""
        return self._set_paused(request, list(queryset), is_paused=False)

    @admin.action(description=_("Drain selected queues"), permissions=["drain"])
    def drain_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Ask for confirmation, then remove the available elements of the queues."""
        queues = list(queryset)
        if "confirmed" not in request.POST:
            return self._ask_to_confirm(request, queues, "drain_selected", _("Drain queues"))
        for queue in queues:
            with transaction.atomic(using=base.database()):
                removed = queue_elements.drain(queue.pk)
                elements = f"{removed:,} element{'' if removed == 1 else 's'}"
                if removed:
                    base.record_history(request, [(queue, CHANGE, f"Drained: {elements} removed.")])
            text = ngettext(
                "Removed from {queue}: {number} element.",
                "Removed from {queue}: {number} elements.",
                removed,
            ).format(queue=queue, number=f"{removed:,}")
            self.message_user(request, text, messages.SUCCESS)
        return self.after_action(request, queues)

    @admin.action(description=_("Delete selected empty queues"), permissions=["removal"])
    def delete_empty(self, request: HttpRequest, queryset: QuerySet[Queue]) -> Any:
        """Ask for confirmation, then delete the queues that are empty."""
        queues = list(queryset)
        if "confirmed" not in request.POST:
            return self._ask_to_confirm(request, queues, "delete_empty", _("Delete queues"))
        for queue in queues:
            try:
                with transaction.atomic(using=base.database()):
                    is_removed = queue_elements.remove_empty(queue.name)
                    if is_removed:
                        base.record_history(request, [(queue, DELETION, "Deleted.")])
            except OperationalError as error:
                text = f"{_('Not deleted')}: {queue}. {base.error_text(error)}"
                self.message_user(request, text, messages.ERROR)
                continue
            text, level = _("Deleted: {queue}."), messages.SUCCESS
            if not is_removed:
                text = _("Not deleted because it has elements: {queue}. Drain it first.")
                level = messages.ERROR
            self.message_user(request, text.format(queue=queue), level)
        return None

    def _set_paused(self, request: HttpRequest, queues: list[Queue], *, is_paused: bool) -> Any:
        verb = "Paused" if is_paused else "Resumed"
        change = _("Paused: {queues}.") if is_paused else _("Resumed: {queues}.")
        no_change = _("Paused already: {queues}.") if is_paused else _("Resumed already: {queues}.")
        try:
            with transaction.atomic(using=base.database()):
                keys = [queue.pk for queue in queues]
                changed_keys = queue_elements.set_paused(keys, is_paused=is_paused)
                changed = [queue for queue in queues if queue.pk in changed_keys]
                base.record_history(request, ((queue, CHANGE, f"{verb}.") for queue in changed))
        except OperationalError as error:
            self.report_transient_error(request, error)
            return self.after_action(request, queues)
        if changed:
            text = change.format(queues=list_names(changed, _MAX_NAMES))
            self.message_user(request, text, messages.SUCCESS)
        if unchanged := [queue for queue in queues if queue.pk not in changed_keys]:
            text = no_change.format(queues=list_names(unchanged, _MAX_NAMES))
            self.message_user(request, text, messages.INFO)
        return self.after_action(request, queues)

    def _ask_to_confirm(
        self, request: HttpRequest, queues: list[Queue], action: str, title: str
    ) -> HttpResponse:
        context = {
            "action": action,
            "queues": [(queue, _read_numbers(queue)[0].format_count("total")) for queue in queues],
            "from_change_page": "from_change_page" in request.POST,
        }
        return self.page(request, "queue/confirm", title, **context)


def sizes_of(queue: Queue) -> ElementCounts:
    """Return the sizes of a queue that `QueueAdmin.get_queryset` has read."""
    return ElementCounts(*queue.sizes, MAX_IN_LIST)


def _sum_counts(value: Combinable) -> Coalesce:
    counts = QueueCount.objects.filter(queue=OuterRef("pk")).order_by().values("queue")
    total = counts.annotate(total=Sum(value)).values("total")
    return Coalesce(Subquery(total), 0, output_field=BigIntegerField())


def _read_numbers(queue: Queue) -> tuple[ElementCounts, QueueCounters]:
    """Read the sizes of a queue, up to MAX_LISTED, and its counters; zeros for a deleted queue."""
    sizes = RawSQL(SIZES, size_limits(MAX_LISTED), _NUMBERS)  # noqa: S611 - contains no input
    counters = RawSQL(COUNTS, [], _NUMBERS)  # noqa: S611
    queues = Queue.objects.using(base.database()).filter(pk=queue.pk)
    numbers = queues.annotate(sizes=sizes, counters=counters)
    row = numbers.values_list("sizes", "counters").first() or ((0, 0, 0), (0,) * 7)
    return ElementCounts(*row[0], MAX_LISTED), QueueCounters(*row[1])
