"""Graph page: exchanges, queues and rates, read at most every 2 s for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, router
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from psqlmessages.exchanges.model import QueueRef
from psqlmessages.exchanges.store.definitions import DefinedDestination, DefinedExchange
from psqlmessages.exchanges.store.route_graph import build_graph
from psqlmessages.exchanges.store.stats import (
    MAX_LISTED,
    SIZES,
    WORKER_TIMEOUT_SECONDS,
    size_limits,
)
from psqlmessages.models import Exchange
from psqlmessages.monitor.json_views import json_view, shared_text, to_json
from psqlmessages.monitor.queries import Query, Rows, read_once
from psqlmessages.monitor.views import admin_page, common_context, for_staff

# The page draws at most this many exchanges: a larger graph is unreadable.
EXCHANGES: Final = 200
# Timeout for connecting and querying.
_TIMEOUT_SECONDS: Final = 2.0
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


# When to ask a namespace again that did not answer.
_away_until: dict[str, float] = defaultdict(float)


async def read_graph() -> str | None:
    """Read the graph as JSON text; None if it cannot be read."""
    query = (_EXCHANGES, (WORKER_TIMEOUT_SECONDS, EXCHANGES + 1))
    rows = await rows_of(router.db_for_read(Exchange), query, _TIMEOUT_SECONDS)
    if rows is None:
        return None
    exchanges = [_exchange(row) for row in rows[:EXCHANGES]]
    names: dict[str, set[str]] = defaultdict(set)
    for place in _places(exchanges):
        names[place.namespace].add(place.queue)
    queues = await asyncio.gather(*(_queues(alias, names[alias]) for alias in names))
    _mark_cycles(exchanges)
    return to_json(
        {
            "now": time.time(),
            "home": DEFAULT_DB_ALIAS,
            "exchanges": exchanges,
            "queues": [queue for found in queues for queue in found],
            "most": MAX_LISTED,
            "limit": EXCHANGES,
            "has_more": len(rows) > EXCHANGES,
        }
    )


async def _queues(alias: str, names: set[str]) -> list[dict[str, Any]]:
    """Describe the queues of a namespace; without sizes if the namespace does not answer."""
    rows = None
    if time.monotonic() >= _away_until[alias]:
        query = (_QUEUES, (*size_limits(MAX_LISTED), sorted(names)))
        rows = await rows_of(alias, query, _TIMEOUT_SECONDS)
        if rows is None:
            _away_until[alias] = time.monotonic() + _AWAY_SECONDS
    known = {name: rest for name, *rest in rows or ()}
    return [_queue(alias, name, known.get(name), rows is not None) for name in sorted(names)]


async def rows_of(alias: str, query: Query, seconds: float) -> Rows | None:
    """Run one query within some seconds; None if that fails."""
    answers = await read_once("monitor", alias, [query], seconds, statement=seconds)
    return answers and answers[0]


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
        "sizes": [min(size, MAX_LISTED + 1) for size in sizes] if is_known else None,
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
    drawn = build_graph(
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


# Graph views: the page, and its data as JSON.


@require_safe
@for_staff
def exchanges(request: HttpRequest) -> HttpResponse:
    """Show the graph page."""
    context = {
        **common_context(request),
        "figures_url": reverse("psqlmessages:monitor_figures"),
        "exchange_url": admin_page(request, "exchange", change=True),
        "queue_url": admin_page(request, "queue", change=True),
        "admin_exchanges_url": admin_page(request, "exchange"),
        "may_add_exchange": request.user.has_perm("psqlmessages.add_exchange"),
    }
    return render(request, "psqlmessages/monitor/exchanges.html", context)


@json_view
async def figures(_request: HttpRequest) -> str | None:
    """Return the graph as JSON: 401 or 403 without permission, 503 without a database."""
    return await shared_text("graph", read_graph)
