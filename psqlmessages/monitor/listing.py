"""Lists of the monitor: their filter, order and page in the URL, fragments, and shared results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any, Final, TypeVar

from django.core.exceptions import BadRequest
from django.db import DatabaseError, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.http import urlencode
from django.utils.translation import get_language

from psqlmessages.models.names import NAME_CHARACTERS
from psqlmessages.models.rules import database
from psqlmessages.wire import parse_number

PAGE_SIZE: Final = 100
_MAX_PAGE: Final = 10_000
FRAGMENT: Final = "fragment"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a list. A list can be sorted by the columns that have a ``name``.

    ``kind``: CSS classes; ``wide`` hides the column on narrow screens, ``number`` aligns it right.
    """

    label: Any
    name: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ListDefinition:
    """A list: its columns, and the states that the parameter ``state`` of its URL may select.

    ``name`` also names the fragment. ``default_sort`` is the name of a column; a ``-`` before it
    means descending. ``states`` has a label for each state.
    """

    name: str
    title: Any
    columns: Sequence[Column]
    default_sort: str
    states: Mapping[str, Any]

    def parse(self, request: HttpRequest) -> ListQuery:
        """Parse the parameters of a request; raise BadRequest (400) if one is wrong or unknown."""
        check_parameters(request, ["q", "sort", "page", "state"])
        search = parse_search(request, "q", NAME_CHARACTERS)
        sort = request.GET.get("sort", self.default_sort)
        if sort.removeprefix("-") not in {column.name for column in self.columns if column.name}:
            raise BadRequest(f"sort: there is no column {sort!r}.")
        page = parse_page(request, _MAX_PAGE)
        state = request.GET.get("state", "")
        if state not in {"", *self.states}:
            raise BadRequest(f"state: there is no state {state!r}.")
        return ListQuery(self, search, sort, page, state)

    def render(
        self,
        request: HttpRequest,
        read_page: Callable[[ListQuery], ListPage],
        context: Mapping[str, Any],
    ) -> HttpResponse:
        """Render a page with this list, or only the list as a fragment; viewers share its data."""
        query = self.parse(request)
        template = f"psqlmessages/monitor/_{self.name}.html"
        shared = {
            "title": self.title,
            "template": template,
            "list": lambda: read_shared(query.key(), lambda: read_page(query)),
        }
        page = "psqlmessages/monitor/list_page.html"
        return render_page(request, page, {self.name: template}, {**context, **shared})


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Parameters in the URL of a list. The state "" selects all."""

    definition: ListDefinition
    search: str
    sort: str
    page: int
    state: str

    @property
    def column(self) -> str:
        """The name of the column to sort by."""
        return self.sort.removeprefix("-")

    @property
    def is_descending(self) -> bool:
        """Whether the largest value is first."""
        return self.sort.startswith("-")

    @property
    def offset(self) -> int:
        """The number of rows on earlier pages."""
        return (self.page - 1) * PAGE_SIZE

    def url(self, **changes: Any) -> str:
        """Return the query string with changed parameters."""
        parameters = {"q": self.search, "state": self.state, "sort": self.sort, "page": self.page}
        parameters |= changes
        defaults = {"q": "", "state": "", "sort": self.definition.default_sort, "page": 1}
        changed = {key: value for key, value in parameters.items() if value != defaults[key]}
        return f"?{urlencode(changed)}"

    def key(self) -> Hashable:
        """Return a key for :func:`read_shared`: equal for equal pages."""
        return (self.definition.name, self.search, self.state, self.sort, self.page)


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a list, for the template ``_list.html``. ``total``: number of rows of all pages.

    ``disk_size``: the size of everything in the list, in bytes; None if the list shows no size.
    """

    query: ListQuery
    rows: Sequence[Any]
    total: int
    disk_size: int | None = None

    @property
    def headings(self) -> list[dict[str, Any]]:
        """The columns, each with the URL that sorts by it.

        Numbers are first sorted descending, other columns ascending. The URL of the column that is
        sorted now reverses the order.
        """
        return [
            {
                "column": column,
                "url": column.name and self._sort_url(column),
                "is_sorted": bool(column.name) and column.name == self.query.column,
            }
            for column in self.query.definition.columns
        ]

    def _sort_url(self, column: Column) -> str:
        is_descending = "number" in column.kind.split()
        if column.name == self.query.column:
            is_descending = not self.query.is_descending
        return self.query.url(sort=f"-{column.name}" if is_descending else column.name, page=1)

    @property
    def first(self) -> int:
        """The number of the first row, from 1."""
        return self.query.offset + 1

    @property
    def last(self) -> int:
        """The number of the last row."""
        return self.query.offset + len(self.rows)

    @property
    def previous_url(self) -> str:
        """The URL of the previous page; "" on the first page."""
        return self.query.url(page=self.query.page - 1) if self.query.page > 1 else ""

    @property
    def next_url(self) -> str:
        """The URL of the next page; "" on the last page or after it."""
        is_last = self.last >= self.total or not self.rows
        return "" if is_last else self.query.url(page=self.query.page + 1)

    @property
    def is_filtered(self) -> bool:
        """Whether a filter may hide rows."""
        return bool(self.query.search or self.query.state)


def check_parameters(request: HttpRequest, names: Iterable[str]) -> None:
    """Raise BadRequest (400) if the URL has a parameter not in ``names``, or a parameter twice."""
    known = {FRAGMENT, *names}
    for name, values in request.GET.lists():
        if name not in known:
            raise BadRequest(f"The parameter {name!r} is unknown.")
        if len(values) > 1:
            raise BadRequest(f"The parameter {name!r} occurs {len(values)} times.")


def parse_search(request: HttpRequest, name: str = "search", maximum: int = 200) -> str:
    """Return a text to search for, without spaces at both ends; raise BadRequest (400) if wrong."""
    search = request.GET.get(name, "").strip()
    if len(search) > maximum or "\0" in search:
        raise BadRequest(f"{name}: at most {maximum} characters, and no NUL.")
    return search


def parse_page(request: HttpRequest, last: int) -> int:
    """Parse the number of a page; raise BadRequest (400) unless it is from 1 to ``last``."""
    text = request.GET.get("page", "1")
    if not (page := parse_number(text, last)):
        raise BadRequest(f"page: {text!r} is not a number from 1 to {last}.")
    return page


def render_page(
    request: HttpRequest, page: str, fragments: Mapping[str, str], context: Mapping[str, Any]
) -> HttpResponse:
    """Render a page, or only the fragment that ``?fragment=`` names.

    ``fragments`` has templates by name. Each must have one root element, with the attribute
    ``data-fragment``. A context value may be a function: only templates that use it call it, so a
    fragment reads only its own data.
    """
    name = request.GET.get(FRAGMENT)
    if name is None:
        return render(request, page, dict(context))
    if name not in fragments:
        raise BadRequest(f"There is no fragment {name!r}.")
    return render(request, fragments[name], dict(context))


# Data

# Viewers share a result for this time.
_SHARED_SECONDS: Final = 1.0
# Viewers choose the keys, so limit their number.
_MAX_SHARED: Final = 200
_QUERY_TIMEOUT: Final = "2s"


@dataclass(slots=True)
class _SharedResult:
    lock: Lock = field(default_factory=Lock)
    read_at: float = float("-inf")
    value: Any = None
    error: DatabaseError | None = None


_results: OrderedDict[Hashable, _SharedResult] = OrderedDict()
_results_lock: Final = Lock()


def read_shared(key: Hashable, read: Callable[[], T]) -> T:
    """Return the last result of this key if it is less than a second old; else call ``read``.

    All viewers with the same language in this process share the results: a hundred open pages cost
    one query. They also share a DatabaseError, so that they do not wait for the same timeout one
    after the other.
    """
    key = (get_language(), key)
    with _results_lock:
        result = _results.setdefault(key, _SharedResult())
        _results.move_to_end(key)
        if len(_results) > _MAX_SHARED:
            _results.popitem(last=False)
    with result.lock:
        if monotonic() - result.read_at >= _SHARED_SECONDS:
            result.error = None
            try:
                result.value = read()
            except DatabaseError as error:
                result.error = error
            result.read_at = monotonic()
        if result.error is not None:
            # Raise it without its traceback, which grows each time that the shared error is raised.
            raise result.error.with_traceback(None)
        value: T = result.value
        return value


def fetch(query: str, values: Any = None) -> list[tuple[Any, ...]]:
    """Run a query with a time limit of two seconds, and return all rows."""
    alias = database()
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        limit_query_time()
        cursor.execute(query, values)
        return cursor.fetchall()


def limit_query_time() -> None:
    """Limit each statement to two seconds, without JIT, until the transaction ends."""
    with connections[database()].cursor() as cursor:
        cursor.execute(
            "SELECT set_config('statement_timeout', %s, true), set_config('jit', 'off', true)",
            [_QUERY_TIMEOUT],
        )
