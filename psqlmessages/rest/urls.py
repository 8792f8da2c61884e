"""URLs of the API; if django-ninja is missing, every URL returns an error that names it."""

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
    """Return the URLs of the API, with views that refuse unknown query arguments."""
    patterns, app, namespace = api.urls
    # By route and method: the names of the query arguments.
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
        known = arguments.get(route)
        strict.append(_strict_pattern(pattern, known) if known else pattern)
    return strict, app, namespace


def _strict_pattern(pattern: URLPattern, known: dict[str, set[str]]) -> URLPattern:
    view = pattern.callback

    @wraps(view)
    async def strict_view(request: HttpRequest, **arguments: Any) -> HttpResponse:
        # The view itself refuses other methods, with status 405.
        names = known.get(request.method)
        if names is not None and (unknown := sorted(set(request.GET) - names)):
            listed = ", ".join(sorted(names))
            return _error(400, f"unknown query argument {unknown[0]!r:.100}; known: {listed}")
        response: HttpResponse = await view(request, **arguments)
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
