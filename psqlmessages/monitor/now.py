"""First page of the monitor, with the current problems. /healthz and /metrics use them too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from asgiref.sync import async_to_sync, sync_to_async
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from psqlmessages.conf import get_settings
from psqlmessages.health import broken_parts
from psqlmessages.monitor.access import has_admin_permission
from psqlmessages.monitor.listing import check_parameters, read_shared, render_page
from psqlmessages.monitor.names import find_url, object_url
from psqlmessages.monitor.problem_checks import CHECKS
from psqlmessages.monitor.problems import (
    Link,
    Problem,
    database_problem,
    find_problems,
    process_problems,
)
from psqlmessages.monitor.queries import read_once
from psqlmessages.monitor.views import common_context, require_monitor_access

# Maximum time for connecting and all queries.
_TIMEOUT_SECONDS: Final = 5.0
_QUERY_TIMEOUT_SECONDS: Final = 2.0


async def read_problems() -> list[Problem]:
    """Return the problems of this process and of the database, errors first."""
    settings = get_settings()
    queries = [(check.query, check.values(settings)) for check in CHECKS]
    answers = await read_once(
        "problems", None, queries, _TIMEOUT_SECONDS, query_seconds=_QUERY_TIMEOUT_SECONDS
    )
    of_process = process_problems(broken_parts())
    if answers is None:
        return [database_problem(), *of_process]
    found = find_problems(zip(CHECKS, answers, strict=True), datetime.now(UTC), settings)
    return [*of_process, *found]


def current_problems() -> list[Problem]:
    """Return the problems; viewers with the same language share a result for one second."""
    return read_shared("problems", async_to_sync(read_problems))


async def current_problems_async() -> list[Problem]:
    """Run current_problems in a thread pool, so that a slow database delays no other view."""
    return await sync_to_async(current_problems, thread_sensitive=False)()


@require_safe
@require_monitor_access
def now(request: HttpRequest) -> HttpResponse:
    """Show the problems."""
    check_parameters(request, [])
    problems = [
        (
            problem,
            problem_url(problem.link, request),
            [name for name in problem.permissions if not has_admin_permission(request.user, name)],
        )
        for problem in current_problems()
    ]
    context = {**common_context(request), "problems": problems, "number_of_checks": len(CHECKS)}
    fragments = {"problems": "psqlmessages/monitor/_problems.html"}
    return render_page(request, "psqlmessages/monitor/now.html", fragments, context)


def problem_json(problem: Problem) -> dict[str, Any]:
    """Return a problem as a JSON object."""
    return {
        "id": problem.id,
        "check": problem.check,
        "severity": problem.severity,
        "sentence": problem.sentence,
        "since": problem.since and problem.since.isoformat(timespec="seconds"),
        "url": problem_url(problem.link),
        "cure": problem.cure,
    }


def problem_url(link: Link | None, request: HttpRequest | None = None) -> str:
    """Return the URL of a link; "" if there is no such page, or the user may not open it."""
    if link is None:
        return ""
    if link.page == "transactions":
        is_allowed = request is None or has_admin_permission(
            request.user, "psqlmessages.view_client"
        )
        return find_url("admin:psqlmessages_client_open_transactions") if is_allowed else ""
    if link.page == "exchange":
        may_view = request is not None and has_admin_permission(
            request.user, "psqlmessages.view_exchange"
        )
        url = find_url("admin:psqlmessages_exchange_change", link.name) if may_view else ""
        return url or find_url("psqlmessages:monitor_exchanges")
    if not link.name:
        return find_url(f"psqlmessages:monitor_{link.page}")
    return object_url(link.page, link.name)
