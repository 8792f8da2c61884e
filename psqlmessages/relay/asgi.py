"""ASGI application of the WebSockets: routes, authentication, origin check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError
from django.http.request import is_same_domain
from django.urls import re_path
from django.utils.module_loading import import_string

from psqlmessages.conf import get_settings
from psqlmessages.relay import auth
from psqlmessages.relay.daphne import SCOPE_KEY, Transport, transport_of
from psqlmessages.relay.revalidation import in_thread, log
from psqlmessages.relay.socket import EXPIRY_KEY, REFUSED_KEY, TRY_AGAIN_LATER

CONSUMERS: Final = {
    "ws/node/": "psqlmessages.relay.consumer.NodeConsumer",
    "ws/monitor/": "psqlmessages.monitor.consumer.MonitorConsumer",
}

Application = Callable[[Any, Any, Any], Awaitable[None]]


def websocket_application() -> Application:
    """Make the ASGI application of all WebSockets: ws/node/ and ws/monitor/, below any prefix.

    Only a ProtocolTypeRouter may wrap it, since it needs the server's own ``send``.
    """
    by_session = _from_own_pages(AuthMiddlewareStack(_consumers()))
    by_token = _by_token(_consumers("ws/node/"))

    async def application(scope: Any, receive: Any, send: Any) -> None:
        transport = transport_of(send, get_settings().RELAY_FRAME_BYTES)
        scope = {**scope, SCOPE_KEY: transport, "scheme": transport.scheme or scope.get("scheme")}
        chosen = by_session if _bearer(scope) is None else by_token
        try:
            await chosen(scope, receive, send)
        except DatabaseError as error:
            log.warning("closed a WebSocket because its user could not be loaded: %s", error)
            await _close_unavailable(transport, receive)

    return application


def _consumers(*routes_open: str) -> Application:
    # A proxy may forward a part of a site without removing its prefix.
    routes = [
        re_path(f"^(?:.*/)?{route}$", _lazy(CONSUMERS[route])) for route in routes_open or CONSUMERS
    ]
    return URLRouter([*routes, re_path("", _refuse)])  # type: ignore[no-any-return]


def _lazy(name: str) -> Application:
    """Import a consumer at its first connection, when the models of its app are loaded."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await import_string(name)()(scope, receive, send)

    return application


async def _refuse(_scope: Any, _receive: Any, send: Any) -> None:
    """Refuse a WebSocket whose path matches no route."""
    await send({"type": "websocket.close"})


async def _close_unavailable(transport: Transport, receive: Any) -> None:
    if not transport.is_accepted:
        await transport.accept()
    await transport.close(TRY_AGAIN_LATER, "the database is unavailable: try again later")
    while (await receive())["type"] != "websocket.disconnect":
        pass


def _bearer(scope: Any) -> str | None:
    """Read the Bearer token of the Authorization header; None if there is none.

    Other schemes are ignored: browsers automatically send the Basic credentials of a proxy.
    """
    for name, value in scope["headers"]:
        scheme, _, token = value.decode("latin1").partition(" ")
        if name == b"authorization" and scheme.lower() == "bearer":
            return token.strip()  # type: ignore[no-any-return]
    return None


def _by_token(application: Application) -> Application:
    """Admit the user of a token. Browsers never add this header, so the origin is not checked."""

    async def admit(scope: Any, receive: Any, send: Any) -> None:
        claim = await in_thread(auth.read, _bearer(scope) or "")
        given = (
            {REFUSED_KEY: "the token is altered or has expired"}
            if claim is None
            else {"user": claim.user, EXPIRY_KEY: claim.expires_at}
        )
        await application({**scope, **given}, receive, send)

    return admit


# The origin check, by the rules of Django's CSRF check.

# Scheme, host and port.
Origin = tuple[str, str, int]

_PORTS: Final = {"http": 80, "https": 443}


def _from_own_pages(application: Application) -> Application:
    """Refuse WebSockets from pages of other sites: the browser sends our cookies with them."""

    async def admit(scope: Any, receive: Any, send: Any) -> None:
        if is_own(scope):
            await application(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    return admit


def is_own(scope: Any) -> bool:
    """Return whether the header Origin is this site (scheme, host and port) or a trusted origin.

    CSRF_TRUSTED_ORIGINS lists the trusted origins; ``*`` stands for subdomains. Behind a proxy that
    terminates TLS, SECURE_PROXY_SSL_HEADER determines the scheme.
    """
    origins = [value.decode("latin1") for name, value in scope["headers"] if name == b"origin"]
    origin = _parsed(origins[0]) if len(origins) == 1 else None
    return origin is not None and (origin == _parsed(_own(scope)) or _is_trusted(origin))


def _parsed(origin: str) -> Origin | None:
    """Parse an origin; None if it is not a valid one, such as "null"."""
    try:
        parts = urlsplit(origin)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    is_bare = origin.lower() == f"{parts.scheme}://{parts.netloc}".lower() and not parts.username
    if port is None or not parts.hostname or not is_bare:
        return None
    return parts.scheme, parts.hostname, port


def _own(scope: Any) -> str:
    """Return the origin that this request was sent to; "" if ALLOWED_HOSTS lacks its host."""
    request = ASGIRequest({**scope, "method": "GET"}, None)
    try:
        host = request.get_host()
    except DisallowedHost:
        return ""
    # The scheme of a WebSocket is ws or wss.
    return f"{'https' if request.scheme in ('https', 'wss') else 'http'}://{host}"


def _is_trusted(origin: Origin) -> bool:
    scheme, host, port = origin
    for trusted in settings.CSRF_TRUSTED_ORIGINS:
        known = _parsed(trusted.replace("//*.", "//", 1))
        if known is None or (scheme, port) != (known[0], known[2]):
            continue
        pattern = f".{known[1]}" if "//*." in trusted else known[1]
        if is_same_domain(host, pattern):
            return True
    return False
