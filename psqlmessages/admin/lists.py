"""Lists of the admin: filters and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, ClassVar, Final

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.timezone import localtime
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin.base import column, fetch_rows
from psqlmessages.orm import with_zone

_MAX_SUGGESTIONS: Final = 20
# Reads the first values from an index, because SELECT DISTINCT would read the whole table.
_FIRST_VALUES: Final = """
    WITH RECURSIVE first_values (value, number) AS (
        SELECT min(t.{column}), 1 FROM {table} AS t WHERE t.{column} >= %s
        UNION ALL
        SELECT (SELECT min(t.{column}) FROM {table} AS t WHERE t.{column} > f.value), f.number + 1
        FROM first_values AS f WHERE f.value IS NOT NULL AND f.number < %s
    )
    SELECT f.value FROM first_values AS f WHERE f.value IS NOT NULL
"""


class StateFilter(SimpleListFilter):
    """Filter by state. ``states``: the label and condition of each value in the URL."""

    states: ClassVar[dict[str, tuple[str, Q]]]

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the value and label of each state."""
        return [(value, label) for value, (label, _condition) in self.states.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the objects in the chosen state; all objects if none is chosen."""
        value = self.value()
        return queryset.filter(self.states[value][1]) if value in self.states else queryset


class NameFilter(SimpleListFilter):
    """Filter by the beginning of a name, which the user types into a field with suggestions."""

    template = "admin/psqlmessages/filter.html"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the suggestions: the first 20 names that begin with the typed text."""
        options, prefix = model_admin.opts, self.value() or ""
        statement = _FIRST_VALUES.format(
            table=options.db_table, column=options.get_field(self.parameter_name).column
        )
        rows = fetch_rows(statement, [prefix, _MAX_SUGGESTIONS])
        return [(name, name) for (name,) in rows if name.startswith(prefix)]

    def has_output(self) -> bool:
        """Show the filter even if there are no suggestions."""
        return True

    def choices(self, changelist: ChangeList) -> Iterator[dict[str, Any]]:
        """Yield one entry: the values that the template needs for its text field."""
        parameters = changelist.filter_params.items()
        yield {
            "name": self.parameter_name,
            "value": self.value() or "",
            "suggestions": [name for name, _label in self.lookup_choices],
            "other_parameters": [
                (name, each) for name, values in parameters for each in values
                if name != self.parameter_name
            ],
        }  # fmt: skip

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows whose name begins with the typed text; all rows if it is empty."""
        if not self.value():
            return queryset
        return queryset.filter(**{f"{self.parameter_name}__startswith": self.value()})


class RoleFilter(NameFilter):
    """Filter by role."""

    title = _("role")
    parameter_name = "role"


class IdentFilter(NameFilter):
    """Filter by node."""

    title = _("node")
    parameter_name = "ident"


class TopicFilter(NameFilter):
    """Filter by topic."""

    title = _("topic")
    parameter_name = "topic"


def time_column(description: str, field: str) -> Callable[..., Any]:
    """Create a column, or a field of a page, that shows a time with its zone.

    The script of the pages converts it to the reader's zone.
    """
    return column(description, lambda obj: format_time(getattr(obj, field)), order=field)


def format_time(time: datetime | None) -> str:
    """Return a time with its zone as HTML; "-" if it is None."""
    if time is None:
        return "-"
    time = with_zone(time)
    text = date_format(localtime(time), "Y-m-d H:i:s T")
    return format_html('<time datetime="{}">{}</time>', time.isoformat(), text)
