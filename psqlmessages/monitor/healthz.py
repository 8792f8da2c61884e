"""/healthz: whether this process and its database work."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from weakref import WeakKeyDictionary

from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages.health import broken_parts
from psqlmessages.monitor.queries import run_queries

_TIMEOUT_SECONDS: Final = 2.0
# With less time left than this, answer without another attempt.
_MIN_ATTEMPT_SECONDS: Final = 0.25

# Concurrent requests of an event loop share one attempt to query, so they open one connection.
_attempts: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Any]] = WeakKeyDictionary()


@require_safe
@never_cache
async def healthz(request: HttpRequest) -> JsonResponse:
    """Answer 200 ``{"status": "ok"}``, or 503 with the names of the parts that do not work.

    "database" is listed if a query on a new connection is not answered within two seconds. Other
    names are parts of this process whose own connections get no answer. Needs no login.
    """
    broken = [] if await _is_database_answering() else ["database"]
    broken += broken_parts()
    if not broken:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": "unavailable", "broken": broken}, status=503)


async def _is_database_answering() -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _TIMEOUT_SECONDS
    while (left := deadline - loop.time()) > _MIN_ATTEMPT_SECONDS:
        attempt = _attempts.get(loop)
        if attempt is None or attempt.done():
            attempt = _attempts[loop] = loop.create_task(
                run_queries("healthz", None, [("SELECT", ())], _TIMEOUT_SECONDS)
            )
        # Not `await attempt`: if the connection hangs, closing it may hang too.
        await asyncio.wait({attempt}, timeout=left)
        if attempt.done() and not attempt.cancelled():
            # None: no connection; [None]: the query took too long.
            return attempt.result() not in (None, [None])
        # The next attempt begins when this one has ended.
        attempt.cancel()
    return False
