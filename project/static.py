"""Middleware for static files: WhiteNoise, but without a thread for each request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse
from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.responders import StaticFile


class StaticFiles(WhiteNoiseMiddleware):
    """Serves the files under STATIC_URL. All other requests go to the next middleware.

    WhiteNoise's own middleware is synchronous. Under ASGI, Django would reserve a thread for it
    until the response is complete.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        super().__init__(get_response)
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        """Return the requested file, or the response of the next middleware."""
        if iscoroutinefunction(self.get_response):
            return self._respond(request)
        return self._read_file(request) or self.get_response(request)

    async def _respond(self, request: HttpRequest) -> HttpResponse:
        response = None
        if request.path_info.startswith(self.static_prefix):
            response = await asyncio.to_thread(self._read_file, request)
        return response or await self.get_response(request)

    def _read_file(self, request: HttpRequest) -> HttpResponse | None:
        path = request.path_info
        static_file: StaticFile | None = (
            self.find_file(path) if self.autorefresh else self.files.get(path)
        )
        if static_file is None:
            return None
        response = static_file.get_response(request.method, request.META)
        content = b""
        if response.file is not None:
            with response.file:
                content = response.file.read()
        return HttpResponse(content, status=int(response.status), headers=dict(response.headers))
