"""Origin check of WebSockets, by the rules of Django's CSRF check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.http.request import is_same_domain

Application = Callable[[Any, Any, Any], Awaitable[None]]

_PORTS: Final = {"http": 80, "https": 443}


def from_own_pages(application: Application) -> Application:
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


# Scheme, host and port.
Origin = tuple[str, str, int]


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
