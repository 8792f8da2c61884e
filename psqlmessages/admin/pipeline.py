"""The pipeline in the admin: traffic counts and job status."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.contrib.admin import ModelAdmin
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.timesince import timesince
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin.base import BaseAdmin, column
from psqlmessages.admin.lists import NameFilter, time_column
from psqlmessages.exchanges.store.stats import WORKER_TIMEOUT_SECONDS
from psqlmessages.models import PipelineJob, Traffic
from psqlmessages.models.pipeline import ENDED_STATES


class WindowFilter(admin.SimpleListFilter):
    """Filter windows by length, by default a minute.

    The windows of each length count all messages: a list of all lengths would count each message
    several times.
    """

    title = _("window")
    parameter_name = "window_seconds"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the window lengths."""
        return [(str(value), label) for value, label in Traffic.Window.choices]

    def value(self) -> str:
        """Return the chosen length in seconds; 60 without a known choice."""
        chosen = super().value()
        return chosen if chosen in map(str, Traffic.Window.values) else str(Traffic.Window.MINUTE)

    def choices(self, changelist: ChangeList) -> Iterator[dict[str, Any]]:
        """Yield the choices, without `All`."""
        for value, label in self.lookup_choices:
            yield {
                "selected": self.value() == value,
                "query_string": changelist.get_query_string({self.parameter_name: value}),
                "display": label,
            }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Traffic]) -> QuerySet[Traffic]:
        """Return the windows of the chosen length. An index supports this filter."""
        return queryset.filter(window_seconds=int(self.value()))


@admin.register(Traffic)
class TrafficAdmin(BaseAdmin):
    """The windows of traffic, the newest first. Jobs write windows, and remove old windows."""

    denied_permissions = ("add", "change", "delete")
    list_display = (
        *("starts", "topic", "sender", "count", "bytes"),
        *("median_latency", "p95_latency", "median_size", "p95_size"),
    )
    list_filter = (WindowFilter, ("topic", NameFilter))
    date_hierarchy = "starts_at"
    search_fields = ("topic", "sender")
    search_help_text = _("Searches the topic and the sender.")
    ordering = ("-starts_at", "topic", "sender")
    fields = (
        *("topic", "sender", "window_seconds", "starts", "count", "bytes"),
        *(f"{value}_p{percent}" for value in ("size", "latency") for percent in (50, 95, 99)),
    )
    readonly_fields = ("starts",)

    starts = time_column(_("starts at"), "starts_at")
    median_latency = column(
        _("latency p50"), lambda row: f"{row.latency_p50:,.0f} ms", order="latency_p50"
    )
    p95_latency = column(
        _("latency p95"), lambda row: f"{row.latency_p95:,.0f} ms", order="latency_p95"
    )
    median_size = column(_("size p50"), lambda row: f"{row.size_p50:,.0f} B", order="size_p50")
    p95_size = column(_("size p95"), lambda row: f"{row.size_p95:,.0f} B", order="size_p95")


@admin.register(PipelineJob)
class PipelineJobAdmin(BaseAdmin):
    """The last reported state of jobs. A dead job can be deleted; a start adds it again."""

    denied_permissions = ("add", "change")
    list_display = ("name", "current_state", "lag", "rate", "rows", "last_batch", "seen")
    fields = (
        *("name", "current_state", "error", "started", "seen"),
        *("last_batch", "batch_time", "rows", "rate", "lag"),
    )
    readonly_fields = fields
    search_fields = ("name",)
    search_help_text = _("Searches the name.")
    started = time_column(_("started at"), "started_at")
    seen = time_column(_("seen at"), "seen_at")
    batch_time = time_column(_("last batch at"), "last_batch_at")
    rate = column(
        _("rows/s"),
        lambda job: f"{job.rows_per_second:,.1f}" if job.is_alive else "-",
        order="rows_per_second",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[PipelineJob]:
        """Read jobs, and whether each job is alive according to the clock of the database."""
        is_recent = Q(seen_at__gt=Now() - timedelta(seconds=WORKER_TIMEOUT_SECONDS))
        alive = ~Q(state__in=ENDED_STATES) & is_recent
        return super().get_queryset(request).annotate(is_alive=alive, now=Now())

    def has_delete_permission(self, request: HttpRequest, obj: PipelineJob | None = None) -> bool:
        """Allow deleting dead jobs only, because deleting a live job would only hide it."""
        return super().has_delete_permission(request, obj) and not (obj and obj.is_alive)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Refuse to delete live jobs, also in the action of the list."""
        deleted, counts, missing, protected = super().get_deleted_objects(objs, request)
        alive = [_("{job}, which is alive").format(job=job) for job in objs if job.is_alive]
        if alive and super().has_delete_permission(request):
            missing = set()
        return deleted, counts, missing, [*protected, *alive]

    @admin.display(description=_("state"), ordering="state")
    def current_state(self, job: PipelineJob) -> str:
        """Return the state; for a job that died without reporting, the time since its heartbeat."""
        if job.is_alive or job.state in ENDED_STATES:
            return job.get_state_display()
        seconds = (job.now - job.seen_at).total_seconds()
        passed = f"{seconds:.0f} s" if seconds < 60 else timesince(job.seen_at, job.now)
        return _("no heartbeat for {time}").format(time=passed)

    @admin.display(description=_("lag"), ordering="lag_seconds", empty_value=_("unknown"))
    def lag(self, job: PipelineJob) -> str | None:
        """Return the age of the oldest unread message; None if it is unknown or the job is dead."""
        if job.lag_seconds is None or not job.is_alive:
            return None
        return f"{job.lag_seconds:,.1f} s" if job.lag_seconds else _("none")
