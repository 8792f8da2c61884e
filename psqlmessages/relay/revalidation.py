"""Revalidation: closes WebSockets whose users have lost access."""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from time import monotonic
from typing import Any, ClassVar, Final, TypeVar
from weakref import WeakKeyDictionary

from django.conf import settings
from django.contrib.auth import SESSION_KEY, get_user_model
from django.contrib.sessions.backends.db import SessionStore as DatabaseSessions
from django.db import DatabaseError, connections
from django.utils import timezone

from psqlmessages import health
from psqlmessages.client.connection import is_readable
from psqlmessages.relay.auth import idents_of, matches_any, permissions_of
from psqlmessages.retry import RateLimitedLogger

CHECK_INTERVAL_SECONDS: Final = 0.5
# How long a WebSocket stays usable while its user cannot be checked.
MAX_UNCHECKED_SECONDS: Final = 5
# /healthz reports a query of users that takes longer.
SLOW_QUERY_SECONDS: Final = 2.0

T = TypeVar("T")
log: Final = RateLimitedLogger(logging.getLogger("psqlmessages.relay"))


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a WebSocket was admitted: a user with this password, by a session or by a token."""

    user: Any  # the primary key
    auth_hash: str
    session: str | None = None
    expires_at: datetime | None = None


class MonitoredSocket:
    """A WebSocket, or a waiting REST request, whose user is checked while it is open."""

    __slots__ = ()

    # The permissions that ``permits`` checks.
    permissions: ClassVar[frozenset[str]] = frozenset()

    credentials: Credentials
    ident: str | None

    def permits(self, user: Any, granted: Set[str]) -> bool:
        """Return whether the user, just loaded, may still use the WebSocket; runs in a thread.

        ``granted``: which of the ``permissions`` the user has.
        """
        return True

    def on_access_revoked(self, reason: str) -> None:
        """Close the WebSocket: the user has lost access."""

    def on_ident_revoked(self, ident: str) -> None:
        """End a node that the user may no longer act as."""

    def on_unchecked(self) -> None:
        """Close, or stop sending: the user could not be checked for MAX_UNCHECKED_SECONDS."""

    def abort_if_stuck(self) -> None:
        """Abort the connection of a closed WebSocket whose peer does not read the buffered data."""


# A WebSocket, and its credentials and node at the start of a check; both may change during it.
Subject = tuple[MonitoredSocket, Credentials, str | None]


@dataclass(frozen=True, slots=True)
class RevalidationResult:
    """Result of the check of one WebSocket. The defaults mean that nothing has changed.

    ``reason``: why the WebSocket must close. ``is_ident_revoked``: the user may no longer act as
    the node, so the node must end. ``error``: the exception of a failed check, for example from an
    unavailable permission backend of the project.
    """

    reason: str = ""
    is_ident_revoked: bool = False
    error: Exception | None = None


class CredentialMonitor:
    """Checks all WebSockets of one event loop, with a few queries for all of them."""

    def __init__(self) -> None:
        # The start of the last successful check of each WebSocket.
        self._sockets: dict[MonitoredSocket, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._check: asyncio.Task[None] | None = None

    def add(self, socket: MonitoredSocket) -> None:
        """Start to check a WebSocket."""
        self._sockets[socket] = monotonic()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="psqlmessages credentials")

    def discard(self, socket: MonitoredSocket) -> None:
        """Stop checking a WebSocket."""
        self._sockets.pop(socket, None)

    def stop(self) -> None:
        """Stop all checks immediately."""
        for task in (self._task, self._check):
            if task is not None:
                task.cancel()

    async def _run(self) -> None:
        try:
            while self._sockets:
                await asyncio.sleep(CHECK_INTERVAL_SECONDS)
                await self._wait_for_check()
                earliest_check = monotonic() - MAX_UNCHECKED_SECONDS
                for socket, checked_at in list(self._sockets.items()):
                    if checked_at < earliest_check:
                        socket.on_unchecked()
        finally:
            self._task = None
        await in_thread(connections.close_all)

    async def _wait_for_check(self) -> None:
        """Check all WebSockets, but wait for the check only up to MAX_UNCHECKED_SECONDS.

        If the check takes longer, the next call waits for the same check.
        """
        if self._check is None:
            self._check = asyncio.create_task(self.check_now(), name="psqlmessages check")
        await asyncio.wait({self._check}, timeout=MAX_UNCHECKED_SECONDS)
        if self._check.done():
            check, self._check = self._check, None
            if error := check.exception():
                log.warning("could not re-check the permissions of open WebSockets: %r", error)

    async def check_now(self) -> None:
        """Check once, and end access that is no longer allowed."""
        began_at = monotonic()
        subjects: list[Subject] = []
        for socket in list(self._sockets):
            socket.abort_if_stuck()
            subjects.append((socket, socket.credentials, socket.ident))
        results = await in_thread(find_revocations, subjects)
        for (socket, _, ident), result in zip(subjects, results, strict=True):
            if result.error is not None:
                log.warning("could not re-check the permissions of a WebSocket: %r", result.error)
                continue
            if socket in self._sockets:
                self._sockets[socket] = began_at
            if result.reason:
                socket.on_access_revoked(result.reason)
            elif result.is_ident_revoked and ident:
                socket.on_ident_revoked(ident)


def find_revocations(subjects: list[Subject]) -> list[RevalidationResult]:
    """Check WebSockets with up to five queries.

    Each session outside the database is loaded separately, and so are the permissions of each user
    if the project has other permission backends than Django's ModelBackend.
    """
    # Read the idents before the users. If a user is deleted in between, the WebSocket closes. In
    # the other order, the WebSocket would only lose its node.
    allowed = idents_of({credentials.user for _, credentials, ident in subjects if ident})
    all_credentials = [credentials for _, credentials, _ in subjects]
    users = get_user_model()._default_manager.in_bulk({each.user for each in all_credentials})
    sessions = _open_sessions(all_credentials)
    checked = {credentials.user for socket, credentials, _ in subjects if socket.permissions}
    names = frozenset().union(*(socket.permissions for socket, *_ in subjects))
    granted = permissions_of([users[user] for user in checked if user in users], names)
    results = []
    for socket, credentials, ident in subjects:
        is_logged_out = credentials.session is not None and credentials.session not in sessions
        try:
            user = users.get(credentials.user)
            reason = _find_reason(socket, credentials, user, granted, is_logged_out)
        except DatabaseError:
            raise
        except Exception as error:  # noqa: BLE001 - logged; the others are still checked
            results.append(RevalidationResult(error=error))
            continue
        is_ident_revoked = ident is not None and not matches_any(ident, allowed[credentials.user])
        results.append(RevalidationResult(reason, is_ident_revoked))
    return results


def _find_reason(
    socket: MonitoredSocket,
    credentials: Credentials,
    user: Any,
    granted: Mapping[Any, Set[str]],
    is_logged_out: bool,
) -> str:
    """Return the reason to close a WebSocket, "" if there is none."""
    if is_logged_out:
        return "the user has logged out"
    if credentials.expires_at is not None and credentials.expires_at <= datetime.now(UTC):
        return "the token has expired"
    if user is None or not user.is_active:
        return "the user is no longer active"
    if user.get_session_auth_hash() != credentials.auth_hash:
        return "the password was changed"
    permissions = granted.get(user.pk)
    if permissions is None:
        permissions = {name for name in socket.permissions if user.has_perm(name)}
    return "" if socket.permits(user, permissions) else "the user no longer has permission"


def _open_sessions(credentials: list[Credentials]) -> set[str]:
    store = import_module(settings.SESSION_ENGINE).SessionStore
    users = {each.session: str(each.user) for each in credentials if each.session is not None}
    if issubclass(store, DatabaseSessions):
        # Naive if the project sets USE_TZ = False, like the stored dates.
        now = timezone.now()
        rows = store.get_model_class().objects.filter(session_key__in=users, expire_date__gt=now)
        return set(rows.values_list("session_key", flat=True))
    return {key for key, user in users.items() if store(key).load().get(SESSION_KEY) == user}


_monitors: WeakKeyDictionary[asyncio.AbstractEventLoop, CredentialMonitor] = WeakKeyDictionary()


def get_credential_monitor() -> CredentialMonitor:
    """Return the credential monitor of the running event loop."""
    # Stop the checks before close_hubs runs the event loop: Python has stopped their thread by
    # then. atexit calls the last registered function first, and close_hubs is already registered.
    _stop_monitors_at_exit()
    return _monitors.setdefault(asyncio.get_running_loop(), CredentialMonitor())


@cache
def _stop_monitors_at_exit() -> None:
    atexit.register(_stop_monitors)


def _stop_monitors() -> None:
    for loop, monitor in list(_monitors.items()):
        # Do not run the event loop here: its pending work would report the nodes as crashed.
        if not (loop.is_closed() or loop.is_running()):
            monitor.stop()


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function that makes queries, in the relay's own thread with its open connection.

    The functions of Django Channels would use a thread that all WebSockets of the process share
    with views.
    """
    future = _executor().submit(_run_on_open_connection, function, *arguments)
    _pending_calls[future] = monotonic()
    future.add_done_callback(lambda done: _pending_calls.pop(done, None))
    return await asyncio.wrap_future(future)


# When each unfinished call was submitted, the oldest call first.
_pending_calls: dict[Future[Any], float] = {}


def _has_slow_query() -> bool:
    """Return whether the oldest unfinished call has taken more than SLOW_QUERY_SECONDS."""
    oldest = next(iter(list(_pending_calls.values())), None)
    return oldest is not None and monotonic() - oldest > SLOW_QUERY_SECONDS


health.register("users", _has_slow_query)


def _run_on_open_connection(function: Callable[..., T], *arguments: Any) -> T:
    for connection in connections.all(initialized_only=True):
        raw = connection.connection
        if raw is None or connection.vendor != "postgresql":
            continue
        # A connection that is readable without a query was closed by the server.
        if raw.closed or is_readable(raw.fileno()):
            connection.close()
    try:
        return function(*arguments)
    except DatabaseError:
        # The connection may be broken: the next call opens a new one.
        connections.close_all()
        raise


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="psqlmessages-relay")
