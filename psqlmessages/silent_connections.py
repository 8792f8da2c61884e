"""Silent connections: closes Django's connections if their answers are lost in the network.

psycopg would wait forever. But a query may also be slow, so after ANSWER_SECONDS without an answer,
a new connection asks the server whether it works on the query. For the reasons see
docs/adr/0028-silent-connections-are-checked-on-the-server.md.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any, Final, TypeVar

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn

from psqlmessages.client.connect import connect
from psqlmessages.client.connection import AnswerTimeout
from psqlmessages.conf import Settings, get_settings
from psqlmessages.orm import address_of

logger = logging.getLogger("psqlmessages")

T = TypeVar("T")

_counts: Final = Counter[str]()
_ASK_INTERVAL_SECONDS: Final = 1.0
_ASK_TIMEOUT: Final = timedelta(seconds=5)
# An answer is lost if the server says so three times in a row: at first it may still be on its way,
# and a load balancer may send one question to another server.
_LOST_IN_A_ROW: Final = 3
# A backend that waits for its client is not working. If track_activities is off, the state is
# 'disabled', but wait_event_type is still available.
_BACKENDS: Final = """
    SELECT pg_backend_pid(), a.pid,
        a.state NOT LIKE 'idle%%'
            AND a.wait_event_type IS DISTINCT FROM 'Client'
    FROM pg_stat_activity AS a
    WHERE a.usename = session_user AND a.backend_type = 'client backend'
"""
# A lost backend would hold its locks until the server detects the loss. Another backend that has
# the same process id meanwhile is younger than our connection.
_TERMINATE: Final = """
    SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a
    WHERE a.pid = %s AND a.usename = session_user
      AND a.backend_start < clock_timestamp() - make_interval(secs => %s)
"""


def register() -> None:
    """Check all new connections of Django; called once, when the app is ready."""
    connection_created.connect(_replace_wait, dispatch_uid="psqlmessages.silent_connections")


def count_closed() -> int:
    """Count the connections that this process has closed because of lost answers."""
    return _counts["closed"]


def _replace_wait(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """Replace ``wait`` of a new connection by one that detects lost answers."""
    raw_connection = connection.connection
    # A pool returns the same connection many times.
    if not isinstance(raw_connection, psycopg.Connection) or "wait" in vars(raw_connection):
        return
    try:
        seconds = get_settings().ANSWER_SECONDS
    except ImproperlyConfigured:
        # The system checks report the error; connections must work nevertheless.
        seconds = Settings.ANSWER_SECONDS
    info = raw_connection.info
    # A Unix socket loses no packets.
    if not seconds or not info.host or info.host.startswith(("/", "@")):
        return
    # If the address has several hosts, ask the one that this connection uses.
    host = {
        "host": info.host,
        "hostaddr": info.hostaddr or None,
        "port": info.port,
        "connect_timeout": _ASK_TIMEOUT.seconds,
    }
    address = make_conninfo(**conninfo_to_dict(address_of(connection)) | host)
    server = _servers.setdefault(address, BackendMonitor(address))
    reference, connected_at = weakref.ref(raw_connection), monotonic()

    def wait(generator: PQGen[T], *args: Any, **kwargs: Any) -> T:
        waiting = reference()
        assert waiting is not None  # noqa: S101 - the caller has a reference
        silence = SilentWait(waiting.pgconn, connected_at, server, seconds)
        # The method of the connection's class, which may override wait().
        return type(waiting).wait(waiting, _watch_silence(generator, silence), *args, **kwargs)

    # There is no other hook: Django chooses the class of the connection.
    vars(raw_connection)["wait"] = wait


def _watch_silence(generator: PQGen[T], silence: SilentWait) -> Generator[Any, Any, T]:
    """Run a generator of psycopg's protocol, and check for a lost answer during silence."""
    try:
        awaited = next(generator)
        while True:
            # psycopg resumes its generators at least ten times a second, with 0 for "not yet".
            ready = yield awaited
            silence.on_resume(is_ready=bool(ready))
            awaited = generator.send(ready)
    except StopIteration as stop:
        result: T = stop.value
        return result


class SilentWait:
    """One wait for an answer: when the silence began, and what the server said about it."""

    def __init__(
        self, pgconn: PGconn, connected_at: float, server: BackendMonitor, seconds: float
    ) -> None:
        self._pgconn = pgconn
        self._connected_at = connected_at
        self._server = server
        self._seconds = seconds
        self._silence_began = monotonic()
        self._ask_at = self._silence_began + seconds
        self._last_snapshot: BackendSnapshot | None = None
        self._lost_in_a_row = 0

    def on_resume(self, *, is_ready: bool) -> None:
        """Close the connection and raise AnswerTimeout if the answer is known to be lost."""
        now = monotonic()
        if is_ready:
            self._silence_began, self._lost_in_a_row = now, 0
            self._ask_at = now + self._seconds
            return
        # A connection that waits for notifications expects no answer.
        if now <= self._ask_at or self._pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        snapshot = self._server.snapshot()
        # A snapshot taken for another thread may be older than this silence.
        if snapshot.at - self._silence_began <= self._seconds or snapshot is self._last_snapshot:
            return
        self._last_snapshot = snapshot
        if snapshot.is_lost(self._pgconn.backend_pid, self._seconds):
            self._lost_in_a_row += 1
            if self._lost_in_a_row == _LOST_IN_A_ROW:
                self._close(snapshot)
            return
        self._lost_in_a_row = 0
        if snapshot.silent_since is None:
            # A slow query: do not connect every second to ask again.
            self._ask_at = monotonic() + self._seconds

    def _close(self, snapshot: BackendSnapshot) -> None:
        pid = self._pgconn.backend_pid
        self._pgconn.finish()
        _counts["closed"] += 1
        self._server.terminate(pid, snapshot, monotonic() - self._connected_at)
        text = (
            f"no answer within {monotonic() - self._silence_began:.0f} s, and PostgreSQL is not"
            " working on the query or is unreachable: the connection was closed. The query may have"
            " been executed"
        )
        logger.warning("lost connection to PostgreSQL: %s", text)
        raise AnswerTimeout(text)


@dataclass(frozen=True, slots=True, eq=False)
class BackendSnapshot:
    """The state of a server at one time: which of our backends work on a query.

    ``working`` is None if that is unknown. ``silent_since``: no answer since then.
    """

    at: float
    working: dict[int, bool | None] | None = None
    silent_since: float | None = None

    def is_lost(self, pid: int, seconds: float) -> bool:
        """Return whether a backend will send no answer."""
        if self.silent_since is not None:
            return self.at - self.silent_since > seconds
        # A backend whose state is unknown may be working.
        return self.working is not None and self.working.get(pid, False) is False


@dataclass(slots=True, weakref_slot=True, eq=False)
class BackendMonitor:
    """Asks one server about our backends, for all waiting threads of the process."""

    address: str
    _latest: BackendSnapshot = field(default_factory=lambda: BackendSnapshot(0.0))
    _asked_at: float = 0.0
    _ask_lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self) -> BackendSnapshot:
        """Ask, unless another thread is asking or has just asked; return the latest answer."""
        if self._ask_lock.acquire(blocking=False):
            try:
                if monotonic() - self._asked_at >= _ASK_INTERVAL_SECONDS:
                    self._latest = self._query_backends(self._latest)
                    self._asked_at = monotonic()
            finally:
                self._ask_lock.release()
        return self._latest

    def _query_backends(self, previous: BackendSnapshot) -> BackendSnapshot:
        began = monotonic()
        try:
            rows, pid = self._run(_BACKENDS)
        except (psycopg.errors.ConnectionTimeout, AnswerTimeout):
            # An earlier silence counts only if we have asked the server continuously.
            was_asked_recently = began - self._asked_at < _ASK_TIMEOUT.total_seconds()
            return BackendSnapshot(
                began, silent_since=(was_asked_recently and previous.silent_since) or began
            )
        except psycopg.Error:
            # The server is starting or has no free connections: the state is unknown.
            return BackendSnapshot(began)
        # Behind a pooler, clients know only its process ids.
        is_direct = bool(rows) and rows[0][0] == pid
        return BackendSnapshot(began, {row[1]: row[2] for row in rows} if is_direct else None)

    def terminate(self, pid: int, snapshot: BackendSnapshot, age: float) -> None:
        """Terminate a backend whose connection is ``age`` seconds old, if the server answers."""
        if snapshot.working is None or pid not in snapshot.working:
            return
        try:
            self._run(_TERMINATE, (pid, age))
        except psycopg.Error as error:
            logger.warning("could not terminate backend %d of a lost connection: %s", pid, error)

    def _run(self, query: str, values: tuple[Any, ...] = ()) -> tuple[list[Any], int]:
        connection = connect(self.address, _ASK_TIMEOUT, "lost answers")
        try:
            return connection.execute(query, values).fetchall(), connection.info.backend_pid
        finally:
            # Not `close`, which may hang too.
            connection.pgconn.finish()


# Weak, so that an address with a former password goes with its last connection.
_servers: Final[weakref.WeakValueDictionary[str, BackendMonitor]] = weakref.WeakValueDictionary()
