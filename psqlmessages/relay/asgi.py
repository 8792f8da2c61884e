"""ASGI application of the WebSockets: routes, authentication, origin check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import DisallowedHost, ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.core.signals import request_started
from django.db import DatabaseError
from django.http.request import is_same_domain
from django.urls import re_path
from django.utils.module_loading import import_string

from psqlmessages.conf import get_settings
from psqlmessages.relay import auth
from psqlmessages.relay.daphne import TRANSPORT_KEY, make_transport
from psqlmessages.relay.revalidation import in_thread, log
from psqlmessages.relay.socket import EXPIRY_KEY, REFUSED_KEY, TRY_AGAIN_LATER

try:
    from channels.auth import AuthMiddlewareStack
    from channels.routing import URLRouter
except ImportError as error:
    install = "WebSockets need Channels and Daphne: pip install 'psqlmessages[web]'"
    raise ImproperlyConfigured(install) from error

CONSUMERS: Final = {
    "ws/node/": "psqlmessages.relay.consumer.NodeConsumer",
    "ws/monitor/": "psqlmessages.monitor.consumer.MonitorConsumer",
}

# Starts the writer of the counts per minute and of refused calls, unless it runs already.
START_WRITER: Final = "psqlmessages.monitor.minute_writer.start_history_writer"

Application = Callable[[Any, Any, Any], Awaitable[None]]


def websocket_application() -> Application:
    """Make the ASGI application of all WebSockets: ws/node/ and ws/monitor/, below any prefix.

    It needs the server's own ``send``, so only a ProtocolTypeRouter may wrap it.
    """
    session_application = AuthMiddlewareStack(_router())
    token_application = _router("ws/node/")
    # Also start the writer for HTTP requests, because calls of the REST API can be refused too.
    request_started.connect(_start_writer, dispatch_uid=START_WRITER)

    async def admit(scope: Any, receive: Any, send: Any) -> None:
        token = _bearer_token(scope)
        if token is not None:
            # No origin check is necessary: browsers never add a token to a request.
            claim = await in_thread(auth.read_token, token)
            admission = (
                {REFUSED_KEY: "the token is altered, no longer valid, or a token for REST"}
                if claim is None
                else {"user": claim.user, EXPIRY_KEY: claim.expires_at}
            )
            await token_application({**scope, **admission}, receive, send)
        else:
            # Refuse pages of other sites: browsers send our cookies with their requests too.
            admitted = session_application if has_allowed_origin(scope) else _refuse
            await admitted(scope, receive, send)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        _start_writer()
        transport = make_transport(send, get_settings().RELAY_FRAME_BYTES)
        scheme = transport.scheme or scope.get("scheme")
        try:
            await admit({**scope, TRANSPORT_KEY: transport, "scheme": scheme}, receive, send)
        except DatabaseError as error:
            log.warning("closed a WebSocket because its user could not be loaded: %s", error)
            if not transport.is_accepted:
                await transport.accept()
            await transport.close(TRY_AGAIN_LATER, "the database is unavailable: try again later")
            while (await receive())["type"] != "websocket.disconnect":
                pass

    return application


def _start_writer(**_signal: object) -> None:
    import_string(START_WRITER)()


def _router(*paths: str) -> Application:
    """Make a router from the given paths, by default all of CONSUMERS, to their consumers."""
    # A proxy may forward requests without removing the prefix of the site.
    routes = [
        re_path(f"^(?:.*/)?{path}$", _import_when_used(CONSUMERS[path]))
        for path in paths or CONSUMERS
    ]
    return URLRouter([*routes, re_path("", _refuse)])  # type: ignore[no-any-return]


def _import_when_used(name: str) -> Application:
    """Import a consumer at its first connection: by then, Django has loaded its models."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await import_string(name)()(scope, receive, send)

    return application


async def _refuse(_scope: Any, _receive: Any, send: Any) -> None:
    """Close a WebSocket before it is accepted: the browser gets HTTP status 403."""
    await send({"type": "websocket.close"})


def _bearer_token(scope: Any) -> str | None:
    """Return the Bearer token of the Authorization header; None if there is no such token.

    Other schemes are ignored: browsers automatically send the Basic credentials of a proxy.
    """
    for name, value in scope["headers"]:
        scheme, _, token = value.decode("latin1").partition(" ")
        if name == b"authorization" and scheme.lower() == "bearer":
            return token.strip()  # type: ignore[no-any-return]
    return None


# The origin check, by the rules of Django's CSRF check.

Origin = tuple[str, str, int]  # scheme, host and port
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def has_allowed_origin(scope: Any) -> bool:
    """Return whether the header Origin names this site or a trusted origin.

    CSRF_TRUSTED_ORIGINS lists the trusted origins; ``*`` stands for subdomains. Behind a proxy that
    terminates TLS, SECURE_PROXY_SSL_HEADER determines the scheme.
    """
    origins = [value.decode("latin1") for name, value in scope["headers"] if name == b"origin"]
    origin = _parse_origin(origins[0]) if len(origins) == 1 else None
    return origin is not None and (
        origin == _parse_origin(_site_origin(scope)) or _is_trusted(origin)
    )


def _parse_origin(text: str) -> Origin | None:
    """Parse an origin; None if it is invalid, such as "null"."""
    try:
        parts = urlsplit(text)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    has_more_parts = parts.username or text.lower() != f"{parts.scheme}://{parts.netloc}".lower()
    if port is None or not parts.hostname or has_more_parts:
        return None
    return parts.scheme, parts.hostname, port


def _site_origin(scope: Any) -> str:
    """Return the origin that the request was sent to; "" if its host is invalid or not allowed."""
    request = ASGIRequest({**scope, "method": "GET"}, None)
    try:
        host = request.get_host()
    except DisallowedHost:
        return ""
    # The scheme of a WebSocket is ws or wss.
    return f"{'https' if request.scheme in ('https', 'wss') else 'http'}://{host}"


def _is_trusted(origin: Origin) -> bool:
    scheme, host, port = origin
    for setting in settings.CSRF_TRUSTED_ORIGINS:
        trusted = _parse_origin(setting.replace("//*.", "//", 1))
        if trusted is None or (scheme, port) != (trusted[0], trusted[2]):
            continue
        pattern = f".{trusted[1]}" if "//*." in setting else trusted[1]
        if is_same_domain(host, pattern):
            return True
    return False
