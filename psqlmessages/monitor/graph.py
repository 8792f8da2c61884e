"""Graph page: exchanges, queues and rates, read at most every 2 s for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, router
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.connection import ConnectionDoesNotExist
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages.client.options import conninfo
from psqlmessages.exchanges.model import QueueRef
from psqlmessages.exchanges.store.definitions import DefinedDestination, DefinedExchange
from psqlmessages.exchanges.store.route_graph import graph
from psqlmessages.exchanges.store.stats import ALIVE_SECONDS, MOST_LISTED, SIZES, limits
from psqlmessages.models import Exchange
from psqlmessages.monitor.access import VIEW_MONITOR, MonitorAccess, permit_of
from psqlmessages.monitor.frames import to_json
from psqlmessages.monitor.views import admin_page, common_context, for_staff
from psqlmessages.orm import dsn

# The page draws at most this many exchanges: a larger graph is unreadable.
EXCHANGES: Final = 200
TICK_SECONDS: Final = 2.0
# Timeout for connecting and querying.
_PATIENCE_SECONDS: Final = 2
# Skip a namespace for this long after a timeout, so that it does not delay the others each time.
_AWAY_SECONDS: Final = 10.0

_EXCHANGES: Final = """
    SELECT x.id, x.name, x.source_namespace, x.source_queue, x.is_running,
        (SELECT count(DISTINCT c.worker) FROM psqlmessages_exchangecount AS c
         WHERE c.exchange_id = x.id AND c.outcome = 'ok'
           AND c.seen_at > statement_timestamp() - make_interval(secs => %s)),
        (SELECT coalesce(json_agg(json_build_array(d.namespace, d.queue, d.selector)
                                  ORDER BY d.position), '[]')
         FROM psqlmessages_destination AS d WHERE d.exchange_id = x.id),
        (SELECT coalesce(json_object_agg(s.name, s.number), '{}') FROM (
            SELECT CASE c.outcome WHEN 'to' THEN c.destination::text ELSE c.outcome END AS name,
                sum(c.count)::bigint AS number
            FROM psqlmessages_exchangecount AS c WHERE c.exchange_id = x.id GROUP BY 1
         ) AS s)
    FROM psqlmessages_exchange AS x ORDER BY x.name LIMIT %s
"""
_QUEUES: Final = f"""
    SELECT psqlmessages_queue.name, psqlmessages_queue.id, psqlmessages_queue.is_paused, {SIZES}
    FROM psqlmessages_queue WHERE psqlmessages_queue.name = ANY (%s)
"""  # noqa: S608 - put together from our own texts


class GraphWatch:
    """The graph as JSON text, read on demand and shared by all viewers."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._away_until: dict[str, float] = defaultdict(float)

    async def text(self) -> str | None:
        """Return the graph, at most two seconds old; None if it cannot be read."""
        if time.monotonic() - self._read_at >= TICK_SECONDS:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(), name="psqlmessages graph")
            reading = self._reading
            # A viewer that disconnects does not cancel the query for the others.
            await asyncio.wait({reading})
            reading.result()
        return self._text

    async def _read(self) -> None:
        home = router.db_for_read(Exchange)
        rows = await rows_of(home, _EXCHANGES, (ALIVE_SECONDS, EXCHANGES + 1))
        self._text = None
        if rows is not None:
            exchanges = [_exchange(row) for row in rows[:EXCHANGES]]
            queues = await self._queues(_places(exchanges))
            self._text = _text(exchanges, queues, has_more=len(rows) > EXCHANGES)
        self._read_at = time.monotonic()

    async def _queues(self, places: Iterable[QueueRef]) -> list[dict[str, Any]]:
        names: dict[str, set[str]] = defaultdict(set)
        for place in places:
            names[place.namespace].add(place.queue)
        found = await asyncio.gather(*(self._of(alias, names[alias]) for alias in names))
        return list(chain.from_iterable(found))

    async def _of(self, alias: str, names: set[str]) -> list[dict[str, Any]]:
        """Describe the queues of a namespace; without sizes if the namespace does not answer."""
        rows = None
        if time.monotonic() >= self._away_until[alias]:
            rows = await rows_of(alias, _QUEUES, (*limits(MOST_LISTED), sorted(names)))
            if rows is None:
                self._away_until[alias] = time.monotonic() + _AWAY_SECONDS
        known = {name: rest for name, *rest in rows or ()}
        return [_queue(alias, name, known.get(name), rows is not None) for name in sorted(names)]


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, GraphWatch] = WeakKeyDictionary()


def get_graph() -> GraphWatch:
    """Return the graph of this event loop; it queries nothing until :meth:`GraphWatch.text`."""
    loop = asyncio.get_running_loop()
    if (watch := _watches.get(loop)) is None:
        watch = _watches[loop] = GraphWatch()
    return watch


async def rows_of(
    alias: str, query: str, values: Iterable[Any], timeout_seconds: float | None = None
) -> list[tuple[Any, ...]] | None:
    """Run a query on a connection of its own; return None on an error or a timeout.

    ``timeout_seconds`` is the timeout in seconds, by default two.
    """
    asking = asyncio.create_task(
        _ask(alias, query, tuple(values), timeout_seconds or _PATIENCE_SECONDS)
    )
    # Do not await the task: closing a connection that hangs may hang too.
    done, _ = await asyncio.wait({asking}, timeout=timeout_seconds or _PATIENCE_SECONDS)
    if not done:
        asking.cancel()
        return None
    return asking.result()


async def _ask(
    alias: str, query: str, values: tuple[Any, ...], timeout_seconds: float
) -> list[tuple[Any, ...]] | None:
    try:
        address = conninfo(dsn(alias), "monitor")
        async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
            await connection.execute(f"SET statement_timeout = '{timeout_seconds}s'")
            return await (await connection.execute(query, values)).fetchall()
    except (psycopg.Error, OSError, ImproperlyConfigured, ConnectionDoesNotExist):
        return None


def _exchange(row: tuple[Any, ...]) -> dict[str, Any]:
    key, name, namespace, queue, is_running, workers, destinations, counts = row
    return {
        "id": key,
        "name": name,
        "source": [namespace, queue],
        "is_running": is_running,
        "workers": workers,
        "destinations": [
            {"to": [ns, to], "selector": selector, "count": counts.get(str(position), 0)}
            for position, (ns, to, selector) in enumerate(destinations)
        ],
        "counts": {name: number for name, number in counts.items() if not name.isdigit()},
    }


def _queue(alias: str, name: str, row: list[Any] | None, is_known: bool) -> dict[str, Any]:
    key, is_paused, sizes = row or (None, False, [0, 0, 0])
    return {
        "ns": alias,
        "queue": name,
        "id": key,
        "is_paused": is_paused,
        # available, scheduled, reserved
        "sizes": [min(size, MOST_LISTED + 1) for size in sizes] if is_known else None,
    }


def _places(exchanges: list[dict[str, Any]]) -> set[QueueRef]:
    """Collect the queues that the graph needs."""
    places: set[QueueRef] = set()
    for exchange in exchanges:
        source = QueueRef(*exchange["source"])
        places |= {source, *(QueueRef(*each["to"]) for each in exchange["destinations"])}
        places |= {
            QueueRef(source.namespace, name)
            for outcome, name in (
                ("no_route", "__no_route__"),
                ("too_many_hops", "__too_many_hops__"),
            )
            if exchange["counts"].get(outcome)
        }
    return places


def _mark_cycles(exchanges: list[dict[str, Any]]) -> None:
    """Mark each destination that is part of a cycle."""
    drawn = graph(
        DefinedExchange(
            exchange["name"],
            QueueRef(*exchange["source"]),
            tuple(DefinedDestination(QueueRef(*each["to"])) for each in exchange["destinations"]),
        )
        for exchange in exchanges
    )
    turning = {(edge.exchange, edge.position) for edge in drawn.edges if edge.is_in_cycle}
    for exchange in exchanges:
        for position, destination in enumerate(exchange["destinations"]):
            destination["is_in_cycle"] = (exchange["name"], position) in turning


def _text(exchanges: list[dict[str, Any]], queues: list[dict[str, Any]], *, has_more: bool) -> str:
    _mark_cycles(exchanges)
    return to_json(
        {
            "now": time.time(),
            "home": DEFAULT_DB_ALIAS,
            "exchanges": exchanges,
            "queues": queues,
            "most": MOST_LISTED,
            "limit": EXCHANGES,
            "has_more": has_more,
        }
    )


# Graph views: the page, and its data as JSON.


@require_safe
@for_staff
def exchanges(request: HttpRequest) -> HttpResponse:
    """Show the graph page."""
    may_add = request.user.has_perm("psqlmessages.add_exchange")
    context = {
        **common_context(request),
        "figures_url": reverse("psqlmessages:monitor_figures"),
        "exchange_url": admin_page(request, "exchange", change=True),
        "queue_url": admin_page(request, "queue", change=True),
        "admin_exchanges_url": admin_page(request, "exchange"),
        "may_add_exchange": may_add,
    }
    return render(request, "psqlmessages/monitor/exchanges.html", context)


@require_safe
@never_cache
async def figures(request: HttpRequest) -> HttpResponse:
    """Return the graph as JSON: 401 or 403 without permission, 503 without a database."""
    try:
        permit = await sync_to_async(permit_of_visitor)(request)
    except DatabaseError:
        return refused(503, "PostgreSQL cannot be reached.")
    if permit is None:
        return refused(401, "You are logged out.")
    if not permit.monitor:
        return refused(403, f"The permission {VIEW_MONITOR} is missing.")
    text = await get_graph().text()
    if text is None:
        return refused(503, "PostgreSQL cannot be reached.")
    return HttpResponse(text, content_type="application/json")


def permit_of_visitor(request: HttpRequest) -> MonitorAccess | None:
    """Return the user's permissions, None if anonymous; queries the database."""
    user: Any = request.user
    return permit_of(user) if user.is_authenticated else None


def refused(status: int, why: str) -> JsonResponse:
    """Return an error as JSON."""
    return JsonResponse({"error": why}, status=status)
