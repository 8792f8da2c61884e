"""Exchanges in the admin: definition, dry run, start and stop, statistics."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import TabularInline
from django.contrib.admin.models import CHANGE, DELETION
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, transaction
from django.db.models import CharField, Count, Min, Q, QuerySet, Sum, Value
from django.db.models.functions import Concat
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from psqlmessages.admin import base
from psqlmessages.admin.base import BaseAdmin, column
from psqlmessages.admin.exchange_forms import (
    DestinationForm,
    DestinationFormSet,
    DryRunForm,
    ExchangeForm,
)
from psqlmessages.exchanges.engine.counters import BUCKET_SECONDS, Histogram
from psqlmessages.exchanges.model import ident_of
from psqlmessages.exchanges.routing import DryRun, DryRunCopy, dry_run_exchange
from psqlmessages.exchanges.store import repository
from psqlmessages.exchanges.store.definitions import MalformedExchanges
from psqlmessages.exchanges.store.permissions import add_missing_rules, find_missing_rules
from psqlmessages.exchanges.store.stats import (
    ELEMENT_OUTCOMES,
    AggregatedCounters,
    CounterRow,
    format_state,
    has_live_worker,
    read_missing_rules,
)
from psqlmessages.models import Destination, Exchange, ExchangeCount
from psqlmessages.models.names import list_names

Outcome = ExchangeCount.Outcome

# Statistics of an exchange for its page


def _read_statistics(exchange: Exchange) -> dict[str, Any]:
    """Read the counters of all workers, as texts and numbers for the page."""
    counters = ExchangeCount.objects.using(base.database()).filter(exchange=exchange)
    rows = counters.values_list(*CounterRow._fields)
    totals = AggregatedCounters.of(CounterRow(*row) for row in rows)
    elements = totals.elements
    live = counters.filter(has_live_worker())
    return {
        **live.aggregate(workers=Count("pk"), failing_since=Min("failing_since")),
        "blocked_by": read_missing_rules(base.database()).get(exchange.pk, []),
        "outcomes": [
            _outcome_row(outcome.label, totals.outcomes.get(outcome, Histogram()))
            for outcome in ELEMENT_OUTCOMES
        ],
        "copies": [
            (
                str(destination),
                totals.copies.get(destination.position, 0),
                totals.selector_failures.get(destination.position, 0),
            )
            for destination in exchange.destinations.all()
        ],
        "selector_time": _format_duration(totals.selector_seconds / elements) if elements else "-",
    }


def _format_duration(seconds: float | None) -> str:
    """Format seconds: infinity as "over" the largest bucket, None as "-"."""
    if seconds is None:
        return "-"
    if seconds == float("inf"):
        return _("over {time}").format(time=f"{BUCKET_SECONDS[-1]:g} s")
    if seconds < 0.001:
        return f"{seconds * 1_000_000:.0f} µs"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _outcome_row(label: str, histogram: Histogram) -> dict[str, Any]:
    mean = histogram.seconds / histogram.count if histogram.count else None
    return {
        "label": label,
        "count": histogram.count,
        "mean": _format_duration(mean),
        "median": _format_duration(histogram.quantile(0.5)),
        "p95": _format_duration(histogram.quantile(0.95)),
    }


def _format_dry_run(dry_run: DryRun) -> dict[str, Any]:
    """Convert a dry run to texts for the page."""
    return {
        "outcome": dry_run.outcome,
        "fallback_queue": dry_run.fallback and dry_run.fallback.queue,
        "fallback": dry_run.fallback and _format_copy(dry_run.fallback),
        "rows": [
            {
                "destination": str(result.queue),
                "is_accepted": result.verdict.is_accepted,
                "reason": result.verdict.error or result.verdict.why,
                "duration": _format_duration(result.verdict.seconds),
                "copy": result.copy and _format_copy(result.copy),
            }
            for result in dry_run.destinations
        ],
    }


def _format_copy(copy: DryRunCopy) -> dict[str, Any]:
    body = copy.body
    if not isinstance(body, str):
        body = json.dumps(body, ensure_ascii=False, indent=1, default=repr)
    options = []
    if copy.delay:
        options.append(f"delay: {copy.delay:g} s")
    if copy.mature:
        options.append(f"mature: {datetime.fromtimestamp(copy.mature, UTC):%F %T} UTC")
    if copy.tries:
        options.append(f"tries: {copy.tries}")
    headers = json.dumps(copy.headers, ensure_ascii=False, indent=1)
    return {"headers": headers, "body": body, "options": options}


_MAX_LISTED = 5
_SOURCE = Concat("source_namespace", Value("/"), "source_queue", output_field=CharField())


class DestinationInline(TabularInline):
    """The destinations, in the order in which their selectors are evaluated."""

    model = Destination
    form = DestinationForm
    formset = DestinationFormSet
    fields = ("order", "namespace", "queue", "selector")
    extra = 1

    def get_queryset(self, request: HttpRequest) -> QuerySet[Destination]:
        """Read the database that holds the rules, as the page of the exchange does."""
        return super().get_queryset(request).using(base.database())


@admin.register(Exchange)
class ExchangeAdmin(BaseAdmin):
    """The exchanges. Running workers apply a change within a second."""

    form = ExchangeForm
    inlines = (DestinationInline,)
    list_display = (
        *("name", "source", "destination_queues", "state", "processes"),
        *("routed", "no_route", "discarded", "too_many_hops", "failed"),
    )
    list_filter = ("is_running",)
    search_fields = ("name", "source_queue", "destinations__queue")
    search_help_text = _("Searches the name, the source and the destinations.")
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("name", ("source_namespace", "source_queue"), "no_route_action"),
                    *("is_running", "version"),
                )
            },
        ),
        (_("Consumers"), {"fields": (("parallel", "wsize"), "reserve"), "classes": ("collapse",)}),
    )
    actions = ("start_selected", "stop_selected", "delete_selected")
    pages: ClassVar = {"dry_run": "<int:key>/dry-run/", "rules": "<int:key>/rules/"}

    source = column(
        _("from"), lambda row: f"{row.source_namespace}/{row.source_queue}", order=_SOURCE
    )
    destination_queues = column(
        _("to"), lambda row: list_names(row.destinations.all(), _MAX_LISTED) or "-"
    )
    state = column(
        _("state"),
        lambda row: format_state(is_running=row.is_running, is_blocked=row.blocked > 0),
        order="is_running",
    )
    processes = column(_("processes"), lambda row: row.workers, order="workers")
    routed = column(_("routed"), lambda row: f"{row.n_ok:,}", order="n_ok")
    no_route = column(_("no route"), lambda row: f"{row.n_no_route:,}", order="n_no_route")
    discarded = column(_("discarded"), lambda row: f"{row.n_discarded:,}", order="n_discarded")
    too_many_hops = column(
        _("too many hops"), lambda row: f"{row.n_too_many_hops:,}", order="n_too_many_hops"
    )
    failed = column(_("failed"), lambda row: f"{row.n_failed:,}", order="n_failed")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Exchange]:
        """Read exchanges with their destinations and counts, in two statements."""
        totals = {
            f"n_{outcome.value}": Sum("counts__count", filter=Q(counts__outcome=outcome), default=0)
            for outcome in ELEMENT_OUTCOMES
        }
        workers = Count("counts__worker", filter=has_live_worker("counts__"), distinct=True)
        is_blocked = has_live_worker("counts__") & ~Q(counts__missing_rules=[])
        blocked = Count("counts__worker", filter=is_blocked, distinct=True)
        return repository.rows(base.database()).annotate(workers=workers, blocked=blocked, **totals)

    # Starting and stopping

    @admin.action(description=_("Start selected exchanges"), permissions=["change"])
    def start_selected(self, request: HttpRequest, queryset: QuerySet[Exchange]) -> Any:
        """Let workers take elements."""
        return self._set_running(request, list(queryset), is_running=True)

    @admin.action(description=_("Stop selected exchanges"), permissions=["change"])
    def stop_selected(self, request: HttpRequest, queryset: QuerySet[Exchange]) -> Any:
        """Let workers finish their current batch and take no further elements."""
        return self._set_running(request, list(queryset), is_running=False)

    def _set_running(
        self, request: HttpRequest, exchanges: list[Exchange], *, is_running: bool
    ) -> Any:
        verb, using = "Started" if is_running else "Stopped", base.database()
        change = _("Started: {exchange}.") if is_running else _("Stopped: {exchange}.")
        no_change = (
            _("Started already: {exchange}.") if is_running else _("Stopped already: {exchange}.")
        )
        for exchange in exchanges:
            try:
                with transaction.atomic(using=using):
                    is_changed = repository.set_running(exchange.name, is_running, using)
                    if is_changed:
                        base.record_history(request, [(exchange, CHANGE, f"{verb}.")])
            except Exchange.DoesNotExist:
                text, level = _("Already deleted: {exchange}."), messages.WARNING
            else:
                text = change if is_changed else no_change
                level = messages.SUCCESS if is_changed else messages.INFO
            self.message_user(request, text.format(exchange=exchange), level)
        return self.after_action(request, exchanges)

    # Adding, changing, deleting

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show or save one exchange; a save locks all exchanges."""
        if request.method != "POST":
            return super().changeform_view(request, *args, **kwargs)
        with transaction.atomic(using=base.database()):
            repository.lock(base.database())
            return super().changeform_view(request, *args, **kwargs)

    def save_related(
        self, request: HttpRequest, form: forms.ModelForm, formsets: Iterable[Any], change: bool
    ) -> None:
        """Save the destinations in order."""
        super().save_related(request, form, formsets, change)
        for formset in formsets:
            formset.save_positions()

    def construct_change_message(
        self, request: HttpRequest, form: forms.ModelForm, formsets: Any, add: bool = False
    ) -> str:
        """Return the new definition, for the history."""
        exchange = repository.rows(base.database()).get(pk=form.instance.pk)
        document = repository.to_definition(exchange).to_document()
        return f"{'Added' if add else 'Changed'}: {document}"

    def get_deleted_objects(
        self, objs: Iterable[Exchange], request: HttpRequest
    ) -> tuple[list[str], dict[str, int], set[str], list[str]]:
        """List only the exchanges, without their destinations and counts."""
        names = [str(exchange) for exchange in objs]
        missing = set() if self.has_delete_permission(request) else {"exchange"}
        return names, {"exchanges": len(names)}, missing, []

    def delete_model(self, request: HttpRequest, obj: Exchange) -> None:
        """Delete an exchange and its counts."""
        repository.delete([obj.name], base.database())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Exchange]) -> None:
        """Delete exchanges and their counts."""
        repository.delete(queryset.values_list("name", flat=True), base.database())

    def log_deletions(self, request: HttpRequest, queryset: Iterable[Exchange]) -> None:
        """Record the complete definitions in the history."""
        base.record_history(
            request,
            (
                (exchange, DELETION, f"Deleted: {repository.to_definition(exchange).to_document()}")
                for exchange in queryset
            ),
        )

    # Pages of an exchange: dry run, and missing rules

    def object_context(self, request: HttpRequest, obj: Exchange) -> dict[str, Any]:
        """Return the statistics of an exchange, and its missing rules."""
        missing = find_missing_rules([repository.to_definition(obj)], base.database())
        is_missing_here = any(rule.namespace == base.database() for rule in missing.rules)
        return {
            "statistics": _read_statistics(obj),
            "may_change": self.has_change_permission(request, obj),
            "ident": ident_of(obj.name),
            "missing_rules": missing.rules,
            "rule_errors": missing.errors,
            "may_add_rules": is_missing_here and self._may_add_rules(request, obj),
        }

    def dry_run_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Run the selectors on the element of a form; show the result of each destination."""
        exchange = get_object_or_404(repository.rows(base.database()), pk=key)
        if not self.has_view_permission(request, exchange):
            raise PermissionDenied
        form = DryRunForm(request.POST or None)
        context = {"exchange": exchange, "form": form}
        if form.is_valid():
            try:
                compiled = repository.compile_exchange(exchange)
            except MalformedExchanges as error:
                context["errors"] = error.errors
            else:
                context["dry_run"] = _format_dry_run(
                    dry_run_exchange(compiled, form.message(compiled.source))
                )
        return self.page(
            request,
            "exchange/dry_run",
            _("Dry run of {exchange}").format(exchange=exchange),
            **context,
        )

    def rules_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Add the rules that are missing in this database, and record each in the history."""
        exchange = get_object_or_404(repository.rows(base.database()), pk=key)
        if request.method != "POST" or not self._may_add_rules(request, exchange):
            raise PermissionDenied("psqlmessages.add_auth, psqlmessages.change_auth")
        try:
            with transaction.atomic(using=base.database()):
                added = add_missing_rules(repository.to_definition(exchange), base.database())
                entries = [(exchange, CHANGE, f"Rule added: {rule.statement}") for rule in added]
                base.record_history(request, entries)
        except OperationalError as error:
            self.report_transient_error(request, error)
        else:
            text = ngettext("Added: {number} rule.", "Added: {number} rules.", len(added))
            self.message_user(request, text.format(number=len(added)), messages.SUCCESS)
        return self.redirect("change", key)

    def _may_add_rules(self, request: HttpRequest, exchange: Exchange) -> bool:
        needed = ("psqlmessages.add_auth", "psqlmessages.change_auth")
        return self.has_view_permission(request, exchange) and request.user.has_perms(needed)
