"""The REST API as a django-ninja application: its routers, error handlers and URLs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import psycopg
from django import db
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, path, re_path
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError

from psqlmessages.exceptions import MessagesError, error_url
from psqlmessages.rest import exchanges, queues, topics
from psqlmessages.rest.auth import BySession, ByToken
from psqlmessages.rest.docs import DocsPage, serve_file
from psqlmessages.rest.errors import ApiError, to_api_error
from psqlmessages.rest.waiters import log

api = NinjaAPI(
    title="psqlmessages",
    version="1",
    description="Queues, exchanges and topics in PostgreSQL. All delays are in seconds.",
    urls_namespace="psqlmessages:api",
    auth=[ByToken(), BySession()],
    docs=DocsPage(),
)

# The further headers of a response with this status. Retry-After is in seconds.
_HEADERS: Final = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}


def _build_response(error: ApiError) -> HttpResponse:
    content: dict[str, Any] = {"detail": error.detail, "err": error.number}
    if error.number is not None:
        content["url"] = error_url(error.number)
    if error.errors is not None:
        content["errors"] = error.errors
    return JsonResponse(content, status=error.status, headers=_HEADERS.get(error.status))


def _respond(status: int, detail: str) -> HttpResponse:
    return _build_response(ApiError(status, detail))


@api.exception_handler(ApiError)
def _on_api_error(_request: HttpRequest, error: ApiError) -> HttpResponse:
    return _build_response(error)


@api.exception_handler(MessagesError)
@api.exception_handler(psycopg.Error)
@api.exception_handler(TimeoutError)
@api.exception_handler(db.Error)
def _on_failed_call(_request: HttpRequest, error: Any) -> HttpResponse:
    api_error = to_api_error(error)
    if api_error is None:
        raise error
    if api_error.status == 503:
        log.warning("an API call failed: %s", error)
    return _build_response(api_error)


@api.exception_handler(AuthenticationError)
def _on_unauthenticated(_request: HttpRequest, _error: AuthenticationError) -> HttpResponse:
    return _respond(401, "log in, or send a token: Authorization: Bearer …")


@api.exception_handler(HttpError)
def _on_http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
    return _respond(error.status_code, str(error))


@api.exception_handler(Http404)
@csrf_exempt
def _respond_not_found(_request: HttpRequest, _error: object = None, **_: Any) -> HttpResponse:
    return _respond(404, "not found")


@api.exception_handler(ValidationError)
def _on_invalid_argument(_request: HttpRequest, error: ValidationError) -> HttpResponse:
    first = error.errors[0]
    # For example ("query", "limit"), or ("path", "number").
    argument = ".".join(str(part) for part in first["loc"][1:])
    return _respond(400, f"{argument}: {first['msg']}")


for endpoints in (queues, exchanges, topics):
    api.add_router("", endpoints.router)


# URLs


def patterns() -> list[Any]:
    """Return the URL patterns below ``api/``."""
    return [
        path("docs/<str:version>/<str:name>", _read_only(serve_file), name="api_file"),
        path("", _strict_urls()),
        re_path("", _respond_not_found),
    ]


def _strict_urls() -> tuple[list[URLPattern], str, str]:
    """Return the URLs of the API. Views refuse query arguments and bodies that they do not take."""
    url_patterns, app, namespace = api.urls
    paths = api.get_openapi_schema(path_prefix="/")["paths"]
    strict = []
    for pattern in url_patterns:
        # OpenAPI writes a route as /q/{ns}, Django as q/<str:ns>.
        route = "/" + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(pattern.pattern))
        view = pattern.callback
        view = _strict_view(view, paths[route]) if route in paths else _read_only(view)
        strict.append(URLPattern(pattern.pattern, view, pattern.default_args, pattern.name))
    return strict, app, namespace


def _strict_view(view: Callable[..., Any], operations: dict[str, Any]) -> Any:
    # For each method: the query arguments, and whether there is a body.
    accepted = {
        method.upper(): (
            {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"},
            "requestBody" in operation,
        )
        for method, operation in operations.items()
    }

    @wraps(view)
    async def strict_view(request: HttpRequest, **path_arguments: Any) -> HttpResponse:
        # The view itself refuses other methods with status 405.
        if request.method in accepted:
            arguments, has_body = accepted[request.method]
            known = ", ".join(sorted(arguments)) or "none"
            if unknown := sorted(set(request.GET) - arguments):
                return _respond(400, f"unknown query argument {unknown[0]!r:.100}; known: {known}")
            if not has_body and request.read(1):
                return _respond(
                    400, f"{request.method} takes no body here; query arguments: {known}"
                )
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


def _refuse_method(request: HttpRequest, methods: list[str]) -> HttpResponse:
    allowed = ", ".join(methods)
    response = _respond(405, f"{request.method} is not supported here, only {allowed}")
    response.headers["Allow"] = allowed
    return response
