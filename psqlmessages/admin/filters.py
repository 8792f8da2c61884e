"""Filters of long lists: the most frequent values of a field, and no more than fit."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.db.models import Count, QuerySet
from django.http import HttpRequest

_SHOWN = 20


class _FrequentValues(SimpleListFilter):
    """The values with the most rows; what is not among them, the search finds."""

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the values offered, and the chosen one in any case."""
        values = model_admin.model._default_manager.order_by().values_list(self.parameter_name)
        frequent = values.annotate(rows=Count("pk")).order_by("-rows", self.parameter_name)
        found = {value for value, _ in frequent[:_SHOWN]}
        if self.value():
            found.add(self.value())
        return [(value, value) for value in sorted(found)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the rows with the chosen value."""
        return queryset.filter(**{self.parameter_name: self.value()}) if self.value() else queryset


class RoleFilter(_FrequentValues):
    """By role."""

    title = "role"
    parameter_name = "role"


class IdentFilter(_FrequentValues):
    """By ident."""

    title = "ident"
    parameter_name = "ident"
