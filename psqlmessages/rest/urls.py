"""URLs of the API; if django-ninja is not installed, all return an error with the remedy."""

from __future__ import annotations

import re
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, path, re_path


def patterns() -> list[Any]:
    """Return the URL patterns below ``api/``."""
    try:
        from psqlmessages.rest.api import api
        from psqlmessages.rest.docs import serve_file
    except ModuleNotFoundError as error:
        if error.name not in ("ninja", "pydantic"):
            raise
        return [re_path("", _respond_not_installed)]
    return [
        path("docs/<str:version>/<str:name>", serve_file, name="api_file"),
        path("", _strict_urls(api)),
        re_path("", _respond_not_found),
    ]


def _strict_urls(api: Any) -> tuple[list[URLPattern], str, str]:
    """Return the URLs of the API. Their views refuse unknown query arguments."""
    patterns, app, namespace = api.urls
    # Names of the query arguments, by route and method.
    arguments: dict[str, dict[str, set[str]]] = {}
    for route, operations in api.get_openapi_schema(path_prefix="/")["paths"].items():
        arguments[route.lstrip("/")] = {
            method.upper(): {
                parameter["name"]
                for parameter in operation.get("parameters", ())
                if parameter["in"] == "query"
            }
            for method, operation in operations.items()
        }
    strict = []
    for pattern in patterns:
        # OpenAPI writes a route as q/{ns}, Django as q/<str:ns>.
        route = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(pattern.pattern))
        by_method = arguments.get(route)
        strict.append(_strict_pattern(pattern, by_method) if by_method else pattern)
    return strict, app, namespace


def _strict_pattern(pattern: URLPattern, arguments_by_method: dict[str, set[str]]) -> URLPattern:
    view = pattern.callback

    @wraps(view)
    async def strict_view(request: HttpRequest, **path_arguments: Any) -> HttpResponse:
        # None for an unsupported method, which the view itself refuses with status 405.
        known = arguments_by_method.get(request.method)
        if known is not None and (unknown := sorted(set(request.GET) - known)):
            listed = ", ".join(sorted(known))
            return _error(400, f"unknown query argument {unknown[0]!r:.100}; known: {listed}")
        response: HttpResponse = await view(request, **path_arguments)
        if response.status_code != 405:
            return response
        allowed = ", ".join(sorted(response.headers["Allow"].split(", ")))
        detail = f"{request.method} is not supported here, only {allowed}"
        return _error(405, detail, headers={"Allow": allowed})

    return URLPattern(pattern.pattern, strict_view, pattern.default_args, pattern.name)


def _error(status: int, detail: str, **options: Any) -> JsonResponse:
    return JsonResponse({"detail": detail, "err": None}, status=status, **options)


def _respond_not_installed(_request: HttpRequest, **_: Any) -> JsonResponse:
    return _error(501, "The API needs django-ninja: pip install 'psqlmessages[web]'.")


def _respond_not_found(_request: HttpRequest, **_: Any) -> JsonResponse:
    return _error(404, "not found")
