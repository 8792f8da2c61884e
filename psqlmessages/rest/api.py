"""The REST API as a django-ninja application: its routers and error handlers."""

from __future__ import annotations

from typing import Any, Final

import psycopg
from django import db
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError

from psqlmessages.exceptions import MessagesError, error_for
from psqlmessages.rest import exchanges, queues, topics
from psqlmessages.rest.auth import BySession, ByToken
from psqlmessages.rest.docs import DocsPage
from psqlmessages.rest.errors import ApiError, ServiceUnavailable, to_api_error
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
        content["url"] = error_for(error.number, error.detail).url
    if error.errors is not None:
        content["errors"] = error.errors
    return JsonResponse(content, status=error.status, headers=_HEADERS.get(error.status))


@api.exception_handler(ApiError)
def _on_api_error(_request: HttpRequest, error: ApiError) -> HttpResponse:
    return _build_response(error)


@api.exception_handler(MessagesError)
@api.exception_handler(psycopg.Error)
@api.exception_handler(TimeoutError)
def _on_failed_call(_request: HttpRequest, error: Any) -> HttpResponse:
    api_error = to_api_error(error)
    if api_error is None:
        raise error
    if api_error.status == 503:
        log.warning("an API call failed: %s", error)
    return _build_response(api_error)


@api.exception_handler(db.Error)
def _on_django_database_error(_request: HttpRequest, error: Exception) -> HttpResponse:
    log.warning("an API call failed: %s", error)
    return _build_response(ServiceUnavailable())


@api.exception_handler(AuthenticationError)
def _on_unauthenticated(_request: HttpRequest, _error: AuthenticationError) -> HttpResponse:
    return _build_response(ApiError(401, "log in, or send a token: Authorization: Bearer …"))


@api.exception_handler(HttpError)
def _on_http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
    return _build_response(ApiError(error.status_code, str(error)))


@api.exception_handler(Http404)
def _on_not_found(_request: HttpRequest, _error: Http404) -> HttpResponse:
    return _build_response(ApiError(404, "not found"))


@api.exception_handler(ValidationError)
def _on_invalid_argument(_request: HttpRequest, error: ValidationError) -> HttpResponse:
    first = error.errors[0]
    # For example ("query", "limit"), or ("path", "number").
    argument = ".".join(str(part) for part in first["loc"][1:])
    return _build_response(ApiError(400, f"{argument}: {first['msg']}"))


for endpoints in (queues, exchanges, topics):
    api.add_router("", endpoints.router)
