"""ASGI application of the WebSockets: routes and authentication."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from django.db import DatabaseError
from django.urls import path, re_path
from django.utils.module_loading import import_string

from psqlmessages.conf import get_settings
from psqlmessages.relay import auth
from psqlmessages.relay.daphne import SCOPE_KEY, Transport, transport_of
from psqlmessages.relay.origins import from_own_pages
from psqlmessages.relay.revalidation import in_thread
from psqlmessages.relay.socket import EXPIRY_KEY, REFUSED_KEY, TRY_AGAIN_LATER
from psqlmessages.retry import RateLimitedLogger

CONSUMERS: Final = {
    "ws/node/": "psqlmessages.relay.consumer.NodeConsumer",
    "ws/monitor/": "psqlmessages.monitor.consumer.MonitorConsumer",
}

Application = Callable[[Any, Any, Any], Awaitable[None]]

log: Final = RateLimitedLogger(logging.getLogger("psqlmessages.relay"))


def websocket_application() -> Application:
    """Make the ASGI application of all WebSockets: /ws/node/ and /ws/monitor/.

    Only a ProtocolTypeRouter may wrap it, since it needs the server's own ``send``.
    """
    by_session = from_own_pages(AuthMiddlewareStack(_consumers()))
    by_token = _by_token(_consumers("ws/node/"))

    async def application(scope: Any, receive: Any, send: Any) -> None:
        transport = transport_of(send, get_settings().RELAY_FRAME_BYTES)
        scope = {**scope, SCOPE_KEY: transport, "scheme": transport.scheme or scope.get("scheme")}
        chosen = by_session if _bearer(scope) is None else by_token
        try:
            await chosen(scope, receive, send)
        except DatabaseError as error:
            log.warning("closed a WebSocket because its user could not be loaded: %s", error)
            await _turn_away(transport, receive)

    return application


def _consumers(*routes_open: str) -> Application:
    routes = [path(route, _lazy(CONSUMERS[route])) for route in routes_open or CONSUMERS]
    return URLRouter([*routes, re_path("", _refuse)])  # type: ignore[no-any-return]


def _lazy(name: str) -> Application:
    """Import a consumer at its first connection, when the models of its app are loaded."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await import_string(name).as_asgi()(scope, receive, send)

    return application


async def _refuse(_scope: Any, _receive: Any, send: Any) -> None:
    """Refuse a WebSocket whose path matches no route."""
    await send({"type": "websocket.close"})


async def _turn_away(transport: Transport, receive: Any) -> None:
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
