"""Exchanges page: a graph of exchanges and queues, read at most every 2 s for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from itertools import chain
from typing import Any, Final

from django.db import router
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from psqlmessages.exchanges.model import FALLBACK_QUEUES, QueueRef
from psqlmessages.exchanges.store.definitions import DefinedDestination, DefinedExchange
from psqlmessages.exchanges.store.route_graph import find_cycles
from psqlmessages.exchanges.store.stats import EXISTS, MAX_LISTED, SIZES, size_limits
from psqlmessages.models import Exchange
from psqlmessages.monitor.json_views import json_view, read_shared_text, to_json
from psqlmessages.monitor.queries import IS_HEARTBEAT, fetch_rows
from psqlmessages.monitor.views import admin_page, common_context, require_monitor_access

# The page draws at most this many exchanges: a larger graph is unreadable.
MAX_EXCHANGES: Final = 200
# The maximum time for connecting and the query.
_TIMEOUT_SECONDS: Final = 2.0
# Skip a namespace for this time after a failure, so that it does not delay each read.
_SKIP_SECONDS: Final = 10.0

_EXCHANGES_QUERY: Final = f"""
    SELECT x.id, x.name, x.source_namespace, x.source_queue, x.is_running,
        (SELECT count(DISTINCT c.worker) FROM psqlmessages_exchangecount AS c WHERE {IS_HEARTBEAT}),
        (SELECT coalesce(json_agg(json_build_array(d.namespace, d.queue, d.selector)
                                  ORDER BY d.position), '[]')
         FROM psqlmessages_destination AS d WHERE d.exchange_id = x.id),
        (SELECT coalesce(json_object_agg(s.name, s.number), '{{}}') FROM (
            SELECT CASE c.outcome WHEN 'to' THEN c.destination::text ELSE c.outcome END AS name,
                sum(c.count)::bigint AS number
            FROM psqlmessages_exchangecount AS c WHERE c.exchange_id = x.id GROUP BY 1
         ) AS s),
        (SELECT coalesce(json_agg(DISTINCT r.rule), '[]')
         FROM psqlmessages_exchangecount AS c CROSS JOIN LATERAL unnest(c.missing_rules) AS r (rule)
         WHERE {IS_HEARTBEAT} AND x.is_running),
        (SELECT min(c.failing_since) FROM psqlmessages_exchangecount AS c
         WHERE {IS_HEARTBEAT} AND x.is_running)
    FROM psqlmessages_exchange AS x ORDER BY x.name LIMIT %s
"""  # noqa: S608 - built from constants
# Only the first scheduled elements are searched for failed ones, so that the cost is limited.
_QUEUES_QUERY: Final = f"""
    SELECT psqlmessages_queue.name, psqlmessages_queue.id, psqlmessages_queue.is_paused, {SIZES},
        failed.number, failed.next_try_at
    FROM psqlmessages_queue CROSS JOIN LATERAL (
        SELECT count(*) AS number, min(e.available_at) AS next_try_at FROM (
            SELECT e.available_at, e.tries FROM psqlmessages_element AS e
            WHERE e.queue_id = psqlmessages_queue.id
              AND e.available_at > statement_timestamp() AND e.lease IS NULL
            ORDER BY e.available_at LIMIT %s
        ) AS e WHERE e.tries > 0
    ) AS failed WHERE psqlmessages_queue.name = ANY (%s) AND {EXISTS}
"""  # noqa: S608

# The monotonic time until which to skip a namespace, by alias.
_skipped_until: dict[str, float] = defaultdict(float)


async def read_graph() -> str | None:
    """Read the graph as JSON text; None if it cannot be read."""
    home = router.db_for_read(Exchange)
    rows = await fetch_rows(home, (_EXCHANGES_QUERY, (MAX_EXCHANGES + 1,)), _TIMEOUT_SECONDS)
    if rows is None:
        return None
    exchanges = [_describe_exchange(row) for row in rows[:MAX_EXCHANGES]]
    names = _queue_names(exchanges)
    queues = await asyncio.gather(*(_read_queues(*item) for item in names.items()))
    mark_cycles(exchanges)
    return to_json(
        {
            "now": time.time(),
            "home": home,
            "exchanges": exchanges,
            "queues": [*chain.from_iterable(queues)],
            "max_listed": MAX_LISTED,
            "max_exchanges": MAX_EXCHANGES,
            "has_more": len(rows) > MAX_EXCHANGES,
        }
    )


async def _read_queues(alias: str, names: set[str]) -> list[dict[str, Any]]:
    """Read queues of a namespace; their sizes are None if its database does not answer."""
    rows = None
    if time.monotonic() >= _skipped_until[alias]:
        query = (_QUEUES_QUERY, (*size_limits(MAX_LISTED), MAX_LISTED, sorted(names)))
        rows = await fetch_rows(alias, query, _TIMEOUT_SECONDS)
        if rows is None:
            _skipped_until[alias] = time.monotonic() + _SKIP_SECONDS
    columns_by_name = {name: columns for name, *columns in rows or ()}
    queues = []
    for name in sorted(names):
        # A queue without a row does not exist yet: it is empty.
        no_row = (None, False, [0, 0, 0], 0, None)
        key, is_paused, sizes, failed, next_try_at = columns_by_name.get(name, no_row)
        queues.append(
            {
                "ns": alias,
                "queue": name,
                "id": key,
                "is_paused": is_paused,
                # Available, scheduled and reserved; MAX_LISTED + 1 means more than MAX_LISTED.
                "sizes": None if rows is None else [min(size, MAX_LISTED + 1) for size in sizes],
                # Failed elements that wait for a retry, and the time of the first retry.
                "failed": failed,
                "next_try_at": next_try_at and next_try_at.timestamp(),
            }
        )
    return queues


def _describe_exchange(row: tuple[Any, ...]) -> dict[str, Any]:
    key, name, namespace, queue, is_running, workers, destinations, counts, *state = row
    missing_rules, failing_since = state
    return {
        "id": key,
        "name": name,
        "source": [namespace, queue],
        "is_running": is_running,
        "workers": workers,
        "missing_rules": missing_rules,
        # None: its processes have their rules, and no errors.
        "failing_since": failing_since and failing_since.timestamp(),
        "destinations": [
            {"to": [ns, name], "selector": selector, "count": counts.get(str(position), 0)}
            for position, (ns, name, selector) in enumerate(destinations)
        ],
        # The other keys are positions of destinations.
        "counts": {outcome: count for outcome, count in counts.items() if not outcome.isdigit()},
    }


def _queue_names(exchanges: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the names of the queues to draw by namespace: sources, destinations, fallback queues.

    A fallback queue is drawn only if an exchange has counted elements for it.
    """
    names: dict[str, set[str]] = defaultdict(set)
    for exchange in exchanges:
        for namespace, name in (exchange["source"], *(d["to"] for d in exchange["destinations"])):
            names[namespace].add(name)
        for outcome, name in FALLBACK_QUEUES.items():
            if exchange["counts"].get(outcome):
                names[exchange["source"][0]].add(name)
    return names


def mark_cycles(exchanges: list[dict[str, Any]]) -> None:
    """Add ``is_in_cycle`` to each destination."""
    cycles = find_cycles(
        DefinedExchange(
            exchange["name"],
            QueueRef(*exchange["source"]),
            tuple(DefinedDestination(QueueRef(*route["to"])) for route in exchange["destinations"]),
        )
        for exchange in exchanges
    )
    numbers = {queue: number for number, cycle in enumerate(cycles) for queue in cycle}
    for exchange in exchanges:
        number = numbers.get(QueueRef(*exchange["source"]), -1)
        for route in exchange["destinations"]:
            route["is_in_cycle"] = numbers.get(QueueRef(*route["to"])) == number


@require_safe
@require_monitor_access
def exchanges(request: HttpRequest) -> HttpResponse:
    """Show the exchanges page."""
    context = {
        **common_context(request),
        "data_url": reverse("psqlmessages:monitor_exchanges_figures"),
        "exchange_url": admin_page(request, "exchange", is_change_page=True),
        "queue_url": admin_page(request, "queue", is_change_page=True),
        "admin_exchanges_url": admin_page(request, "exchange"),
        "may_add_exchange": request.user.has_perm("psqlmessages.add_exchange"),
    }
    return render(request, "psqlmessages/monitor/exchanges.html", context)


@json_view
async def graph_data(_request: HttpRequest) -> str | None:
    """Return the graph as JSON text; None if it cannot be read."""
    return await read_shared_text("graph", read_graph)
