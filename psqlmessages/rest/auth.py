"""Authentication of REST calls: session or token, and the acting node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from django.conf import settings
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, QueryDict
from django.middleware.csrf import CsrfViewMiddleware
from ninja.security.base import AuthBase

from psqlmessages.relay import auth
from psqlmessages.relay.auth import idents_of, matches_any
from psqlmessages.relay.revalidation import Credentials, in_thread
from psqlmessages.rest.errors import ApiError, ServiceUnavailable

# API tokens cannot open a WebSocket, and WebSocket tokens cannot call the API.
PURPOSE: Final = "psqlmessages.rest"
_TIMEOUT_SECONDS: Final = 5.0
_SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
_MAX_LISTED: Final = 50

T = TypeVar("T")


def token_for(user: Any, lifetime: timedelta) -> str:
    """Issue a token for calls as a user: ``Authorization: Bearer …``.

    Anyone who has the token acts as the user. It becomes invalid after its lifetime, and if the
    user's password changes or the user is deactivated or deleted.
    """
    return auth.token_for(user, lifetime, purpose=PURPOSE)


@dataclass(frozen=True, slots=True)
class ApiCaller:
    """The caller: the user, the credentials, and the idents and patterns that the user may use."""

    user: Any
    credentials: Credentials
    allowed: frozenset[str]

    def choose_ident(self, ident: str | None) -> str:
        """Return the acting node: the given one, or the only node that the user may act as."""
        if not self.allowed:
            raise ApiError(403, "no web identity allows you to act as a node")
        if ident is not None:
            if ident.endswith("*") or not matches_any(ident, self.allowed):
                raise ApiError(403, f"you may not act as {ident:.100}")
            return ident
        idents = [allowed for allowed in self.allowed if not allowed.endswith("*")]
        if len(idents) != 1:
            listed = ", ".join(sorted(self.allowed)[:_MAX_LISTED])
            raise ApiError(400, f"name the acting node in ?ident=: you may act as {listed}")
        return idents[0]


class ByToken(AuthBase):
    """A token in the header ``Authorization: Bearer …``. Browsers never send it automatically."""

    openapi_type = "http"
    openapi_scheme = "bearer"

    async def __call__(self, request: HttpRequest) -> ApiCaller | None:
        """Authenticate; without a token, leave it to the session."""
        token = _bearer_token(request)
        if token is None:
            return None
        batch = _batches.setdefault(asyncio.get_running_loop(), _TokenBatch())
        return await batch.find_caller(token)

    authenticate = __call__


class BySession(AuthBase):
    """A Django session. Calls that change or take something also need the header X-CSRFToken."""

    openapi_type = "apiKey"
    openapi_in = "cookie"
    openapi_name = settings.SESSION_COOKIE_NAME
    # The documentation page reads this: it must send the header.
    csrf = True

    async def __call__(self, request: HttpRequest) -> ApiCaller | None:
        """Authenticate, unless the request has a token, which takes precedence."""
        if _bearer_token(request) is not None or not hasattr(request, "session"):
            return None
        caller = await _query(_find_caller_of_session, request)
        if caller is not None and request.method not in _SAFE_METHODS:
            require_csrf_header(request)
        return caller

    authenticate = __call__


class _TokenBatch:
    """Looks up the tokens of concurrent calls in one batch; equal tokens only once."""

    def __init__(self) -> None:
        self._callers: dict[str, asyncio.Future[ApiCaller | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def find_caller(self, token: str) -> ApiCaller | None:
        """Look up the current owner of a token; raises ServiceUnavailable."""
        caller = self._callers.get(token)
        if caller is None:
            caller = self._callers[token] = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._find_callers(), name="rest reads tokens")
        # Other calls wait for the same future.
        return await asyncio.shield(caller)

    async def _find_callers(self) -> None:
        while self._callers:
            futures, self._callers = self._callers, {}
            try:
                callers = await _query(_find_callers_of_tokens, list(futures))
            except Exception as error:  # noqa: BLE001 - passed on to the callers
                for future in futures.values():
                    future.set_exception(error)
                    # Mark the exception as retrieved, in case all callers have gone.
                    future.exception()
            else:
                for token, future in futures.items():
                    future.set_result(callers[token])
        self._task = None


_batches: WeakKeyDictionary[asyncio.AbstractEventLoop, _TokenBatch] = WeakKeyDictionary()


async def _query(function: Callable[[Any], T], argument: Any) -> T:
    """Call a function that queries the database, in a thread; raises ServiceUnavailable."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return await in_thread(function, argument)
    except (DatabaseError, TimeoutError):
        raise ServiceUnavailable from None


def _find_callers_of_tokens(tokens: list[str]) -> dict[str, ApiCaller | None]:
    claims = {token: auth.read_token(token, purpose=PURPOSE) for token in tokens}
    allowed = idents_of({claim.user.pk for claim in claims.values() if claim})
    return {
        token: claim and _caller(claim.user, allowed, expires_at=claim.expires_at)
        for token, claim in claims.items()
    }


def _find_caller_of_session(request: HttpRequest) -> ApiCaller | None:
    user = request.user
    if not user.is_authenticated or not request.session.session_key:
        return None
    return _caller(user, idents_of([user.pk]), session=request.session.session_key)


def _caller(user: Any, allowed: Mapping[Any, Iterable[str]], **source: Any) -> ApiCaller:
    credentials = Credentials(user.pk, user.get_session_auth_hash(), **source)
    return ApiCaller(user, credentials, frozenset(allowed[user.pk]))


def _bearer_token(request: HttpRequest) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def require_csrf_header(request: HttpRequest) -> None:
    """Refuse a session call without a valid X-CSRFToken header, whatever its method."""
    if _bearer_token(request) is not None:
        return
    post = copy(request)
    post.method = "POST"
    # Only the header counts: looking for a form field would read the body.
    post.POST = QueryDict()  # type: ignore[misc]
    post.csrf_processing_done = False  # type: ignore[attr-defined]
    middleware = CsrfViewMiddleware(_empty_response)
    middleware.process_request(post)
    if middleware.process_view(post, _empty_response, (), {}) is not None:
        raise ApiError(403, "the header X-CSRFToken is missing or wrong")


def _empty_response(_request: HttpRequest) -> HttpResponse:
    return HttpResponse()
