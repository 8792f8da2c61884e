"""Lists of the admin: filters and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, ClassVar, Final

from django.contrib.admin import FieldListFilter, ModelAdmin, SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.timezone import localtime

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


class NameFilter(FieldListFilter):
    """Filter by the beginning of a name, which the user types into a field with suggestions."""

    template = "admin/psqlmessages/filter.html"

    def expected_parameters(self) -> list[str]:
        """Return the parameter in the URL: the name of the field."""
        return [self.field_path]

    def choices(self, changelist: ChangeList) -> Iterator[dict[str, Any]]:
        """Yield one entry: the values that the template needs for its text field.

        The suggestions are the first 20 names that begin with the typed text.
        """
        prefix, parameters = self._prefix, changelist.filter_params.items()
        statement = _FIRST_VALUES.format(table=changelist.opts.db_table, column=self.field.column)
        rows = fetch_rows(statement, [prefix, _MAX_SUGGESTIONS])
        yield {
            "name": self.field_path,
            "value": prefix,
            "suggestions": [name for (name,) in rows if name.startswith(prefix)],
            "other_parameters": [
                (name, each) for name, values in parameters for each in values
                if name != self.field_path
            ],
        }  # fmt: skip

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows whose name begins with the typed text; all rows if it is empty."""
        if not self._prefix:
            return queryset
        if "\0" in self._prefix:
            # PostgreSQL refuses it; Django then shows the whole list.
            raise IncorrectLookupParameters
        return queryset.filter(**{f"{self.field_path}__startswith": self._prefix})

    @property
    def _prefix(self) -> str:
        return self.used_parameters.get(self.field_path, [""])[-1]


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
