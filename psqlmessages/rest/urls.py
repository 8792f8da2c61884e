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
        from psqlmessages.rest.docs import file
    except ModuleNotFoundError as error:
        if error.name not in ("ninja", "pydantic"):
            raise
        return [re_path("", _missing)]
    return [
        path("docs/<str:version>/<str:name>", file, name="api_file"),
        path("", _strict(api)),
        re_path("", _nothing),
    ]


def _strict(api: Any) -> tuple[list[URLPattern], str, str]:
    """Return the URLs of the API, whose views refuse query arguments that they would ignore."""
    patterns, app, namespace = api.urls
    known: dict[str, dict[str, set[str]]] = {}
    for address, operations in api.get_openapi_schema(path_prefix="/")["paths"].items():
        known[address.lstrip("/")] = {
            method.upper(): {
                each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"
            }
            for method, operation in operations.items()
        }
    strict = [_strict_pattern(each, known.get(_address(each), {})) for each in patterns]
    return strict, app, namespace


def _address(pattern: URLPattern) -> str:
    """Write a route as OpenAPI does: ``q/{ns}`` for ``q/<str:ns>``."""
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(pattern.pattern))


def _strict_pattern(pattern: URLPattern, known: dict[str, set[str]]) -> URLPattern:
    if not known:
        return pattern
    view = pattern.callback

    @wraps(view)
    async def checked(request: HttpRequest, **arguments: Any) -> HttpResponse:
        names = known.get(request.method, set(request.GET))
        if unknown := sorted(set(request.GET) - names):
            detail = (
                f"unknown query argument {unknown[0]!r:.100}; known: {', '.join(sorted(names))}"
            )
            return JsonResponse({"detail": detail, "err": None}, status=400)
        response: HttpResponse = await view(request, **arguments)
        if response.status_code != 405:
            return response
        allowed = ", ".join(sorted(response.headers["Allow"].split(", ")))
        detail = f"{request.method} is not supported here, only {allowed}"
        content = {"detail": detail, "err": None}
        return JsonResponse(content, status=405, headers={"Allow": allowed})

    return URLPattern(pattern.pattern, checked, pattern.default_args, pattern.name)


def _missing(_request: HttpRequest, **_: Any) -> JsonResponse:
    detail = "The API needs django-ninja: pip install 'psqlmessages[web]'."
    return JsonResponse({"detail": detail, "err": None}, status=501)


def _nothing(_request: HttpRequest, **_: Any) -> JsonResponse:
    return JsonResponse({"detail": "not found", "err": None}, status=404)
