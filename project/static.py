"""Static files: WhiteNoise as a middleware of asynchronous requests too."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse
from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.responders import StaticFile


class StaticFiles(WhiteNoiseMiddleware):
    """Serve what lies under STATIC_URL; all else goes on.

    WhiteNoise's own middleware is synchronous: it would keep a thread busy for as long as each
    request lasts.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        super().__init__(get_response)
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        """Answer with the file, or with what the next one answers."""
        if iscoroutinefunction(self.get_response):
            return self._respond(request)
        return self._read(request) or self.get_response(request)

    async def _respond(self, request: HttpRequest) -> HttpResponse:
        response = None
        if request.path_info.startswith(self.static_prefix):
            response = await asyncio.to_thread(self._read, request)
        return response or await self.get_response(request)

    def _read(self, request: HttpRequest) -> HttpResponse | None:
        path = request.path_info
        found: StaticFile | None = (
            self.find_file(path) if self.autorefresh else self.files.get(path)
        )
        if found is None:
            return None
        answer = found.get_response(request.method, request.META)
        content = b""
        if answer.file is not None:
            with answer.file:
                content = answer.file.read()
        return HttpResponse(content, status=int(answer.status), headers=dict(answer.headers))
