"""URLs of the API; if django-ninja is not installed, all return an error with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, path, re_path
from django.views.decorators.csrf import csrf_exempt


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
        path("docs/<str:version>/<str:name>", _read_only(serve_file), name="api_file"),
        path("", _strict_urls(api)),
        re_path("", _respond_not_found),
    ]


class AcceptedInput(NamedTuple):
    """The query arguments of an operation, and whether it reads a body."""

    arguments: set[str]
    has_body: bool


def _strict_urls(api: Any) -> tuple[list[URLPattern], str, str]:
    """Return the URLs of the API. Views refuse query arguments and bodies that they do not take."""
    url_patterns, app, namespace = api.urls
    # The keys are routes, then methods.
    inputs: dict[str, dict[str, AcceptedInput]] = {}
    for route, operations in api.get_openapi_schema(path_prefix="/")["paths"].items():
        inputs[route.lstrip("/")] = {
            method.upper(): AcceptedInput(
                {
                    parameter["name"]
                    for parameter in operation.get("parameters", ())
                    if parameter["in"] == "query"
                },
                "requestBody" in operation,
            )
            for method, operation in operations.items()
        }
    strict = []
    for pattern in url_patterns:
        # OpenAPI writes a route as q/{ns}, Django as q/<str:ns>.
        route = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(pattern.pattern))
        view = pattern.callback
        view = _strict_view(view, inputs[route]) if route in inputs else _read_only(view)
        strict.append(URLPattern(pattern.pattern, view, pattern.default_args, pattern.name))
    return strict, app, namespace


def _strict_view(view: Callable[..., Any], by_method: dict[str, AcceptedInput]) -> Any:
    @wraps(view)
    async def strict_view(request: HttpRequest, **path_arguments: Any) -> HttpResponse:
        # None for an unsupported method, which the view itself refuses with status 405.
        if (accepted := by_method.get(request.method)) is not None:
            known = ", ".join(sorted(accepted.arguments)) or "none"
            if unknown := sorted(set(request.GET) - accepted.arguments):
                return _error(400, f"unknown query argument {unknown[0]!r:.100}; known: {known}")
            if not accepted.has_body and request.read(1):
                return _error(400, f"{request.method} takes no body here; query arguments: {known}")
        response: HttpResponse = await view(request, **path_arguments)
        if response.status_code != 405:
            return response
        return _refuse_method(request, sorted(response.headers["Allow"].split(", ")))

    return strict_view


def _read_only(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Restrict a view to GET and HEAD, and make its errors JSON like all errors of the API."""

    @csrf_exempt
    def read_only_view(request: HttpRequest, **path_arguments: Any) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            return _refuse_method(request, ["GET", "HEAD"])
        try:
            return view(request, **path_arguments)
        except Http404:
            return _respond_not_found(request)

    return read_only_view


def _refuse_method(request: HttpRequest, methods: list[str]) -> JsonResponse:
    allowed = ", ".join(methods)
    detail = f"{request.method} is not supported here, only {allowed}"
    return _error(405, detail, headers={"Allow": allowed})


def _error(status: int, detail: str, **options: Any) -> JsonResponse:
    return JsonResponse({"detail": detail, "err": None}, status=status, **options)


@csrf_exempt
def _respond_not_installed(_request: HttpRequest, **_: Any) -> JsonResponse:
    return _error(501, "The API needs django-ninja: pip install 'psqlmessages[web]'.")


@csrf_exempt
def _respond_not_found(_request: HttpRequest, **_: Any) -> JsonResponse:
    return _error(404, "not found")
