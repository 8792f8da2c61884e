"""Silent connections: close a connection of Django if an answer was lost in the network.

psycopg would wait forever. But a query may also be slow. So after ANSWER_SECONDS without an answer,
ask the server on a new connection whether a backend works on the query. For the reasons see
docs/adr/0028-silent-connections-are-checked-on-the-server.md.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
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
from psqlmessages.client.connection import AnswerTimeout, with_check
from psqlmessages.conf import Settings, get_settings
from psqlmessages.orm import connection_dsn

logger = logging.getLogger("psqlmessages")

T = TypeVar("T")

_counts: Final = Counter[str]()
_ASK_INTERVAL_SECONDS: Final = 1.0
_ASK_TIMEOUT: Final = timedelta(seconds=5)
# An answer counts as lost if this number of successive snapshots say so. At the first snapshot the
# answer may still be on its way, or a load balancer may have asked another server.
_LOST_SNAPSHOTS: Final = 3
# One row for each backend of our role: the pid of the backend that runs this query, which reveals a
# pooler; the pid of the row's backend; and whether that backend works on a query. A backend that
# waits for its client does not. If track_activities is off, the state is 'disabled', but
# wait_event_type is still available.
_BACKENDS: Final = """
    SELECT pg_backend_pid(), a.pid,
        a.state NOT LIKE 'idle%%' AND a.wait_event_type IS DISTINCT FROM 'Client'
    FROM pg_stat_activity AS a
    WHERE a.usename = session_user AND a.backend_type = 'client backend'
"""
# The backend of a lost connection would hold its locks until the server detects the loss. A later
# backend with the same process id is younger than our connection: do not terminate it.
_TERMINATE: Final = """
    SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a
    WHERE a.pid = %s AND a.usename = session_user
      AND a.backend_start < clock_timestamp() - make_interval(secs => %s)
"""


def register() -> None:
    """Watch all new connections of Django. Called once, when the app is ready."""
    connection_created.connect(_replace_wait, dispatch_uid="psqlmessages.silent_connections")


def count_closed() -> int:
    """Return how many connections this process has closed because of lost answers."""
    return _counts["closed"]


def _replace_wait(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """Replace the method ``wait`` of a new connection by a function that detects lost answers."""
    raw_connection = connection.connection
    # If ``wait`` is already replaced, a pool has returned a used connection.
    if not isinstance(raw_connection, psycopg.Connection) or "wait" in vars(raw_connection):
        return
    try:
        seconds = get_settings().ANSWER_SECONDS
    except ImproperlyConfigured:
        # The system checks report the error; connections should still work.
        seconds = Settings.ANSWER_SECONDS
    info = raw_connection.info
    # A Unix socket loses no packets.
    if not seconds or not info.host or info.host.startswith(("/", "@")):
        return
    # If the address has several hosts, ask the host that this connection uses.
    host = {
        "host": info.host,
        "hostaddr": info.hostaddr or None,
        "port": info.port,
        "connect_timeout": _ASK_TIMEOUT.seconds,
    }
    address = make_conninfo(**conninfo_to_dict(connection_dsn(connection)) | host)
    monitor = _monitors.setdefault(address, BackendMonitor(address))
    reference, connected_at = weakref.ref(raw_connection), monotonic()

    def wait(generator: PQGen[T], *args: Any, **kwargs: Any) -> T:
        waiting = reference()
        assert waiting is not None  # noqa: S101 - the caller has a reference
        silence = SilentWait(waiting.pgconn, connected_at, monitor, seconds)
        # The connection's class may have overridden ``wait``.
        return type(waiting).wait(waiting, with_check(generator, silence.check), *args, **kwargs)

    # There is no other hook, because Django chooses the class of the connection.
    vars(raw_connection)["wait"] = wait


class SilentWait:
    """One wait for an answer. If no data arrives for ``seconds``, it asks the server."""

    def __init__(
        self, pgconn: PGconn, connected_at: float, monitor: BackendMonitor, seconds: float
    ) -> None:
        self._pgconn = pgconn
        self._connected_at = connected_at
        self._monitor = monitor
        self._seconds = seconds
        self._silent_since = monotonic()
        self._ask_at = self._silent_since + seconds
        self._last_snapshot: BackendSnapshot | None = None
        self._lost_snapshots = 0

    def check(self, ready: object) -> None:
        """Check whether the answer is lost; if so, close the connection and raise AnswerTimeout."""
        now = monotonic()
        if ready:
            self._silent_since, self._lost_snapshots = now, 0
            self._ask_at = now + self._seconds
            return
        # A connection that waits for notifications expects no answer.
        if now <= self._ask_at or self._pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        snapshot = self._monitor.snapshot()
        # Ignore a snapshot of another thread that is too old, and one that was counted already.
        if snapshot.at - self._silent_since <= self._seconds or snapshot is self._last_snapshot:
            return
        self._last_snapshot = snapshot
        if snapshot.is_lost(self._pgconn.backend_pid, self._seconds):
            self._lost_snapshots += 1
            if self._lost_snapshots == _LOST_SNAPSHOTS:
                self._close(snapshot)
            return
        self._lost_snapshots = 0
        if snapshot.silent_since is None:
            # The backend works on a slow query. Do not ask every second.
            self._ask_at = monotonic() + self._seconds

    def _close(self, snapshot: BackendSnapshot) -> None:
        pid = self._pgconn.backend_pid
        self._pgconn.finish()
        _counts["closed"] += 1
        self._monitor.terminate(pid, snapshot, monotonic() - self._connected_at)
        text = (
            f"no answer within {monotonic() - self._silent_since:.0f} s, and PostgreSQL is not"
            " working on the query or is unreachable: the connection was closed. The query may have"
            " been executed"
        )
        logger.warning("lost connection to PostgreSQL: %s", text)
        raise AnswerTimeout(text)


@dataclass(frozen=True, slots=True, eq=False)
class BackendSnapshot:
    """The state of a server at one time: which backends of our role work on a query.

    ``working``: for each pid, whether the backend works, or None if unknown. The dictionary itself
    is None if the backends are unknown. ``silent_since``: the server has not answered since then.
    """

    at: float
    working: dict[int, bool | None] | None = None
    silent_since: float | None = None

    def is_lost(self, pid: int, seconds: float) -> bool:
        """Return whether the backend is idle, or the server has been silent for ``seconds``."""
        if self.silent_since is not None:
            return self.at - self.silent_since > seconds
        # A backend whose state is unknown may be working.
        return self.working is not None and self.working.get(pid, False) is False


@dataclass(slots=True, weakref_slot=True, eq=False)
class BackendMonitor:
    """Asks one server about the backends of our role, for all waiting threads of the process."""

    address: str
    _latest: BackendSnapshot = field(default_factory=lambda: BackendSnapshot(0.0))
    _asked_at: float = 0.0
    _ask_lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self) -> BackendSnapshot:
        """Ask the server, unless a thread asks or has just asked; return the latest snapshot."""
        if self._ask_lock.acquire(blocking=False):
            try:
                if monotonic() - self._asked_at >= _ASK_INTERVAL_SECONDS:
                    self._latest = self._query_backends()
                    self._asked_at = monotonic()
            finally:
                self._ask_lock.release()
        return self._latest

    def _query_backends(self) -> BackendSnapshot:
        began = monotonic()
        try:
            rows, pid = self._run(_BACKENDS)
        except (psycopg.errors.ConnectionTimeout, AnswerTimeout):
            # The silence continues only if the server was also asked shortly before.
            was_asked_recently = began - self._asked_at < _ASK_TIMEOUT.total_seconds()
            since = self._latest.silent_since if was_asked_recently else None
            return BackendSnapshot(began, silent_since=began if since is None else since)
        except psycopg.Error:
            # For instance, the server is starting, or has no free connections.
            return BackendSnapshot(began)
        # Behind a pooler, clients know only process ids that the pooler invents.
        is_direct = bool(rows) and rows[0][0] == pid
        return BackendSnapshot(began, {row[1]: row[2] for row in rows} if is_direct else None)

    def terminate(self, pid: int, snapshot: BackendSnapshot, age: float) -> None:
        """Terminate the backend of a lost connection, which is ``age`` seconds old; log errors."""
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


# Monitors by address. The references are weak: a monitor exists as long as a connection uses it.
_monitors: Final[weakref.WeakValueDictionary[str, BackendMonitor]] = weakref.WeakValueDictionary()
