"""Revalidation: whether the users of open WebSockets still have access."""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from django.conf import settings
from django.contrib.auth import SESSION_KEY, get_user_model
from django.contrib.sessions.backends.db import SessionStore as DatabaseSessions
from django.db import DatabaseError, connections
from django.utils import timezone

from psqlmessages import health
from psqlmessages.client.connection import is_readable
from psqlmessages.relay.auth import idents_of, matches_any
from psqlmessages.retry import RateLimitedLogger

INTERVAL_SECONDS: Final = 0.5
# How long a WebSocket stays unrestricted while its user cannot be checked.
TRUSTED_SECONDS: Final = 5
# /healthz reports a query of users that takes longer.
SLOW_SECONDS: Final = 2.0

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
    """A WebSocket, or a similar connection, whose user is checked while it is open."""

    credentials: Credentials
    ident: str | None = None

    def permits(self, user: Any) -> bool:
        """Return whether the user, freshly loaded, may still use it; called in a thread."""
        return True

    def revoked(self, reason: str) -> None:
        """Close it: the user has lost access."""

    def ident_revoked(self, ident: str) -> None:
        """End a node that the user may no longer act as."""

    def unchecked(self) -> None:
        """Close, or send nothing: the user could not be checked for TRUSTED_SECONDS."""

    def reap(self) -> None:
        """Drop a connection that has ended while its peer does not read the buffered data."""


class CredentialMonitor:
    """Checks all WebSockets of one event loop, with a few queries for all of them.

    ``failures`` counts failed checks.
    """

    def __init__(self) -> None:
        self.failures = 0
        # The time at which each WebSocket was last known to be allowed.
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

    def end(self) -> None:
        """Stop all checks immediately."""
        for task in (self._task, self._check):
            if task is not None:
                task.cancel()

    async def _run(self) -> None:
        try:
            while self._sockets:
                await asyncio.sleep(INTERVAL_SECONDS)
                await self._wait_for_check()
                trusted_since = monotonic() - TRUSTED_SECONDS
                for socket, allowed_at in list(self._sockets.items()):
                    if allowed_at < trusted_since:
                        socket.unchecked()
        finally:
            self._task = None
        await in_thread(connections.close_all)

    async def _wait_for_check(self) -> None:
        """Wait for a check, for TRUSTED_SECONDS; a slower one goes on until the next call."""
        if self._check is None:
            self._check = asyncio.create_task(self.check_now(), name="psqlmessages check")
        await asyncio.wait({self._check}, timeout=TRUSTED_SECONDS)
        if self._check.done():
            ended, self._check = self._check, None
            if error := ended.exception():
                self.failures += 1
                log.warning("could not re-check the permissions of open WebSockets: %r", error)

    async def check_now(self) -> None:
        """Check once, and end access that is no longer allowed."""
        began_at = monotonic()
        subjects = []
        for socket in list(self._sockets):
            socket.reap()
            subjects.append((socket, socket.credentials, socket.ident))
        problems = await in_thread(revocations, subjects)
        for (socket, _, ident), problem in zip(subjects, problems, strict=True):
            if isinstance(problem, Exception):
                self.failures += 1
                log.warning("could not re-check the permissions of a WebSocket: %r", problem)
                continue
            if socket in self._sockets:
                self._sockets[socket] = began_at
            if problem:
                socket.revoked(problem)
            elif problem is None and ident:
                socket.ident_revoked(ident)


def revocations(
    subjects: list[tuple[MonitoredSocket, Credentials, str | None]],
) -> list[str | Exception | None]:
    """Return for each WebSocket the reason to close it; "" if none, None if only its node must end.

    An exception means that this one could not be checked: the project's own permission backend may
    be unavailable. Takes four queries; with sessions outside the database, one load per session.
    """
    now = datetime.now(UTC)
    # Read before the users: if a user is deleted in between, the WebSocket must close with that
    # reason, instead of only losing its node.
    allowed = idents_of({credentials.user for _, credentials, ident in subjects if ident})
    all_credentials = [credentials for _, credentials, _ in subjects]
    users = get_user_model()._default_manager.in_bulk({each.user for each in all_credentials})
    sessions = _open_sessions(all_credentials)

    def problem(
        socket: MonitoredSocket, credentials: Credentials, ident: str | None
    ) -> str | Exception | None:
        if credentials.session is not None and credentials.session not in sessions:
            return "the user has logged out"
        if credentials.expires_at is not None and credentials.expires_at <= now:
            return "the token has expired"
        if reason := _user_error(users.get(credentials.user), socket, credentials):
            return reason
        return None if ident and not matches_any(ident, allowed[credentials.user]) else ""

    return [problem(*subject) for subject in subjects]


def _user_error(user: Any, socket: MonitoredSocket, credentials: Credentials) -> str | Exception:
    if user is None or not user.is_active:
        return "the user is no longer active"
    if user.get_session_auth_hash() != credentials.auth_hash:
        return "the password was changed"
    try:
        return "" if socket.permits(user) else "the user no longer has permission"
    except DatabaseError:
        raise
    except Exception as error:  # noqa: BLE001 - logged; the others are still checked
        return error


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
    # Not registered at import, so that it runs before close_hubs: atexit runs the last function
    # first. close_hubs runs the event loop after Python has stopped the thread of the checks.
    _end_monitors_at_exit()
    return _monitors.setdefault(asyncio.get_running_loop(), CredentialMonitor())


@cache
def _end_monitors_at_exit() -> None:
    atexit.register(_end_monitors)


def _end_monitors() -> None:
    for loop, monitor in list(_monitors.items()):
        # Do not run the event loop here: its pending work would report the nodes as crashed.
        if not (loop.is_closed() or loop.is_running()):
            monitor.end()


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function that makes queries, in the relay's own thread with its open connection.

    Channels would use a thread that all WebSockets of the process share with views.
    """
    future = _thread().submit(_run_on_connect_as, function, *arguments)
    _unfinished[future] = monotonic()
    future.add_done_callback(lambda ended: _unfinished.pop(ended, None))
    return await asyncio.wrap_future(future)


# The time at which each call was submitted, the oldest first.
_unfinished: dict[Future[Any], float] = {}


def _is_hanging() -> bool:
    """Return whether users cannot be loaded because a query takes too long."""
    return any(monotonic() - began > SLOW_SECONDS for began in list(_unfinished.values())[:1])


health.register("users", _is_hanging)


def _run_on_connect_as(function: Callable[..., T], *arguments: Any) -> T:
    for connection in connections.all(initialized_only=True):
        own = connection.connection
        if own is None or connection.vendor != "postgresql":
            continue
        # Readable without a query: the server has closed it, as at a restart. A query would fail.
        if own.closed or is_readable(own.fileno()):
            connection.close()
    try:
        return function(*arguments)
    except DatabaseError:
        # The connection may be broken: the next call opens a new one.
        connections.close_all()
        raise


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="psqlmessages-relay")
