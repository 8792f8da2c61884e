"""Queue pages: the list of all queues, and one queue with its elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.db import OperationalError, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_http_methods, require_safe

from psqlmessages.exceptions import MessagesError
from psqlmessages.models import Queue
from psqlmessages.models.names import isolate
from psqlmessages.models.rules import database
from psqlmessages.monitor.access import VIEW_BODIES, VIEW_ELEMENTS
from psqlmessages.monitor.actions import allowed_actions, missing_rule, perform
from psqlmessages.monitor.formats import format_age, format_count
from psqlmessages.monitor.listing import (
    PAGE_SIZE,
    Column,
    ListDefinition,
    ListPage,
    ListQuery,
    check_parameters,
    fetch,
    parse_page,
    parse_search,
    read_shared,
    render_page,
)
from psqlmessages.monitor.minutes import history_url
from psqlmessages.monitor.names import object_url
from psqlmessages.monitor.queries import QUEUES_DISK_SIZE
from psqlmessages.monitor.queue_actions import ACTIONS, MAX_SEARCHED, list_nodes, peek
from psqlmessages.monitor.queue_status import (
    BUCKET_SECONDS,
    BUCKETS,
    MAX_IN_LIST,
    MonitoredQueue,
    add_sizes,
    polylines,
    read_queue,
    read_queues,
    read_rates,
)
from psqlmessages.monitor.views import admin_page, common_context, require_monitor_access

_LIST: Final = ListDefinition(
    name="queues",
    title=_("Queues"),
    columns=(
        Column(_("Queue"), "name"),
        Column(_("Elements"), "elements", "number"),
        Column(_("Available"), kind="number wide"),
        Column(_("Scheduled"), kind="number wide"),
        Column(_("Reserved"), kind="number wide"),
        Column(_("In/s"), "in", "number"),
        Column(_("Out/s"), "out", "number"),
        Column(_("Oldest"), kind="number"),
        Column(_("Dead letters"), "dead", "number wide"),
        Column(_("Consumers"), kind="wide"),
        Column(_("Last 10 minutes"), kind="line wide"),
    ),
    default_sort="-elements",
    states={
        "filled": _("with elements"),
        "unread": _("without consumers"),
        "paused": _("paused"),
        "dead": _("dead-letter queues"),
        "empty": _("empty"),
    },
)
_SORT_KEYS: Final[Mapping[str, Callable[[MonitoredQueue], Any]]] = {
    "name": lambda queue: queue.name,
    "elements": lambda queue: queue.backlog,
    "in": lambda queue: queue.rate_in or 0,
    "out": lambda queue: queue.rate_out or 0,
    "dead": lambda queue: queue.dead_letters,
}
_STATES: Final[Mapping[str, Callable[[MonitoredQueue], bool]]] = {
    "": lambda _queue: True,
    "filled": lambda queue: queue.backlog > 0,
    "unread": lambda queue: queue.lacks_consumer,
    "paused": lambda queue: queue.is_paused,
    "dead": lambda queue: queue.is_dead_letter_queue,
    "empty": lambda queue: queue.backlog == 0,
}


@require_safe
@require_monitor_access
def queues(request: HttpRequest) -> HttpResponse:
    """Show the list of all queues."""
    return _LIST.render(request, _read_page, common_context(request))


def _read_page(query: ListQuery) -> ListPage:
    text, is_chosen = query.search.lower(), _STATES[query.state]
    matching = [queue for queue in read_queues() if text in queue.name.lower() and is_chosen(queue)]
    matching.sort(key=lambda queue: queue.name)
    matching.sort(key=_SORT_KEYS[query.column], reverse=query.is_descending)
    shown = matching[query.offset : query.offset + PAGE_SIZE]
    add_sizes(shown, MAX_IN_LIST)
    disk_size = fetch(f"SELECT {QUEUES_DISK_SIZE}")[0][0]
    return ListPage(query, [_row(queue) for queue in shown], len(matching), disk_size)


def _row(queue: MonitoredQueue) -> dict[str, Any]:
    """Return the texts that the templates show for a queue."""
    largest = max((value for value in queue.graph if value is not None), default=0)
    elements = gettext("about {number:,}") if queue.is_estimate else "{number:,}"
    return {
        "queue": queue,
        "elements": elements.format(number=queue.elements),
        "available": format_count(queue.available, queue.limit),
        "scheduled": format_count(queue.scheduled, queue.limit),
        "reserved": format_count(queue.reserved, queue.limit),
        "rate_in": _rate(queue.rate_in),
        "rate_out": _rate(queue.rate_out),
        "oldest": format_age(queue.oldest) or "-",
        "consumers": _consumers(queue),
        "dead_letters": f"{queue.dead_letters:,}",
        "graph": polylines(queue.graph, largest),
        "largest": f"{largest:,}",
        "width": BUCKETS - 1,
    }


def _rate(rate: float | None) -> str:
    if rate is None:
        return "…"
    return f"{rate:,.0f}" if rate == 0 or rate >= 100 else f"{rate:,.1f}"


def _consumers(queue: MonitoredQueue) -> str:
    """Describe the known consumers. A queue does not store which consumers wait for elements."""
    parts = [gettext("exchange {name}").format(name=isolate(name)) for name in queue.exchanges]
    if queue.is_taking:
        parts.append(gettext("taking"))
    elif queue.is_awaited:
        parts.append(gettext("waiting"))
    return ", ".join(parts) or gettext("none seen")


# One queue


@require_http_methods(["GET", "HEAD", "POST"])
@require_monitor_access
def queue(request: HttpRequest, name: str = "") -> HttpResponse:
    """Show a queue, or perform an action on it; without a name, show the list of queues."""
    if not name and "name" not in request.GET and request.method != "POST":
        return queues(request)
    name = name or request.GET.get("name", "")
    record = Queue.objects.using(database()).filter(name=name).first() if "\0" not in name else None
    if record is None:
        raise Http404(f"There is no queue {name!r}.")
    may_see_bodies = request.user.has_perm(VIEW_BODIES)
    if request.method == "POST":
        if (action := ACTIONS.get(request.POST.get("action", ""))) is None:
            raise BadRequest("This action is unknown.")
        answer = "yes" if may_see_bodies else "no"
        return perform(request, action, record, object_url("queue", name), may_see_bodies=answer)
    check_parameters(request, ["name", "search", "page"])
    may_see_elements = request.user.has_perm(VIEW_ELEMENTS)
    context = {
        **common_context(request),
        "name": name,
        "queue": record,
        "history_url": history_url("queue", name),
        "row": lambda: read_shared(("queue", record.pk), lambda: _queue_row(record)),
        "readers": lambda: list_nodes(name, "R", "RW", "A"),
        "writers": lambda: list_nodes(name, "W", "RW", "A"),
        "admin_queue_url": admin_page(request, "queue", is_change_page=True).replace(
            "/0/", f"/{record.pk}/"
        ),
        "admin_rules_url": admin_page(request, "auth", {"q": name}),
        "allowed": allowed_actions(request, ACTIONS),
        "may_see_elements": may_see_elements,
        "elements_permission": VIEW_ELEMENTS,
        "may_see_bodies": may_see_bodies,
        "bodies_permission": VIEW_BODIES,
    }
    if may_see_elements and "fragment" not in request.GET:
        context |= _elements_context(request, name, with_bodies=may_see_bodies)
    templates = {"queue": "psqlmessages/monitor/_queue.html"}
    return render_page(request, "psqlmessages/monitor/queue.html", templates, context)


def _queue_row(record: Queue) -> dict[str, Any] | None:
    if (status := read_queue(record.pk)) is None:
        return None
    rates_in, rates_out = read_rates(record.pk)
    busiest = max((rate for rate in (*rates_in, *rates_out) if rate is not None), default=0.0)
    return {
        **_row(status),
        "lines_in": polylines(rates_in, busiest),
        "lines_out": polylines(rates_out, busiest),
        "rate_width": BUCKETS - 2,
        "busiest": _rate(busiest),
        "minutes": BUCKETS * BUCKET_SECONDS // 60,
    }


def _elements_context(request: HttpRequest, name: str, *, with_bodies: bool) -> dict[str, Any]:
    """Return the template context of a page of elements, read as the node of this project."""
    search = parse_search(request)
    page = parse_page(request, MAX_SEARCHED // PAGE_SIZE)
    offset = (page - 1) * PAGE_SIZE
    context: dict[str, Any] = {"search": search, "page": page, "max_searched": MAX_SEARCHED}
    try:
        with transaction.atomic(using=database()):
            elements = peek(name, search, offset, limit=PAGE_SIZE + 1, with_bodies=with_bodies)
    except (MessagesError, ImproperlyConfigured, OperationalError) as error:
        rule = missing_rule(error, request.get_full_path())
        return {**context, "peek_error": str(error).strip(), "rule": rule}
    return {
        **context,
        "elements": elements[:PAGE_SIZE],
        "previous": _page_url(request, page - 1) if page > 1 else "",
        "next": _page_url(request, page + 1) if len(elements) > PAGE_SIZE else "",
        "has_dead_letters": any(element.dead_from for element in elements),
    }


def _page_url(request: HttpRequest, page: int) -> str:
    return f"?{urlencode({**request.GET.dict(), 'page': page})}"
