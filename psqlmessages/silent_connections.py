"""Silent connections: closes Django's connections if a firewall has dropped them without an error.

psycopg would wait forever, as packets of such a connection are dropped. A query may also be slow,
so silence alone proves nothing. After ANSWER_SECONDS of silence, a new connection asks the server
whether it still works on the query. For the reasons see
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
# The answer is lost only if the server says so three times in a row: at the first, an answer may be
# on its way, and a load balancer may send one of the questions to another server.
_LOST_IN_A_ROW: Final = 3
# A backend is not working if it waits for its client while we wait for it. If track_activities is
# off, the state is 'disabled', but wait_event_type is still available.
_BACKENDS: Final = """
    SELECT pg_backend_pid(), a.pid,
        a.state NOT LIKE 'idle%%'
            AND a.wait_event_type IS DISTINCT FROM 'Client'
    FROM pg_stat_activity AS a
    WHERE a.usename = session_user AND a.backend_type = 'client backend'
"""
# Otherwise the lost backend would hold its locks until the server notices. If another backend has
# got the same process id in the meantime, it is younger than our connection.
_END: Final = """
    SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a
    WHERE a.pid = %s AND a.usename = session_user
      AND a.backend_start < clock_timestamp() - make_interval(secs => %s)
"""


def register() -> None:
    """Check all new connections of Django from now on; called once, when the app is ready."""
    connection_created.connect(_replace_wait, dispatch_uid="psqlmessages.silent_connections")


def closed() -> int:
    """Return how many connections this process has closed because their answers were lost."""
    return _counts["closed"]


def _replace_wait(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """Replace ``wait`` of a new connection by one that detects lost answers."""
    own = connection.connection
    # A pool returns the same connection many times.
    if not isinstance(own, psycopg.Connection) or "wait" in vars(own):
        return
    try:
        seconds = get_settings().ANSWER_SECONDS
    except ImproperlyConfigured:
        # The system checks report the error; connections must work nevertheless.
        seconds = Settings.ANSWER_SECONDS
    info = own.info
    # A Unix socket loses no packets.
    if not seconds or not info.host or info.host.startswith(("/", "@")):
        return
    # If the address has several hosts, ask the one that this connection uses.
    place = {
        "host": info.host,
        "hostaddr": info.hostaddr or None,
        "port": info.port,
        "connect_timeout": _ASK_TIMEOUT.seconds,
    }
    address = make_conninfo(**conninfo_to_dict(address_of(connection)) | place)
    server = _servers.setdefault(address, BackendMonitor(address))
    reference, began = weakref.ref(own), monotonic()

    def wait(generator: PQGen[T], *args: Any, **kwargs: Any) -> T:
        this = reference()
        assert this is not None  # noqa: S101 - the caller has a reference
        silence = SilentWait(this.pgconn, began, server, seconds)
        # The method of the connection's class, which may override wait().
        return type(this).wait(this, _checked_for_loss(generator, silence), *args, **kwargs)

    # psycopg and Django have no other hook: Django chooses the class of the connection.
    vars(own)["wait"] = wait


def _checked_for_loss(generator: PQGen[T], silence: SilentWait) -> Generator[Any, Any, T]:
    """Run a generator of psycopg's protocol, and check for a lost answer during silence."""
    try:
        wanted = next(generator)
        while True:
            # psycopg resumes its generators at least ten times a second, with 0 for "not yet".
            ready = yield wanted
            silence.resumed(is_ready=bool(ready))
            wanted = generator.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


class SilentWait:
    """One wait of a connection: the start of the silence, and the server's answers about it."""

    def __init__(
        self, pgconn: PGconn, connected_at: float, server: BackendMonitor, seconds: float
    ) -> None:
        self._pgconn = pgconn
        self._connected_at = connected_at
        self._server = server
        self._seconds = seconds
        self._began = monotonic()
        self._ask_at = self._began + seconds
        self._seen: BackendSnapshot | None = None
        self._lost_in_a_row = 0

    def resumed(self, *, is_ready: bool) -> None:
        """Close the connection and raise AnswerTimeout if the answer is known to be lost."""
        now = monotonic()
        if is_ready:
            self._began, self._lost_in_a_row = now, 0
            self._ask_at = now + self._seconds
            return
        # A connection that waits for notifications expects no answer.
        if now <= self._ask_at or self._pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        snapshot = self._server.snapshot()
        # A snapshot taken for another thread may be older than this silence.
        if snapshot.at - self._began <= self._seconds or snapshot is self._seen:
            return
        self._seen = snapshot
        if snapshot.is_lost(self._pgconn.backend_pid, self._seconds):
            self._lost_in_a_row += 1
            if self._lost_in_a_row == _LOST_IN_A_ROW:
                self._close(snapshot)
            return
        self._lost_in_a_row = 0
        if snapshot.silent_since is None:
            # A slow query: asking every second would cost the server a connection each time.
            self._ask_at = monotonic() + self._seconds

    def _close(self, snapshot: BackendSnapshot) -> None:
        pid = self._pgconn.backend_pid
        self._pgconn.finish()
        _counts["closed"] += 1
        self._server.end(pid, snapshot, monotonic() - self._connected_at)
        text = (
            f"no answer within {monotonic() - self._began:.0f} s, and PostgreSQL is not working on"
            " the query or is unreachable: the connection was closed. The query may have been"
            " executed"
        )
        logger.warning("lost connection to PostgreSQL: %s", text)
        raise AnswerTimeout(text)


@dataclass(frozen=True, slots=True, eq=False)
class BackendSnapshot:
    """A server's answer at one time: whether each of our backends works on a query.

    ``working`` is None if that is unknown. ``silent_since``: no answer of the server since then.
    """

    at: float
    working: dict[int, bool | None] | None = None
    silent_since: float | None = None

    def is_lost(self, pid: int, seconds: float) -> bool:
        """Return whether no answer will come from a backend."""
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
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self) -> BackendSnapshot:
        """Ask, unless another thread is asking or has just asked; return the latest answer."""
        if self._asking.acquire(blocking=False):
            try:
                if monotonic() - self._asked_at >= _ASK_INTERVAL_SECONDS:
                    self._latest = self._ask(self._latest)
                    self._asked_at = monotonic()
            finally:
                self._asking.release()
        return self._latest

    def _ask(self, former: BackendSnapshot) -> BackendSnapshot:
        began = monotonic()
        try:
            rows, pid = self._run(_BACKENDS)
        except (psycopg.errors.ConnectionTimeout, AnswerTimeout):
            # An old silence proves nothing about the present unless we have asked since.
            is_followed = began - self._asked_at < _ASK_TIMEOUT.total_seconds()
            return BackendSnapshot(
                began, silent_since=(is_followed and former.silent_since) or began
            )
        except psycopg.Error:
            # The server refuses connections because it is starting or full: the state is unknown.
            return BackendSnapshot(began)
        # Behind a pooler, clients only know the pooler's process ids.
        is_direct = bool(rows) and rows[0][0] == pid
        return BackendSnapshot(began, {row[1]: row[2] for row in rows} if is_direct else None)

    def end(self, pid: int, snapshot: BackendSnapshot, age: float) -> None:
        """Terminate a backend whose client has gone, if the server is reachable.

        ``age``: of its connection, in seconds.
        """
        if snapshot.working is None or pid not in snapshot.working:
            return
        try:
            self._run(_END, (pid, age))
        except psycopg.Error as error:
            logger.warning("could not terminate backend %d of a lost connection: %s", pid, error)

    def _run(self, query: str, values: tuple[Any, ...] = ()) -> tuple[list[Any], int]:
        connection = connect(self.address, _ASK_TIMEOUT, "lost answers")
        try:
            return connection.execute(query, values).fetchall(), connection.info.backend_pid
        finally:
            # Not `close`, which may hang too.
            connection.pgconn.finish()


# Weak, so that an address goes with its last connection: changing passwords make new addresses.
_servers: Final[weakref.WeakValueDictionary[str, BackendMonitor]] = weakref.WeakValueDictionary()
