"""/healthz: whether this process and its database work."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.db import DatabaseError
from django.http import HttpRequest, JsonResponse
from django.utils.crypto import constant_time_compare
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages.conf import get_settings
from psqlmessages.health import broken_parts
from psqlmessages.monitor.access import VIEW_MONITOR
from psqlmessages.monitor.json_views import load_request_access
from psqlmessages.monitor.now import current_problems_async, problem_json
from psqlmessages.monitor.queries import run_queries

_TIMEOUT_SECONDS: Final = 2.0
# If less time remains than this, start no further attempt.
_MIN_ATTEMPT_SECONDS: Final = 0.25

# Concurrent requests of an event loop share one attempt to query, so they open one connection.
_attempts: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Any]] = WeakKeyDictionary()


@require_safe
@never_cache
async def healthz(request: HttpRequest) -> JsonResponse:
    """Answer 200 ``{"status": "ok"}``, or 503 with the names of the parts that do not work.

    "database" is listed if a query on a new connection fails or takes over two seconds. The
    other names are parts of this process. No login is needed.

    ``?full`` adds the problems. It needs the token of the setting HEALTH_TOKEN as ``Authorization:
    Bearer``, or the session of a user of the monitor. Otherwise the answer is 401 or 403.
    """
    is_full = "full" in request.GET
    if is_full and (refusal := await _refuse(request)):
        return refusal
    broken = [] if await _is_database_answering() else ["database"]
    broken += broken_parts()
    answer: dict[str, Any] = {"status": "unavailable" if broken else "ok"}
    if broken:
        answer["broken"] = broken
    if is_full:
        answer["problems"] = [problem_json(each) for each in await current_problems_async()]
    return JsonResponse(answer, status=503 if broken else 200)


async def _refuse(request: HttpRequest) -> JsonResponse | None:
    """Return an error response if the request may not see the problems; else None."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    own = get_settings().HEALTH_TOKEN
    if own and scheme.lower() == "bearer" and constant_time_compare(token.strip(), own):
        return None
    try:
        access = await sync_to_async(load_request_access)(request)
    except DatabaseError:
        return JsonResponse({"status": "unavailable", "broken": ["database"]}, status=503)
    if access is None:
        error = gettext("Log in, or send the token of the setting HEALTH_TOKEN.")
        return JsonResponse({"error": error}, status=401, headers={"WWW-Authenticate": "Bearer"})
    if not access.can_view:
        error = gettext("The permission {permission} is missing.").format(permission=VIEW_MONITOR)
        return JsonResponse({"error": error}, status=403)
    return None


async def _is_database_answering() -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _TIMEOUT_SECONDS
    while (remaining := deadline - loop.time()) > _MIN_ATTEMPT_SECONDS:
        attempt = _attempts.get(loop)
        if attempt is None or attempt.done():
            attempt = _attempts[loop] = loop.create_task(
                run_queries("healthz", None, [("SELECT", ())], _TIMEOUT_SECONDS)
            )
        # Not wait_for, which would also wait until the connection is closed, and this may hang.
        await asyncio.wait({attempt}, timeout=remaining)
        if attempt.done() and not attempt.cancelled():
            # None: the connection failed; [None]: the query took too long.
            return attempt.result() not in (None, [None])
        # Either the time is over, or another request has cancelled the attempt. In the second case
        # the loop begins a new attempt.
        attempt.cancel()
    return False
