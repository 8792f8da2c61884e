"""JSON views of the pages' data: read on demand, at most every 2 s, and shared by all viewers."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import wraps
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages.monitor.access import VIEW_MONITOR, MonitorAccess, load_access

READ_INTERVAL_SECONDS: Final = 2.0
# Viewers can request the data of any topic name, so limit the number of cached texts.
_MAX_TEXTS: Final = 200

ReadText = Callable[[], Awaitable[str | None]]


class SharedText:
    """A text that is read on demand, and cached for two seconds.

    After a slow read it is cached longer: ``pause_factor`` times the duration of the read.
    """

    def __init__(self, read: ReadText, pause_factor: float = 0.0) -> None:
        self._read = read
        self._pause_factor = pause_factor
        self._text: str | None = None
        self._next_read_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def get(self) -> str | None:
        """Return the text; None if it cannot be read."""
        if monotonic() >= self._next_read_at:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._refresh(), name="psqlmessages monitor data")
            task = self._task
            # If a viewer disconnects, the query continues for the others.
            await asyncio.wait({task})
            task.result()
        return self._text

    async def _refresh(self) -> None:
        began = monotonic()
        self._text = await self._read()
        now = monotonic()
        self._next_read_at = now + max(READ_INTERVAL_SECONDS, self._pause_factor * (now - began))


# The least recently used text is the first.
_SharedTexts = OrderedDict[Hashable, SharedText]
_texts: WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedTexts] = WeakKeyDictionary()


async def read_shared_text(key: Hashable, read: ReadText, pause_factor: float = 0.0) -> str | None:
    """Return the text of this key, which all viewers of this event loop share; see SharedText."""
    texts = _texts.setdefault(asyncio.get_running_loop(), OrderedDict())
    text = texts.setdefault(key, SharedText(read, pause_factor))
    texts.move_to_end(key)
    if len(texts) > _MAX_TEXTS:
        texts.popitem(last=False)
    return await text.get()


def json_view(read: Callable[[HttpRequest], Awaitable[str | None]]) -> Callable[..., Any]:
    """Make a view of a function that returns JSON text, or None if the database fails.

    The view answers 401 or 403 without permission, and 503 if the database fails.
    """

    @require_safe
    @never_cache
    @wraps(read)
    async def view(request: HttpRequest) -> HttpResponse:
        try:
            access = await sync_to_async(load_request_access)(request)
        except DatabaseError:
            return _error(503, gettext("PostgreSQL cannot be reached."))
        if access is None:
            return _error(401, gettext("You are logged out."))
        if not access.can_view:
            text = gettext("The permission {permission} is missing.")
            return _error(403, text.format(permission=VIEW_MONITOR))
        if (data := await read(request)) is None:
            return _error(503, gettext("PostgreSQL cannot be reached."))
        return HttpResponse(data, content_type="application/json")

    return view


def load_request_access(request: HttpRequest) -> MonitorAccess | None:
    """Read the permissions of the user of a request; None if the user is not logged in."""
    user: Any = request.user
    return load_access(user) if user.is_authenticated else None


def _error(status: int, text: str) -> JsonResponse:
    return JsonResponse({"error": text}, status=status)


def to_json(value: Any) -> str:
    """Encode a value as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
