"""Authentication of REST calls by session or token, and the node that a call acts as."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from django.conf import settings
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, QueryDict
from django.middleware.csrf import CsrfViewMiddleware
from ninja.security.base import AuthBase

from psqlmessages.client.durations import Duration
from psqlmessages.relay import auth as relay_auth
from psqlmessages.relay.revalidation import Credentials, in_thread
from psqlmessages.rest.errors import ApiError, ServiceUnavailable

# API tokens cannot open a WebSocket, and WebSocket tokens cannot call the API.
PURPOSE: Final = "psqlmessages.rest"
_QUERY_TIMEOUT_SECONDS: Final = 5.0
_SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
_MAX_LISTED_IDENTS: Final = 50

T = TypeVar("T")


def token_for(user: Any, lifetime: Duration) -> str:
    """Issue a token for API calls as a user, to send as ``Authorization: Bearer TOKEN``.

    Anyone who has the token acts as the user. It becomes invalid after its lifetime, and if the
    user's password changes or the user is deactivated or deleted.
    """
    return relay_auth.token_for(user, lifetime, purpose=PURPOSE)


@dataclass(frozen=True, slots=True)
class ApiCaller:
    """The user of a call, how the call was authenticated, and the nodes that the user may act as.

    ``allowed_idents`` may contain patterns, which end in ``*``.
    """

    user: Any
    credentials: Credentials
    allowed_idents: frozenset[str]

    def choose_ident(self, ident: str | None) -> str:
        """Return the given ident if it is allowed; without an ident, the only exact name.

        Raises ApiError 403 if the ident is not allowed, or 400 if an ident is necessary.
        """
        if not self.allowed_idents:
            raise ApiError(403, "no web identity allows you to act as a node")
        if ident is not None:
            if ident.endswith("*") or not relay_auth.matches_any(ident, self.allowed_idents):
                raise ApiError(403, f"you may not act as {ident:.100}")
            return ident
        idents = [each for each in self.allowed_idents if not each.endswith("*")]
        if len(idents) != 1:
            listed = ", ".join(sorted(self.allowed_idents)[:_MAX_LISTED_IDENTS])
            raise ApiError(400, f"name the acting node in ?ident=: you may act as {listed}")
        return idents[0]


class ByToken(AuthBase):
    """A token in the header ``Authorization: Bearer …``. Browsers never send it automatically."""

    openapi_type = "http"
    openapi_scheme = "bearer"

    async def __call__(self, request: HttpRequest) -> ApiCaller | None:
        """Return the caller; None if the token is invalid or missing."""
        token = _bearer_token(request)
        if token is None:
            return None
        lookup = _lookups.setdefault(asyncio.get_running_loop(), _TokenLookup())
        return await lookup.find_caller(token)

    # django-ninja inspects this attribute: it awaits the call if this is a coroutine function.
    authenticate = __call__


class BySession(AuthBase):
    """A Django session. Changing data or taking an element also needs the header X-CSRFToken."""

    openapi_type = "apiKey"
    openapi_in = "cookie"
    openapi_name = settings.SESSION_COOKIE_NAME
    # django-ninja reads this: its documentation page then sends the header.
    csrf = True

    async def __call__(self, request: HttpRequest) -> ApiCaller | None:
        """Return the caller; None without a login, or if the call has a token: see `ByToken`."""
        if _bearer_token(request) is not None or not hasattr(request, "session"):
            return None
        caller = await _query(_find_caller_of_session, request)
        if caller is not None and request.method not in _SAFE_METHODS:
            require_csrf_header(request)
        return caller

    authenticate = __call__


class _TokenLookup:
    """Looks up the tokens of concurrent calls in batches, each different token once."""

    def __init__(self) -> None:
        # The calls that wait for the next batch. The keys are tokens.
        self._futures: dict[str, asyncio.Future[ApiCaller | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def find_caller(self, token: str) -> ApiCaller | None:
        """Return the caller with this token; None if it is invalid. Raises ServiceUnavailable."""
        future = self._futures.get(token)
        if future is None:
            future = self._futures[token] = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="rest token lookup")
        # Cancelling one call must not cancel the future, because other calls may wait for it.
        return await asyncio.shield(future)

    async def _run(self) -> None:
        while self._futures:
            futures, self._futures = self._futures, {}
            try:
                callers = await _query(_find_callers_of_tokens, list(futures))
            except Exception as error:  # noqa: BLE001 - raised by find_caller
                for future in futures.values():
                    future.set_exception(error)
                    # Mark the exception as retrieved, in case all calls were cancelled.
                    future.exception()
            else:
                for token, future in futures.items():
                    future.set_result(callers[token])
        self._task = None


_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, _TokenLookup] = WeakKeyDictionary()


async def _query(function: Callable[[Any], T], argument: Any) -> T:
    """Query the database in a thread; raise ServiceUnavailable if that fails or takes too long."""
    try:
        async with asyncio.timeout(_QUERY_TIMEOUT_SECONDS):
            return await in_thread(function, argument)
    except (DatabaseError, TimeoutError):
        raise ServiceUnavailable from None


def _find_callers_of_tokens(tokens: list[str]) -> dict[str, ApiCaller | None]:
    claims = {token: relay_auth.read_token(token, purpose=PURPOSE) for token in tokens}
    idents = relay_auth.idents_of({claim.user.pk for claim in claims.values() if claim})
    return {
        token: _build_caller(claim.user, idents, expires_at=claim.expires_at) if claim else None
        for token, claim in claims.items()
    }


def _find_caller_of_session(request: HttpRequest) -> ApiCaller | None:
    user = request.user
    if not user.is_authenticated or not request.session.session_key:
        return None
    return _build_caller(user, relay_auth.idents_of([user.pk]), session=request.session.session_key)


def _build_caller(user: Any, idents: Mapping[Any, Iterable[str]], **source: Any) -> ApiCaller:
    credentials = Credentials(user.pk, user.get_session_auth_hash(), **source)
    return ApiCaller(user, credentials, frozenset(idents[user.pk]))


def _bearer_token(request: HttpRequest) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def require_csrf_header(request: HttpRequest) -> None:
    """Raise ApiError 403 if a session call has no valid X-CSRFToken header, even for GET."""
    if _bearer_token(request) is not None:
        return
    # The middleware ignores GET.
    post = copy(request)
    post.method = "POST"
    # Without form data, the middleware checks the header only, and does not read the body.
    post.POST = QueryDict()  # type: ignore[misc]
    post.csrf_processing_done = False  # type: ignore[attr-defined]
    middleware = CsrfViewMiddleware(_empty_response)
    middleware.process_request(post)
    if middleware.process_view(post, _empty_response, (), {}) is not None:
        raise ApiError(403, "the header X-CSRFToken is missing or wrong")


def _empty_response(_request: HttpRequest) -> HttpResponse:
    return HttpResponse()
