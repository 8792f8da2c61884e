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
from psqlmessages.relay.auth import Claim, idents_of, matches_any
from psqlmessages.relay.revalidation import Credentials, in_thread
from psqlmessages.rest.errors import ApiError, ServiceUnavailable

# Tokens for API calls. They cannot open a WebSocket, and WebSocket tokens cannot call the API.

PURPOSE: Final = "psqlmessages.rest"


def token_for(user: Any, lifetime: timedelta) -> str:
    """Issue a token for calls as a user: ``Authorization: Bearer …``.

    It ends with its lifetime, with a change of the user's password, and with the user. Anyone who
    has the token acts as the user.
    """
    return auth.token_for(user, lifetime, purpose=PURPOSE)


def read(token: str) -> Claim | None:
    """Verify a token; None if it is altered or expired, or the user is inactive or deleted."""
    return auth.read(token, purpose=PURPOSE)


_TIMEOUT_SECONDS: Final = 5.0
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_LISTED: Final = 50

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApiCaller:
    """The caller: the user, the credentials, and the idents and patterns that the user may use."""

    user: Any
    credentials: Credentials
    allowed: frozenset[str]

    def ident(self, asked: str | None) -> str:
        """Return the acting node: the one given, or the only one the user may be."""
        if not self.allowed:
            raise ApiError(403, "no web identity allows you to act as a node")
        if asked is not None:
            if asked.endswith("*") or not matches_any(asked, self.allowed):
                raise ApiError(403, f"you may not act as {asked:.100}")
            return asked
        exact = [ident for ident in self.allowed if not ident.endswith("*")]
        if len(exact) != 1:
            shown = ", ".join(sorted(self.allowed)[:_LISTED])
            raise ApiError(400, f"name the acting node in ?ident=: you may act as {shown}")
        return exact[0]


class ByToken(AuthBase):
    """A token in the header ``Authorization: Bearer …``. Browsers never send it automatically."""

    openapi_type = "http"
    openapi_scheme = "bearer"

    async def __call__(self, request: HttpRequest) -> ApiCaller | None:
        """Authenticate; without a token, leave it to the session."""
        token = _bearer(request)
        if token is None:
            return None
        readings = _readings.setdefault(asyncio.get_running_loop(), _TokenBatch())
        try:
            return await readings.caller_of(token)
        except (DatabaseError, TimeoutError):
            raise ServiceUnavailable from None

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
        if _bearer(request) is not None or not hasattr(request, "session"):
            return None
        try:
            caller = await _read_in_time(_caller_of_session, request)
        except (DatabaseError, TimeoutError):
            raise ServiceUnavailable from None
        if caller is not None and request.method not in _SAFE:
            require_csrf_header(request)
        return caller

    authenticate = __call__


class _TokenBatch:
    """Looks up the tokens of concurrent calls in one batch; equal tokens only once."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[ApiCaller | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def caller_of(self, token: str) -> ApiCaller | None:
        """Look up the current owner of a token; raises DatabaseError and TimeoutError."""
        future = self._asked.get(token)
        if future is None:
            future = self._asked[token] = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="rest reads tokens")
        # Other calls wait for the same future.
        return await asyncio.shield(future)

    async def _read(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, {}
            try:
                found = await _read_in_time(_callers_of_tokens, list(asked))
            except Exception as error:  # noqa: BLE001 - passed on to the callers
                for future in asked.values():
                    future.set_exception(error)
                    # Mark the exception as retrieved, in case all callers have gone.
                    future.exception()
            else:
                for token, future in asked.items():
                    future.set_result(found[token])
        self._task = None


_readings: WeakKeyDictionary[asyncio.AbstractEventLoop, _TokenBatch] = WeakKeyDictionary()


async def _read_in_time(read: Callable[[Any], T], subject: Any) -> T:
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        return await in_thread(read, subject)


def _callers_of_tokens(given: list[str]) -> dict[str, ApiCaller | None]:
    claims = {token: read(token) for token in given}
    allowed = idents_of({claim.user.pk for claim in claims.values() if claim})
    return {
        token: claim and _caller(claim.user, allowed, expires_at=claim.expires_at)
        for token, claim in claims.items()
    }


def _caller_of_session(request: HttpRequest) -> ApiCaller | None:
    user = request.user
    if not user.is_authenticated or not request.session.session_key:
        return None
    return _caller(user, idents_of([user.pk]), session=request.session.session_key)


def _caller(user: Any, allowed: Mapping[Any, Iterable[str]], **by: Any) -> ApiCaller:
    credentials = Credentials(user.pk, user.get_session_auth_hash(), **by)
    return ApiCaller(user, credentials, frozenset(allowed[user.pk]))


def _bearer(request: HttpRequest) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def require_csrf_header(request: HttpRequest) -> None:
    """Refuse a session call without a valid X-CSRFToken header, whatever its method."""
    if _bearer(request) is not None:
        return
    asked = copy(request)
    asked.method = "POST"
    # Only the header counts: looking for a form field would read the body.
    asked.POST = QueryDict()  # type: ignore[misc]
    asked.csrf_processing_done = False  # type: ignore[attr-defined]
    check = CsrfViewMiddleware(_nothing)
    check.process_request(asked)
    if check.process_view(asked, _nothing, (), {}) is not None:
        raise ApiError(403, "the header X-CSRFToken is missing or wrong")


def _nothing(_request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def missing(caller: ApiCaller, permissions: Iterable[str]) -> str | None:
    """Return the first permission that the caller lacks; queries the database."""
    if not (caller.user.is_active and caller.user.is_staff):
        return "is_staff"
    return next((name for name in permissions if not caller.user.has_perm(name)), None)
