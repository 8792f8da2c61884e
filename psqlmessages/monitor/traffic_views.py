"""Traffic views: what was published, by topic and window; the pipeline's jobs; their figures."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from asgiref.sync import sync_to_async
from django.db import DatabaseError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages.models.names import is_name
from psqlmessages.monitor import charts
from psqlmessages.monitor.admission import VIEW_MONITOR
from psqlmessages.monitor.graph_views import permit_of_visitor, refused
from psqlmessages.monitor.names import topic_url
from psqlmessages.monitor.traffic import View, get_traffic
from psqlmessages.monitor.views import admin_page, common_context, for_staff

_MINUTE, _HOUR, _DAY = 60, 60 * 60, 24 * 60 * 60
# What can be chosen: the length of windows, and of the time that is shown. 720 windows at most.
CHOICES: Final = {
    (10, 10 * _MINUTE): "10 minutes",
    (10, _HOUR): "1 hour",
    (60, _HOUR): "1 hour",
    (60, 6 * _HOUR): "6 hours",
    (60, 12 * _HOUR): "12 hours",
    (3600, _DAY): "1 day",
    (3600, 7 * _DAY): "7 days",
    (3600, 30 * _DAY): "30 days",
}
_WINDOWS: Final = {10: "10 s", 60: "1 min", 3600: "1 h"}
# Windows of all topics are many: the list offers a few times.
_LISTED: Final = ((10, 10 * _MINUTE), (60, _HOUR), (3600, _DAY), (3600, 7 * _DAY))


class Choice(NamedTuple):
    """A link to the same page with another choice."""

    text: str
    query: str
    is_current: bool


@require_safe
@for_staff
def traffic(request: HttpRequest) -> HttpResponse:
    """Show all topics, and the jobs."""
    window, seconds = _chosen(request, _LISTED)
    context = {
        **_context(request, window, seconds),
        "choices": [
            Choice(CHOICES[each], _query(request, *each), each == (window, seconds))
            for each in _LISTED
        ],
        "admin_jobs_url": admin_page(request, "pipelinejob"),
    }
    return render(request, "psqlmessages/monitor/traffic.html", context)


@require_safe
@for_staff
def traffic_topic(request: HttpRequest) -> HttpResponse:
    """Show one topic: that of ``?name=``."""
    name = _name(request)
    window, seconds = _chosen(request, CHOICES)
    script = charts.script()
    context = {
        **_context(request, window, seconds, name),
        "topic": name,
        "topic_url": topic_url(name),
        "windows": [
            Choice(text, _query(request, *_first(length)), length == window)
            for length, text in _WINDOWS.items()
        ],
        "choices": [
            Choice(text, _query(request, *each), each == (window, seconds))
            for each, text in CHOICES.items()
            if each[0] == window
        ],
        "plotly_url": script and reverse("psqlmessages:monitor_plotly", args=[charts.version()]),
        "plotly_style_ids": script.style_ids if script else (),
        "admin_traffic_url": admin_page(
            request, "traffic", {"q": name, "window_seconds": str(window)}
        ),
    }
    return render(request, "psqlmessages/monitor/traffic_topic.html", context)


@require_safe
@never_cache
async def traffic_figures(request: HttpRequest) -> HttpResponse:
    """Answer with the figures as JSON: 401, 403 to who may not see them, 503 without a database."""
    try:
        permit = await sync_to_async(permit_of_visitor)(request)
    except DatabaseError:
        return refused(503, "PostgreSQL cannot be reached.")
    if permit is None:
        return refused(401, "You are logged out.")
    if not permit.monitor:
        return refused(403, f"The permission {VIEW_MONITOR} is missing.")
    topic = _name(request) if "name" in request.GET else None
    text = await get_traffic().text(View(*_chosen(request, CHOICES), topic))
    if text is None:
        return refused(503, "PostgreSQL cannot be reached.")
    return HttpResponse(text, content_type="application/json")


def _name(request: HttpRequest) -> str:
    name = request.GET.get("name", "")
    if not is_name(name) or name.endswith("*"):
        raise Http404("There can be no topic of this name.")
    return name


def _chosen(request: HttpRequest, choices: Any) -> tuple[int, int]:
    """Return the choice that the query names, or the first."""
    given = request.GET.get("window", ""), request.GET.get("seconds", "")
    found = [each for each in choices if tuple(map(str, each)) == given]
    return found[0] if found else next(iter(choices))


def _first(window: int) -> tuple[int, int]:
    return next(each for each in CHOICES if each[0] == window)


def _query(request: HttpRequest, window: int, seconds: int) -> str:
    given = {"name": request.GET["name"]} if "name" in request.GET else {}
    return "?" + urlencode({**given, "window": window, "seconds": seconds})


def _context(
    request: HttpRequest, window: int, seconds: int, name: str | None = None
) -> dict[str, Any]:
    query = {} if name is None else {"name": name}
    asked = urlencode({**query, "window": window, "seconds": seconds})
    return {
        **common_context(request),
        "figures_url": f"{reverse('psqlmessages:monitor_traffic_figures')}?{asked}",
        "traffic_topic_url": reverse("psqlmessages:monitor_traffic_topic"),
        "choice_query": urlencode({"window": window, "seconds": seconds}),
        "window_text": _WINDOWS[window],
        "range_text": CHOICES[window, seconds],
    }
