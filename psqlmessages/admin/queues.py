"""Queues in the admin: what they hold, how they are set, and what can be done to them."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.postgres.fields import ArrayField
from django.db.models import BigIntegerField, Exists, OuterRef, QuerySet
from django.db.models.expressions import RawSQL
from django.forms import CharField, ModelForm
from django.http import HttpRequest, HttpResponse

from psqlmessages.admin import calls, history, queue_calls
from psqlmessages.admin.held_up import HeldUpMixin
from psqlmessages.admin.queue_actions import ActionsMixin
from psqlmessages.admin.queue_elements import ElementsMixin
from psqlmessages.graph.entries import name_fault
from psqlmessages.graph.sizes import COUNTS, MOST_LISTED, SIZES, Counts, Sizes, limits
from psqlmessages.models import Auth, Element, Queue

_NUMBERS = ArrayField(BigIntegerField())


class StateFilter(admin.SimpleListFilter):
    """Queues by what is to be done about them."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the states."""
        return [
            ("paused", "Paused"),
            ("filled", "With elements"),
            ("empty", "Empty"),
            ("dead", "For dead letters"),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Queue]) -> QuerySet[Queue]:
        """Keep the queues in the chosen state."""
        has_elements = Exists(Element.objects.filter(queue=OuterRef("pk")))
        match self.value():
            case "paused":
                return queryset.filter(is_paused=True)
            case "filled":
                return queryset.filter(has_elements)
            case "empty":
                return queryset.exclude(has_elements)
            case "dead":
                return queryset.filter(name__in=Queue.objects.values("dead_letter_queue"))
        return queryset


class QueueForm(ModelForm):
    """The settings of a queue; its name is given once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            if isinstance(field, CharField):
                field.strip = False

    def clean(self) -> dict[str, Any]:
        """Refuse what is no name of a queue."""
        cleaned = super().clean() or self.cleaned_data
        for field in ("name", "dead_letter_queue"):
            if field in cleaned and (sentence := name_fault(cleaned[field])):
                self.add_error(field, sentence)
        return cleaned


class QueueAdmin(HeldUpMixin, ElementsMixin, ActionsMixin, ModelAdmin):
    """The queues. Whoever pushes or takes where a rule allows it makes one."""

    form = QueueForm
    list_display = (
        *("name", "state", "total", "available", "scheduled", "reserved"),
        "tries",
        *("puts", "gets", "reserves", "commits", "rollbacks", "dead_letters"),
    )
    list_filter = (StateFilter,)
    list_per_page = 50
    search_fields = ("name",)
    search_help_text = "Looks for a part of the name."
    fields = ("name", "max_tries", "dead_letter_queue", "key_timeout")

    class Media:
        css: ClassVar = {"all": ["psqlmessages/admin/admin.css"]}

    def has_delete_permission(self, request: HttpRequest, obj: Queue | None = None) -> bool:
        """Nobody in this way: the action deletes, where nothing is in the queue."""
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Queue | None = None) -> list[str]:
        """Let a queue keep its name."""
        return ["name"] if obj else []

    def get_queryset(self, request: HttpRequest) -> QuerySet[Queue]:
        """Read each queue with its numbers, in the one statement of the page."""
        sizes = RawSQL(SIZES, limits(MOST_LISTED), _NUMBERS)  # noqa: S611 - nothing of it is input
        counts = RawSQL(COUNTS, [], _NUMBERS)  # noqa: S611
        queues = super().get_queryset(request).defer("channel", "awaited_until")
        return queues.annotate(sizes=sizes, counted=counts)

    # What the list and the page show

    @admin.display(description="state", ordering="is_paused")
    def state(self, queue: Queue) -> str:
        """Tell whether it is paused."""
        return "paused" if queue.is_paused else "open"

    @admin.display(description="elements")
    def total(self, queue: Queue) -> str:
        """Tell how many there are in all."""
        return sizes_of(queue).shown("total")

    @admin.display(description="available")
    def available(self, queue: Queue) -> str:
        """Tell how many can be taken now."""
        return sizes_of(queue).shown("available")

    @admin.display(description="scheduled")
    def scheduled(self, queue: Queue) -> str:
        """Tell how many are not mature yet."""
        return sizes_of(queue).shown("scheduled")

    @admin.display(description="reserved")
    def reserved(self, queue: Queue) -> str:
        """Tell how many somebody has."""
        return sizes_of(queue).shown("reserved")

    @admin.display(description="dead after", ordering="max_tries")
    def tries(self, queue: Queue) -> str:
        """Tell after how many tries an element goes where."""
        if queue.max_tries is None:
            return "-"
        tries = f"{queue.max_tries:,} {'try' if queue.max_tries == 1 else 'tries'}"
        return f"{tries}, to {queue.dead_letter_queue}"

    @admin.display(description="pushed")
    def puts(self, queue: Queue) -> str:
        """Tell how many were ever pushed."""
        return f"{counts_of(queue).puts:,}"

    @admin.display(description="popped")
    def gets(self, queue: Queue) -> str:
        """Tell how many were ever taken and removed."""
        return f"{counts_of(queue).gets:,}"

    @admin.display(description="reserves")
    def reserves(self, queue: Queue) -> str:
        """Tell how often elements were reserved."""
        return f"{counts_of(queue).reserves:,}"

    @admin.display(description="commits")
    def commits(self, queue: Queue) -> str:
        """Tell how many were reserved and then removed."""
        return f"{counts_of(queue).commits:,}"

    @admin.display(description="rollbacks")
    def rollbacks(self, queue: Queue) -> str:
        """Tell how many were reserved and given back."""
        return f"{counts_of(queue).rollbacks:,}"

    @admin.display(description="dead letters")
    def dead_letters(self, queue: Queue) -> str:
        """Tell how many went to the dead letters."""
        return f"{counts_of(queue).dead_letters:,}"

    # Adding and changing

    def save_model(self, request: HttpRequest, obj: Queue, form: ModelForm, change: bool) -> None:
        """Write what was edited: the rest of the row is SQL's, and may have changed meanwhile."""
        calls.bound_waits()
        if not change:
            # SQL draws the channel.
            obj.pk, obj._state.adding = queue_calls.make(obj.name), False
        written = [name for name in form.changed_data if name != "name"]
        if written:
            obj.save(update_fields=written)

    def construct_change_message(
        self, request: HttpRequest, form: ModelForm, formsets: Any, add: bool = False
    ) -> str:
        """Say in the history what was, and what is."""
        return "Added." if add else history.changes(form) or "Nothing changed."

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show one queue: its numbers, its rules, and what can be done to it."""
        queue = self.get_object(request, object_id)
        if queue is not None:
            extra = {
                "sizes": _shown(sizes_of(queue)),
                "counts": counts_of(queue)._asdict(),
                "acts": self.acts_on(request, queue),
                "may_look_inside": self.has_view_elements_permission(request),
                "checkbox": helpers.ACTION_CHECKBOX_NAME,
                "rules": _rules_for(queue.name),
                "may_view_rules": request.user.has_perm("psqlmessages.view_auth"),
            }
            kwargs["extra_context"] = {**extra, **(kwargs.get("extra_context") or {})}
        return super().change_view(request, object_id, *args, **kwargs)


def sizes_of(queue: Queue) -> Sizes:
    """Return the sizes that were read with a queue."""
    return Sizes.of(queue.sizes, MOST_LISTED)


def counts_of(queue: Queue) -> Counts:
    """Return the counts that were read with a queue."""
    return Counts(*queue.counted)


def _shown(sizes: Sizes) -> dict[str, str]:
    return {kind: sizes.shown(kind) for kind in ("total", "available", "scheduled", "reserved")}


def _rules_for(name: str) -> QuerySet[Auth]:
    """Return the rules that name a queue, or a pattern of it."""
    return Auth.objects.filter(type=Auth.Type.QUEUE, dest__in=calls.patterns(name))
