"""The REST API: its routers and error handlers."""

from __future__ import annotations

import logging
from typing import Any, Final

import psycopg
from django.db import Error
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError

from psqlmessages.exceptions import MessagesError
from psqlmessages.rest import exchanges, queues, topics
from psqlmessages.rest.auth import BySession, ByToken
from psqlmessages.rest.docs import Page
from psqlmessages.rest.errors import RETRY_SECONDS, ApiError, ServiceUnavailable, refused
from psqlmessages.retry import RateLimitedLogger

log: Final = RateLimitedLogger(logging.getLogger("psqlmessages.rest"))

api = NinjaAPI(
    title="psqlmessages",
    version="1",
    description="Queues, exchanges and topics in PostgreSQL. All delays are in seconds.",
    urls_namespace="psqlmessages:api",
    auth=[ByToken(), BySession()],
    docs=Page(),
)


def answer(error: ApiError) -> HttpResponse:
    """Build the response of an error."""
    content: dict[str, Any] = {"detail": error.detail, "err": error.number}
    if (errors := getattr(error, "errors", None)) is not None:
        content["errors"] = errors
    response = JsonResponse(content, status=error.status)
    if error.status == 503:
        response.headers["Retry-After"] = str(RETRY_SECONDS)
    elif error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


@api.exception_handler(ApiError)
def _refused(_request: HttpRequest, error: ApiError) -> HttpResponse:
    return answer(error)


@api.exception_handler(MessagesError)
@api.exception_handler(psycopg.Error)
@api.exception_handler(TimeoutError)
def _failed(_request: HttpRequest, error: Any) -> HttpResponse:
    translated = refused(error)
    if translated is None:
        raise error
    if translated.status == 503:
        log.warning("a call of the API failed: %s", error)
    return answer(translated)


@api.exception_handler(Error)
def _unavailable(_request: HttpRequest, error: Exception) -> HttpResponse:
    log.warning("a call of the API failed: %s", error)
    return answer(ServiceUnavailable())


@api.exception_handler(AuthenticationError)
def _unauthenticated(_request: HttpRequest, _error: AuthenticationError) -> HttpResponse:
    return answer(ApiError(401, "log in, or send a token: Authorization: Bearer …"))


@api.exception_handler(HttpError)
def _http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
    return answer(ApiError(error.status_code, str(error)))


@api.exception_handler(Http404)
def _not_found(_request: HttpRequest, _error: Http404) -> HttpResponse:
    return answer(ApiError(404, "not found"))


@api.exception_handler(ValidationError)
def _invalid(_request: HttpRequest, error: ValidationError) -> HttpResponse:
    first = error.errors[0]
    where = ".".join(str(step) for step in first["loc"][1:])
    return answer(ApiError(400, f"{where}: {first['msg']}"))


for part in (queues, exchanges, topics):
    api.add_router("", part.router)
