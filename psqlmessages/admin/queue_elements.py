"""Queue elements in the admin, page by page, with redrive of dead letters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import F, Func, IntegerField, Q, QuerySet, TextField
from django.db.models.functions import Left, Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.utils.dateparse import parse_datetime
from django.utils.http import urlencode

from psqlmessages.admin import base
from psqlmessages.admin.base import bound_waits, database, rows
from psqlmessages.models import Element, Queue

# Queue operations of the admin. Django owns the tables, so no rule is needed.

# Removing a queue blocks all queues, so wait only briefly for the lock.
_LOCK_TIMEOUT = "2s"
_SET_PAUSED = """
    WITH changed AS (
        UPDATE psqlmessages_queue AS q SET is_paused = %(is_paused)s
        WHERE q.id = ANY (%(ids)s) AND q.is_paused <> %(is_paused)s RETURNING q AS queue
    )
    SELECT (c.queue).id, messages._wake_readers(c.queue) FROM changed AS c
"""
_DRAIN = """
    WITH locked AS MATERIALIZED (
        SELECT e.id FROM psqlmessages_element AS e
        WHERE e.queue_id = %s AND e.available_at <= clock_timestamp() FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM psqlmessages_element AS e USING locked AS l WHERE e.id = l.id RETURNING 1
    )
    SELECT count(*) FROM gone
"""
_REMOVE = """
    SELECT CASE WHEN EXISTS (
        SELECT FROM psqlmessages_element AS e
        JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %(name)s
    ) THEN false ELSE messages._remove_queue(%(name)s) END
"""


def make(name: str) -> int:
    """Create a queue, if it does not exist; return its key."""
    ((key,),) = rows("SELECT (messages._queue(%s)).id", [name])
    return int(key)


def set_paused(ids: Iterable[int], *, is_paused: bool) -> set[int]:
    """Pause or resume queues and notify waiting consumers; return the queues that changed.

    Raises OperationalError if a transaction that uses one of them holds its lock for 10 s.
    """
    with transaction.atomic(using=database()):
        bound_waits()
        return {key for key, _ in rows(_SET_PAUSED, {"ids": list(ids), "is_paused": is_paused})}


def drain(queue: int) -> int:
    """Remove all available elements, even if the queue is paused; return their number."""
    with transaction.atomic(using=database()):
        ((removed,),) = rows(_DRAIN, [queue])
        if removed:
            rows("SELECT messages._count(%s, gets => %s)", [queue, removed])
    return int(removed)


def remove_empty(name: str) -> bool:
    """Remove a queue; False if it has elements or no longer exists.

    Raises OperationalError if transactions that use queues hold their locks for 2 s.
    """
    with transaction.atomic(using=database()):
        rows("SELECT set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT])
        with connections[database()].cursor() as cursor:
            cursor.execute("LOCK TABLE psqlmessages_queue IN EXCLUSIVE MODE")
        ((is_removed,),) = rows(_REMOVE, {"name": name})
    return bool(is_removed)


PAGE: Final = 50
# Limits for displayed bodies and headers.
BODY_CHARACTERS: Final = 2000
HEADER_CHARACTERS: Final = 2000
# Limit for dead letters per redrive.
MOST_PUT_BACK: Final = 10_000
VIEW_BODIES: Final = "psqlmessages.view_bodies"
FROM_QUEUE: Final = "x-dl-from-queue"
_ORDERS: Final = {"first": ("available_at", "id"), "last": ("-available_at", "-id")}
_ENCODINGS: Final = {None: "text", "json": "JSON", "b64": "bytes, as base64"}


class ElementsMixin:
    """The page elements/ below a queue's page."""

    pages: ClassVar = {"elements": "<int:queue>/elements/"}

    def has_view_elements_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may view queues and elements."""
        return self.has_view_permission(request) and request.user.has_perm(
            "psqlmessages.view_element"
        )

    def elements_view(self, request: HttpRequest, queue: int) -> HttpResponse:
        """Show a page of a queue's elements, or redrive dead letters."""
        found = get_object_or_404(Queue, pk=queue)
        if not self.has_view_elements_permission(request):
            raise PermissionDenied
        may_put_back = request.user.has_perm("psqlmessages.change_element")
        if request.method == "POST":
            if not may_put_back:
                raise PermissionDenied
            self._put_back(request, found)
            return HttpResponseRedirect(request.get_full_path())
        with_bodies = request.user.has_perm(VIEW_BODIES)
        return self.page(
            request,
            "queue/elements",
            f"Elements of {found}",
            **_page(found, request.GET, with_bodies=with_bodies),
            queue=found,
            may_put_back=may_put_back,
            may_see_bodies=with_bodies,
            bodies_permission=VIEW_BODIES,
            most_put_back=MOST_PUT_BACK,
        )

    def _put_back(self, request: HttpRequest, queue: Queue) -> None:
        """Redrive the chosen dead letters, or all in the queue, and report their number."""
        dead = Element.objects.filter(queue=queue, headers__has_key=FROM_QUEUE)
        if "all" not in request.POST:
            chosen = [int(key) for key in request.POST.getlist("element") if key.isdecimal()]
            dead = dead.filter(pk__in=chosen[:MOST_PUT_BACK])
        dead = dead.order_by("available_at", "id").values_list("pk", f"headers__{FROM_QUEUE}")
        letters = dict(dead[:MOST_PUT_BACK])
        if not letters:
            self.message_user(request, "No dead letter was selected.", messages.WARNING)
            return
        ((moved,),) = rows("SELECT messages._requeue_dead_letters(%s)", [list(letters)])
        counts = Counter(str(name) for name in letters.values()).most_common(5)
        places = ", ".join(f"{number:,} into {name}" for name, number in counts)
        text = f"{moved:,} of {len(letters):,} dead letters were redriven: {places}."
        if moved < len(letters):
            text += " Reserved ones stay."
        base.log(request, [(queue, CHANGE, text)])
        self.message_user(request, text, messages.SUCCESS if moved else messages.WARNING)


def _page(queue: Queue, given: Any, *, with_bodies: bool) -> dict[str, Any]:
    """Read a page; ``given`` has the order and the last element of the previous page."""
    order = given.get("order") if given.get("order") in _ORDERS else "first"
    entries = _behind(Element.objects.filter(queue=queue), given, order)
    entries = entries.order_by(*_ORDERS[order]).annotate(
        at=Now(),
        size=Func(F("body"), function="octet_length", output_field=IntegerField()),
        is_leased=Q(lease__isnull=False),
    )
    names = [
        *("id", "headers", "mature_at", "available_at", "tries", "pushed_at", "enc"),
        *("at", "size", "is_leased"),
    ]
    if with_bodies:
        entries = entries.annotate(shown=Left("body", BODY_CHARACTERS, output_field=TextField()))
        names.append("shown")
    found = list(entries.values(*names)[: PAGE + 1])
    rows = [_row(entry) for entry in found[:PAGE]]
    following = ""
    if len(found) > PAGE:
        last = found[PAGE - 1]
        after = {"time": last["available_at"].isoformat(), "id": last["id"], "order": order}
        following = f"?{urlencode(after)}"
    return {
        "order": order,
        "rows": rows,
        "following": following,
        "is_first": "time" not in given,
        "has_dead": any(row["dead_from"] for row in rows),
    }


def _behind(elements: QuerySet[Element], given: Any, order: str) -> QuerySet[Element]:
    """Exclude the elements of previous pages."""
    try:
        time = parse_datetime(given.get("time", ""))
    except ValueError:
        return elements
    if time is None or time.tzinfo is None or not given.get("id", "").isdecimal():
        return elements
    key, sign = int(given["id"]), "gt" if order == "first" else "lt"
    if key >= 2**63:
        return elements
    same = Q(available_at=time, **{f"id__{sign}": key})
    return elements.filter(Q(**{f"available_at__{sign}": time}) | same)


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    """Describe an element as the page shows it, without its lease."""
    is_ahead = entry["available_at"] > entry["at"]
    state = ("reserved" if entry["is_leased"] else "scheduled") if is_ahead else "available"
    headers, body = entry["headers"], entry.get("shown")
    text = json.dumps(headers, ensure_ascii=False) if headers else ""
    dead_from = headers.get(FROM_QUEUE) if isinstance(headers, dict) else None
    return {
        **entry,
        "state": state,
        "until": entry["available_at"] if is_ahead else None,
        "headers": text if len(text) <= HEADER_CHARACTERS else f"{text[:HEADER_CHARACTERS]}…",
        "dead_from": str(dead_from or ""),
        "kind": _ENCODINGS.get(entry["enc"], entry["enc"]),
        "body": body,
        # Whether the body is longer than the part shown.
        "has_more": body is not None and entry["size"] > len(body.encode()),
    }
