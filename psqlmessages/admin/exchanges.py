"""Exchanges in the admin: defined, tried, started and stopped, and what they have done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin, TabularInline, helpers
from django.contrib.admin.models import CHANGE, DELETION
from django.db import transaction
from django.db.models import CharField, Count, Q, QuerySet, Sum, Value
from django.db.models.functions import Concat
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse

from psqlmessages.admin import calls, history
from psqlmessages.admin.exchange_figures import alive, figures
from psqlmessages.admin.exchange_forms import DestinationForm, Destinations, ExchangeForm
from psqlmessages.admin.exchange_pages import PagesMixin
from psqlmessages.graph import stored
from psqlmessages.models import Destination, Exchange, ExchangeCount

Outcome = ExchangeCount.Outcome
_SHOWN = 5
_SOURCE = Concat("source_namespace", Value("/"), "source_queue", output_field=CharField())


class DestinationInline(TabularInline):
    """Where copies go, in the order in which the selectors are asked."""

    model = Destination
    form = DestinationForm
    formset = Destinations
    fields = ("order", "namespace", "queue", "selector")
    extra = 1


class ExchangeAdmin(PagesMixin, ModelAdmin):
    """The exchanges. Running loops take up a change within a second."""

    form = ExchangeForm
    inlines = (DestinationInline,)
    list_display = (
        *("name", "source", "targets", "is_running", "processes"),
        *("routed", "no_route", "too_many_hops", "failed"),
    )
    list_filter = ("is_running",)
    search_fields = ("name", "source_queue", "destinations__queue")
    search_help_text = "Looks for a part of the name, the source or a destination."
    fieldsets = (
        (None, {"fields": ("name", ("source_namespace", "source_queue"), "is_running", "seen")}),
        ("Loops", {"fields": (("parallel", "wsize"), "reserve"), "classes": ("collapse",)}),
    )
    actions = ("start_selected", "stop_selected")

    class Media:
        css: ClassVar = {"all": ["psqlmessages/admin/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Exchange]:
        """Read each exchange with its destinations and what was counted, in two statements."""
        counted = {
            outcome.value: Sum("counts__count", filter=Q(counts__outcome=outcome), default=0)
            for outcome in (Outcome.OK, Outcome.NO_ROUTE, Outcome.TOO_MANY_HOPS, Outcome.FAILED)
        }
        workers = Count("counts__worker", filter=alive("counts__"), distinct=True)
        exchanges = super().get_queryset(request).prefetch_related("destinations")
        return exchanges.annotate(workers=workers, **{f"n_{k}": v for k, v in counted.items()})

    # What the list shows

    @admin.display(description="from", ordering=_SOURCE)
    def source(self, exchange: Exchange) -> str:
        """Name the source."""
        return f"{exchange.source_namespace}/{exchange.source_queue}"

    @admin.display(description="to")
    def targets(self, exchange: Exchange) -> str:
        """Name the first destinations."""
        names = [str(destination) for destination in exchange.destinations.all()]
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more or "-"

    @admin.display(description="processes", ordering="workers")
    def processes(self, exchange: Exchange) -> int:
        """Tell how many processes run it now."""
        return exchange.workers

    @admin.display(description="routed", ordering="n_ok")
    def routed(self, exchange: Exchange) -> str:
        """Tell how many elements got somewhere."""
        return f"{exchange.n_ok:,}"

    @admin.display(description="no route", ordering="n_no_route")
    def no_route(self, exchange: Exchange) -> str:
        """Tell how many no destination wanted."""
        return f"{exchange.n_no_route:,}"

    @admin.display(description="too many hops", ordering="n_too_many_hops")
    def too_many_hops(self, exchange: Exchange) -> str:
        """Tell how many went round for too long."""
        return f"{exchange.n_too_many_hops:,}"

    @admin.display(description="failed", ordering="n_failed")
    def failed(self, exchange: Exchange) -> str:
        """Tell how often elements had to come back."""
        return f"{exchange.n_failed:,}"

    # Starting and stopping

    @admin.action(description="Start selected exchanges", permissions=["change"])
    def start_selected(self, request: HttpRequest, queryset: QuerySet[Exchange]) -> Any:
        """Let loops take elements again."""
        return self._set_running(request, list(queryset), is_running=True)

    @admin.action(description="Stop selected exchanges", permissions=["change"])
    def stop_selected(self, request: HttpRequest, queryset: QuerySet[Exchange]) -> Any:
        """Let loops finish what they have, and take nothing more."""
        return self._set_running(request, list(queryset), is_running=False)

    def _set_running(
        self, request: HttpRequest, exchanges: list[Exchange], *, is_running: bool
    ) -> Any:
        done, using = "Started" if is_running else "Stopped", calls.database()
        for exchange in exchanges:
            try:
                is_changed = stored.set_running(exchange.name, is_running, using)
            except Exchange.DoesNotExist:
                self.message_user(request, f"Gone already: {exchange}.", messages.WARNING)
                continue
            if is_changed:
                history.log(request, [(exchange, CHANGE, f"{done}.")])
            text = f"{done}{'' if is_changed else ' already'}: {exchange}."
            level = messages.SUCCESS if is_changed else messages.INFO
            self.message_user(request, text, level)
        if "from_page" in request.POST and len(exchanges) == 1:
            page = reverse("admin:psqlmessages_exchange_change", args=[exchanges[0].pk])
            return HttpResponseRedirect(page)
        return None

    # Adding, changing, deleting

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show or save one exchange; nobody else changes exchanges while one is saved."""
        return self._locking(
            request, lambda: super(ExchangeAdmin, self).changeform_view(request, *args, **kwargs)
        )

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show one exchange: what it has done, and which rules it lacks."""
        exchange = self.get_object(request, object_id)
        if exchange is not None:
            extra = {
                "figures": figures(exchange),
                "checkbox": helpers.ACTION_CHECKBOX_NAME,
                "may_change": self.has_change_permission(request, exchange),
                **self.rights_context(request, exchange),
            }
            kwargs["extra_context"] = {**extra, **(kwargs.get("extra_context") or {})}
        return super().change_view(request, object_id, *args, **kwargs)

    def save_related(
        self, request: HttpRequest, form: forms.ModelForm, formsets: Iterable[Any], change: bool
    ) -> None:
        """Save the destinations, in their order."""
        super().save_related(request, form, formsets, change)
        for formset in formsets:
            formset.settle()

    def construct_change_message(
        self, request: HttpRequest, form: forms.ModelForm, formsets: Any, add: bool = False
    ) -> str:
        """Say in the history what the exchange is now."""
        document = stored.definition(Exchange.objects.get(pk=form.instance.pk)).as_document()
        return f"{'Added' if add else 'Changed'}: {document}"

    def get_deleted_objects(
        self, objs: Iterable[Exchange], request: HttpRequest
    ) -> tuple[list[str], dict[str, int], set[str], list[str]]:
        """Name the exchanges alone: destinations and counts are parts of them."""
        names = [str(exchange) for exchange in objs]
        lacking = set() if self.has_delete_permission(request) else {"exchange"}
        return names, {"exchanges": len(names)}, lacking, []

    def delete_model(self, request: HttpRequest, obj: Exchange) -> None:
        """Delete an exchange with what was counted of it."""
        stored.delete([obj.name], calls.database())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Exchange]) -> None:
        """Delete exchanges with what was counted of them."""
        stored.delete(queryset.values_list("name", flat=True), calls.database())

    def log_deletions(self, request: HttpRequest, queryset: Iterable[Exchange]) -> None:
        """Say in the history which exchange it was, whole."""
        history.log(
            request,
            (
                (exchange, DELETION, f"Deleted: {stored.definition(exchange).as_document()}")
                for exchange in queryset
            ),
        )

    def _locking(self, request: HttpRequest, view: Callable[[], HttpResponse]) -> HttpResponse:
        if request.method != "POST":
            return view()
        with transaction.atomic(using=calls.database()):
            stored.lock(calls.database())
            return view()
