"""Queue elements in the admin: pages of elements, redrive of dead letters, queue operations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import F, Func, IntegerField, Q, QuerySet, TextField
from django.db.models.functions import Left, Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.utils.dateparse import parse_datetime
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop as noop

from psqlmessages.admin import base
from psqlmessages.admin.base import database, fetch_rows, limit_lock_waits
from psqlmessages.admin.lists import format_time
from psqlmessages.models import Element, Queue
from psqlmessages.models.names import isolate
from psqlmessages.orm import with_zone
from psqlmessages.wire import MAX_ID, parse_number

# Queue operations of the admin. They need no rule: the web process owns the tables, so it may
# change them and call private functions.

_SET_PAUSED = """
    WITH changed AS (
        UPDATE psqlmessages_queue AS q SET is_paused = %(is_paused)s
        WHERE q.id = ANY (%(ids)s) AND q.is_paused <> %(is_paused)s RETURNING q AS queue
    )
    SELECT (c.queue).id, messages._notify_waiting_readers(c.queue) FROM changed AS c
"""
_DRAIN = """
    WITH locked AS MATERIALIZED (
        SELECT e.id FROM psqlmessages_element AS e
        WHERE e.queue_id = %s AND e.available_at <= clock_timestamp() FOR UPDATE SKIP LOCKED
    ), deleted AS (
        DELETE FROM psqlmessages_element AS e USING locked AS l WHERE e.id = l.id RETURNING 1
    )
    SELECT count(*) FROM deleted
"""
_REMOVE = "SELECT messages._remove_queue(q) FROM messages._existing_queue(%s) AS q"


def set_paused(ids: Iterable[int], *, is_paused: bool) -> set[int]:
    """Pause or resume queues and notify waiting consumers; return the keys of changed queues.

    Raises OperationalError if a transaction locks one of the queues for 10 s.
    """
    with transaction.atomic(using=database()):
        limit_lock_waits()
        changed = fetch_rows(_SET_PAUSED, {"ids": list(ids), "is_paused": is_paused})
    return {row[0] for row in changed}


def drain(queue: int) -> int:
    """Delete all available elements, even if the queue is paused; return their number."""
    with transaction.atomic(using=database()):
        ((removed,),) = fetch_rows(_DRAIN, [queue])
        if removed:
            fetch_rows("SELECT messages._add_queue_counts(%s, removes => %s)", [queue, removed])
    return int(removed)


def remove_empty(name: str) -> bool:
    """Remove a queue; return False if it has elements or does not exist.

    Raises OperationalError if a transaction locks the queue for 10 s.
    """
    with transaction.atomic(using=database()):
        limit_lock_waits()
        return (True,) in fetch_rows(_REMOVE, [name])


PAGE_SIZE: Final = 50
# Longer bodies and headers are shown in part.
BODY_CHARACTERS: Final = 2000
HEADER_CHARACTERS: Final = 2000
# One redrive moves at most this number of dead letters.
MAX_REDRIVEN: Final = 10_000
# The report of a redrive names at most this number of queues.
_MAX_QUEUES: Final = 5
VIEW_BODIES: Final = "psqlmessages.view_bodies"
FROM_QUEUE: Final = "x-dl-from-queue"  # header of a dead letter: its former queue
_ORIGIN: Final = (FROM_QUEUE, "x-dl-t", "x-dl-tries")
_FIELDS: Final = ("id", "headers", "mature_at", "available_at", "tries", "pushed_at", "enc")
_ORDERS: Final = {"first": ("available_at", "id"), "last": ("-available_at", "-id")}
_ENCODINGS: Final = {None: _("text"), "json": "JSON", "b64": _("bytes, as base64")}


class ElementsMixin:
    """Adds a page that shows the elements of a queue and can redrive dead letters."""

    pages: ClassVar = {"elements": "<int:key>/elements/"}

    def has_view_elements_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may view queues and elements."""
        return self.has_view_permission(request) and request.user.has_perm(
            "psqlmessages.view_element"
        )

    def elements_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Show a page of a queue's elements, or redrive dead letters."""
        queue = get_object_or_404(Queue.objects.using(database()), pk=key)
        if not self.has_view_elements_permission(request):
            can_view = self.has_view_permission(request)
            raise PermissionDenied(f"psqlmessages.view_{'element' if can_view else 'queue'}")
        may_redrive = request.user.has_perm("psqlmessages.change_element")
        if request.method == "POST":
            if not may_redrive:
                raise PermissionDenied("psqlmessages.change_element")
            self._redrive(request, queue)
            return HttpResponseRedirect(request.get_full_path())
        may_see_bodies = request.user.has_perm(VIEW_BODIES)
        return self.page(
            request,
            "queue/elements",
            _("Elements of {queue}").format(queue=queue),
            **_read_page(queue, request.GET, may_see_bodies=may_see_bodies),
            queue=queue,
            may_redrive=may_redrive,
            may_see_bodies=may_see_bodies,
            bodies_permission=VIEW_BODIES,
            max_redriven=MAX_REDRIVEN,
        )

    def _redrive(self, request: HttpRequest, queue: Queue) -> None:
        """Redrive the selected or all dead letters, up to MAX_REDRIVEN, and report the result."""
        elements = Element.objects.using(database())
        dead_letters = elements.filter(queue=queue, headers__has_key=FROM_QUEUE)
        if "all" not in request.POST:
            keys = [parse_number(text, MAX_ID) for text in request.POST.getlist("element")]
            chosen = [key for key in keys if key is not None]
            dead_letters = dead_letters.filter(pk__in=chosen[:MAX_REDRIVEN])
        dead_letters = dead_letters.order_by("available_at", "id")[:MAX_REDRIVEN]
        queue_by_id = dict(dead_letters.values_list("pk", f"headers__{FROM_QUEUE}"))
        if not queue_by_id:
            self.message_user(request, _("No dead letter was selected."), messages.WARNING)
            return
        counts = Counter(str(name) for name in queue_by_id.values()).most_common()
        listed = [f"{number:,} from {isolate(name)}" for name, number in counts[:_MAX_QUEUES]]
        if others := sum(number for _name, number in counts[_MAX_QUEUES:]):
            listed.append(f"{others:,} from other queues")
        queues = ", ".join(listed)
        text = noop("{moved:,} of {chosen:,} dead letters were redriven. Selected: {queues}.")
        with transaction.atomic(using=database()):
            ((moved,),) = fetch_rows(
                "SELECT messages._redrive_dead_letters(%s)", [list(queue_by_id)]
            )
            numbers = {"moved": moved, "chosen": len(queue_by_id), "queues": queues}
            base.record_history(request, [(queue, CHANGE, text.format(**numbers))])
        text = _(text).format(**numbers)
        if moved < len(queue_by_id):
            reason = _(
                "The others stay, because they are reserved, or because their former queue now has"
                " another dead-letter queue."
            )
            text = f"{text} {reason}"
        self.message_user(request, text, messages.SUCCESS if moved else messages.WARNING)


def _read_page(queue: Queue, query: Any, *, may_see_bodies: bool) -> dict[str, Any]:
    """Return the elements of a page and its links, as context of the template.

    ``query`` may contain the order, and the time and id of the previous page's last element.
    """
    order = query.get("order") if query.get("order") in _ORDERS else "first"
    elements_of_queue = Element.objects.using(database()).filter(queue=queue)
    entries = _after_previous_page(elements_of_queue, query, order)
    entries = entries.order_by(*_ORDERS[order]).annotate(
        now=Now(),
        size=Func(F("body"), function="octet_length", output_field=IntegerField()),
        is_leased=Q(lease__isnull=False),
    )
    names = [*_FIELDS, "now", "size", "is_leased"]
    if may_see_bodies:
        body_start = Left("body", BODY_CHARACTERS, output_field=TextField())
        entries = entries.annotate(body_start=body_start)
        names.append("body_start")
    elements = list(entries.values(*names)[: PAGE_SIZE + 1])
    rows = [_describe(element) for element in elements[:PAGE_SIZE]]
    next_page = ""
    if len(elements) > PAGE_SIZE:
        last = elements[PAGE_SIZE - 1]
        time = with_zone(last["available_at"])
        after = {"time": time.isoformat(), "id": last["id"], "order": order}
        next_page = f"?{urlencode(after)}"
    return {
        "order": order,
        "rows": rows,
        "next_page": next_page,
        "is_first": "time" not in query,
        "has_dead": any(row["dead_from"] for row in rows),
    }


def _after_previous_page(elements: QuerySet[Element], query: Any, order: str) -> QuerySet[Element]:
    try:
        time = parse_datetime(query.get("time", ""))
    except ValueError:
        return elements
    last_id = parse_number(query.get("id", ""), MAX_ID)
    if time is None or time.tzinfo is None or last_id is None:
        return elements
    comparison = "gt" if order == "first" else "lt"
    at_same_time = Q(available_at=time, **{f"id__{comparison}": last_id})
    return elements.filter(Q(**{f"available_at__{comparison}": time}) | at_same_time)


def _describe(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an element that the page shows, without its lease."""
    is_waiting = entry["available_at"] > entry["now"]
    state = _("available")
    if is_waiting:
        state = _("reserved") if entry["is_leased"] else _("scheduled")
    headers, body = entry["headers"], entry.get("body_start")
    origin = {name: headers.get(name) for name in _ORIGIN} if isinstance(headers, dict) else {}
    dead_from = origin.get(FROM_QUEUE)
    if dead_from:
        # The page shows these headers of a dead letter as a sentence.
        headers = {name: value for name, value in headers.items() if name not in _ORIGIN}
    text = json.dumps(headers, ensure_ascii=False) if headers else ""
    return {
        **entry,
        "state": state,
        "until": format_time(entry["available_at"]) if is_waiting else None,
        "mature": format_time(entry["mature_at"]),
        "pushed": format_time(entry["pushed_at"]),
        "headers": text if len(text) <= HEADER_CHARACTERS else f"{text[:HEADER_CHARACTERS]}…",
        "dead_from": str(dead_from or ""),
        "dead_tries": origin.get("x-dl-tries"),
        "died": _format_death(origin.get("x-dl-t")),
        "kind": _ENCODINGS.get(entry["enc"], entry["enc"]),
        "body": body,
        # Whether the body is longer than the part that the page shows.
        "has_more": body is not None and entry["size"] > len(body.encode()),
    }


def _format_death(value: Any) -> str:
    """Format the time of death, a header that any program can set; return "" if it is invalid."""
    try:
        time = parse_datetime(str(value))
    except ValueError:
        return ""
    return format_time(time) if time and time.tzinfo else ""
