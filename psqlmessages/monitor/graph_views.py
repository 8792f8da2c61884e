"""Graph views: the page of the exchanges' graph, and the figures that it asks for."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages.monitor.admission import VIEW_MONITOR, Permit, permit_of
from psqlmessages.monitor.graph import get_graph
from psqlmessages.monitor.views import admin_page, common_context, for_staff


@require_safe
@for_staff
def exchanges(request: HttpRequest) -> HttpResponse:
    """Show the graph."""
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
    """Answer with the graph as JSON: 401, 403 to who may not see it, 503 without a database."""
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


def permit_of_visitor(request: HttpRequest) -> Permit | None:
    """Ask who it is, which queries the database, and what they may; None for nobody."""
    user: Any = request.user
    return permit_of(user) if user.is_authenticated else None


def refused(status: int, why: str) -> JsonResponse:
    """Say in JSON why there are no figures."""
    return JsonResponse({"error": why}, status=status)
