"""Checks of doctor: notification queue, locks, server, installation, connection."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from time import monotonic
from typing import Any

import psycopg
from psycopg import sql

from psqlmessages.client.calls import NOT_INSTALLED
from psqlmessages.client.connect import PoolerKind, connect, detect_pooler
from psqlmessages.client.connection import Connection
from psqlmessages.sql import MIGRATIONS, MIN_VERSION, digest

MIGRATE = "python manage.py migrate psqlmessages"
INSTALL = "python manage.py psqlmessages install"


class FindingState(StrEnum):
    """State of a finding. UNKNOWN: the check could not run."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found and, if this is a problem, why it matters and how to fix it."""

    state: FindingState
    found: str
    why: str = ""
    fix: str = ""
    check: str = ""


def ok(found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(FindingState.OK, found)


def wrong(found: str, why: str, fix: str) -> Finding:
    """Return a finding with a problem."""
    return Finding(FindingState.WRONG, found, why, fix)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """The database to check, a connection to it, and the names in the fix for missing rules."""

    dsn: str
    connection: Connection
    node: str = "NODE"
    topic: str = "TOPIC"

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a query in its own transaction; return its rows."""
        return self.connection.execute(query, values or None).fetchall()

    def value(self, query: str, *values: Any) -> Any:
        """Return the first column of the first row; None if there is no row."""
        rows = self.rows(query, *values)
        return rows[0][0] if rows else None


def why_denied(fix: str) -> str:
    """Return why a missing rule is a problem, and which words in the fix are placeholders."""
    names = [name for name in ("CALLER", "NODE", "TOPIC") if re.search(rf"\b{name}\b", fix)]
    why = "everything is denied unless a rule allows it"
    if not names:
        return why
    verb = "stand for your names" if len(names) > 1 else "stands for your name"
    return f"{why}; {' and '.join(names)} {verb}"


# The name of a check is the name of its function, with spaces.
Check = Callable[[CheckContext], Iterator[Finding]]


def run_check(check: Check, context: CheckContext) -> Iterator[Finding]:
    """Run a check; yield UNKNOWN if privileges, functions, tables or columns are missing."""
    name = check.__name__.replace("_", " ")
    try:
        for finding in check(context):
            yield replace(finding, check=name)
    except psycopg.errors.InsufficientPrivilege:
        found = f"role {context.connection.info.user} lacks the privileges for this check"
        why = "only the owner of the tables can run it"
        fix = "run doctor as the owner of the tables"
        yield Finding(FindingState.UNKNOWN, found, why, fix, name)
    except (*NOT_INSTALLED, psycopg.errors.UndefinedColumn):
        why = "the check needs the functions and tables of psqlmessages"
        yield Finding(FindingState.UNKNOWN, "not installed", why, MIGRATE, name)


MAX_QUEUE_USAGE = 0.1
MIN_OPEN_SECONDS = 10.0
MIN_LOCK_SECONDS = 1.0
MAX_HOLDERS = 5

# The monitor runs these queries too.
QUEUE_USAGE_QUERY = "SELECT pg_notification_queue_usage()"

# The usage of the queue, with one row for each backend that holds the queue back. Without such a
# backend, one row has the usage and nulls. A backend holds the queue back while it does not read
# notifications: during a transaction, or until its client has read the previous notifications.
# Backends with a node have an advisory lock of class 1886612839. PostgreSQL does not show whether
# other backends listen, so the query returns them only if the usage has reached a limit.
HOLDERS_QUERY = """
    SELECT u.usage, h.* FROM (SELECT pg_notification_queue_usage() AS usage) AS u
    LEFT JOIN LATERAL (
        SELECT n.has_node, a.pid, quote_ident(a.usename), a.application_name, a.state, a.wait_event,
            extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.state_change))::float8
        FROM pg_stat_activity AS a
        CROSS JOIN LATERAL (
            SELECT EXISTS (
                SELECT FROM pg_locks AS l
                WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.classid = 1886612839
                  AND l.objsubid = 2
            ) AS has_node
        ) AS n
        WHERE a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
          AND (a.xact_start < clock_timestamp() - make_interval(secs => %s)
              OR a.wait_event = 'ClientWrite')
          AND (u.usage >= %s OR n.has_node)
        ORDER BY n.has_node DESC, a.xact_start NULLS LAST
        LIMIT %s
    ) AS h ON true
"""
# Our role, and whether it sees the transactions of all roles.
_ROLE_QUERY = """
    SELECT quote_ident(session_user), pg_has_role(session_user, 'pg_read_all_stats', 'USAGE')
"""
# Commits with notifications take a lock that is common to all databases. The row has the number of
# commits that wait for this lock, the longest wait in seconds, and the pid that has the lock.
COMMIT_LOCK_QUERY = """
    SELECT count(*) FILTER (WHERE NOT l.granted),
        coalesce(max(extract(epoch FROM clock_timestamp() - l.waitstart)), 0)::float8,
        min(l.pid) FILTER (WHERE l.granted)
    FROM pg_locks AS l
    WHERE l.locktype = 'object' AND l.database = 0 AND l.classid = 1262 AND l.objid = 0
      AND l.mode = 'AccessExclusiveLock'
"""

# Transactions that are older than a limit, or of unknown age while other sessions wait for them.
OPEN_TRANSACTIONS_QUERY = """
    SELECT o.pid, o.transaction, quote_literal(o.prepared), quote_ident(o.role), o.program,
        extract(epoch FROM clock_timestamp() - o.began_at)::float8, o.waiting
    FROM messages._open_transactions() AS o
    WHERE o.began_at < clock_timestamp() - make_interval(secs => %s)
        OR o.began_at IS NULL AND o.waiting > 0
"""


def notification_queue(context: CheckContext) -> Iterator[Finding]:
    """Check how full the notification queue is, and which backends hold it back."""
    rows = context.rows(HOLDERS_QUERY, MIN_OPEN_SECONDS, MAX_QUEUE_USAGE, MAX_HOLDERS)
    usage, holders = rows[0][0], [holder for _, *holder in rows if holder[0] is not None]
    found = f"{usage:.4%} full"
    if usage < MAX_QUEUE_USAGE and not holders:
        yield ok(found)
        return
    if not holders:
        role, sees_all = context.rows(_ROLE_QUERY)[0]
        if sees_all:
            found += f"; no backend has held it back for over {MIN_OPEN_SECONDS:.0f} s"
            fix = "psqlmessages doctor  # again, to see whether the usage grows"
        else:
            found += f"; role {role} cannot see which backends hold it back"
            fix = f"GRANT pg_read_all_stats TO {role}; -- then run doctor again"
        yield wrong(found, "once the queue is full, every NOTIFY and every send fails", fix)
    for holder in holders:
        yield holder_finding(usage, *holder)


def holder_finding(
    usage: float,
    has_node: bool,
    pid: int,
    role: str,
    program: str,
    state: str,
    wait_event: str | None,
    seconds: float,
) -> Finding:
    """Return the finding for a backend that holds the notification queue back."""
    perhaps = "" if has_node else "perhaps "
    problem = "not read its notifications" if wait_event == "ClientWrite" else f"been {state}"
    fix = f"SELECT pg_terminate_backend({pid})"
    if state.startswith("idle in transaction"):
        timeout = f"ALTER ROLE {role} SET idle_in_transaction_session_timeout = '60s'"
        fix = f"{fix}; -- to prevent it: {timeout}"
    return wrong(
        f"{usage:.4%} full; {perhaps}held back by pid {pid} ({role}, {program or 'no name'}),"
        f" which has {problem} for {seconds:.0f} s",
        "until this program reads its notifications, the server stores all notifications;"
        " once the queue is full, every NOTIFY and every send fails",
        fix,
    )


def commit_lock(context: CheckContext) -> Iterator[Finding]:
    """Check whether commits with notifications wait for another commit."""
    waiting, seconds, holder = context.rows(COMMIT_LOCK_QUERY)[0]
    if not waiting or seconds < MIN_LOCK_SECONDS:
        yield ok(f"{waiting} waiting")
        return
    event = context.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", holder)
    yield commit_lock_finding(waiting, seconds, holder, event)


def commit_lock_finding(waiting: int, seconds: float, holder: int, event: str | None) -> Finding:
    """Return the finding for a commit that blocks others; ``event`` is its wait event."""
    return wrong(
        f"{waiting} commits wait, the longest for {seconds:.0f} s, for pid {holder}"
        f" (which waits for {event or 'nothing visible'})",
        "transactions with notifications commit one at a time, so this commit blocks all senders",
        f"SELECT pg_cancel_backend({holder}); -- if it waits for SyncRep, check the standby that"
        " synchronous_standby_names names",
    )


def open_transactions(context: CheckContext) -> Iterator[Finding]:
    """Check for old transactions with locks on our tables."""
    rows = context.rows(OPEN_TRANSACTIONS_QUERY, MIN_OPEN_SECONDS)
    for row in rows:
        yield transaction_finding(*row)
    if not rows:
        yield ok(
            f"none is older than {MIN_OPEN_SECONDS:.0f} s, and none of unknown age blocks sessions"
        )


def transaction_finding(
    pid: int | None,
    transaction: str,
    prepared: str | None,
    role: str,
    program: str | None,
    seconds: float | None,
    waiting: int,
) -> Finding:
    """Return the finding for an old transaction; ``seconds`` is None if its age is unknown."""
    duration = "for an unknown time" if seconds is None else f"for {seconds:.0f} s"
    holder = f"pid {pid} ({role}, {program or 'no name'})"
    fix = f"SELECT messages._terminate({pid}, '{transaction}')"
    if prepared is not None:
        holder = f"the prepared transaction {prepared} of {role}"
        fix = f"ROLLBACK PREPARED {prepared}"
    return wrong(
        f"{holder} has been in a transaction {duration}; sessions that wait for it: {waiting}",
        "sessions that start or stop using the same topics wait for this transaction; nodes that"
        " lose a rule lose the permission immediately, but receive the event later",
        fix,
    )


MAX_CLOCK_DIFFERENCE_SECONDS = 5.0
NOTIFICATION_TIMEOUT_SECONDS = 3.0


def server(context: CheckContext) -> Iterator[Finding]:
    """Check whether the server is PostgreSQL in a supported version."""
    name = " ".join(str(context.value("SELECT version()")).split()[:2])
    version = int(context.value("SELECT current_setting('server_version_num')"))
    if name.startswith("PostgreSQL") and version >= MIN_VERSION * 10_000:
        yield ok(name)
        return
    yield wrong(
        name,
        f"the functions need PostgreSQL {MIN_VERSION} or newer",
        f"upgrade the server: pg_upgrade to PostgreSQL {MIN_VERSION} or newer",
    )


def installed(context: CheckContext) -> Iterator[Finding]:
    """Compare the digest of the installed functions with the digest of this package."""
    comment = context.value("SELECT obj_description(to_regnamespace('messages'), 'pg_namespace')")
    installed_digest = str(comment or "").removeprefix("psqlmessages ")
    if installed_digest == digest():
        yield ok(f"the functions of this version ({installed_digest})")
        return
    is_migrated = not _has_unapplied_migrations(context)
    fix = INSTALL if is_migrated else MIGRATE
    if not installed_digest:
        remark = ", although Django's migrations are recorded as applied" if is_migrated else ""
        yield wrong(
            f"the schema messages does not exist{remark}",
            "nothing can be sent or received in this database",
            fix,
        )
        return
    yield wrong(
        f"functions of another version: {installed_digest}, this package has {digest()}",
        "calls may fail, or behave differently from the documentation of this version",
        f"{fix}  # or use the version of psqlmessages that the database has",
    )


def _has_unapplied_migrations(context: CheckContext) -> bool:
    if context.value("SELECT to_regclass('django_migrations')") is None:
        return True
    applied = context.rows("SELECT name FROM django_migrations WHERE app = 'psqlmessages'")
    existing = {path.stem for path in MIGRATIONS.glob("[0-9]*.py")}
    return not existing <= {name for (name,) in applied}


def clock(context: CheckContext) -> Iterator[Finding]:
    """Compare the server's clock with the clock of this machine."""
    sent_at, began = datetime.now(UTC), monotonic()
    difference = context.value("SELECT extract(epoch FROM clock_timestamp() - %s)", sent_at)
    # The server most likely read its clock halfway between the query and the answer.
    seconds = float(difference) - (monotonic() - began) / 2
    if abs(seconds) < MAX_CLOCK_DIFFERENCE_SECONDS:
        yield ok(f"the server's clock differs by {seconds:+.3f} s")
        return
    word = "ahead of" if seconds > 0 else "behind"
    yield wrong(
        f"the server's clock is {abs(seconds):.0f} s {word} that of this machine",
        "bodies expire by the server's clock, and times in logs of the two machines do not agree",
        "timedatectl set-ntp true  # on the machine whose clock is wrong",
    )


_CONNECT_DIRECTLY = (
    "connect nodes to PostgreSQL itself (in Django: by an alias 'direct' in DATABASES),"
    " or set pool_mode = session in pgbouncer.ini"
)


def listening(context: CheckContext) -> Iterator[Finding]:
    """Send a notification to another connection, and check whether it arrives."""
    channel = f"doctor_{secrets.token_hex(8)}"
    with connect(context.dsn) as listener, connect(context.dsn) as sender:
        listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        sent_at = monotonic()
        sender.execute("SELECT pg_notify(%s, '')", (channel,))
        arrived = list(listener.notifies(timeout=NOTIFICATION_TIMEOUT_SECONDS, stop_after=1))
        seconds = monotonic() - sent_at
        listener.execute("UNLISTEN *")
    if arrived:
        yield ok(f"a notification arrived after {seconds * 1000:.1f} ms")
        return
    yield wrong(
        f"a notification did not arrive within {NOTIFICATION_TIMEOUT_SECONDS:g} s",
        "nodes on this connection receive nothing",
        _CONNECT_DIRECTLY,
    )


def pooler(context: CheckContext) -> Iterator[Finding]:
    """Check whether a pooler shares backends between clients."""
    kind = detect_pooler(context.dsn)
    if kind is PoolerKind.NONE:
        yield ok("none")
    elif kind is PoolerKind.SESSION:
        yield ok("a pooler that gives each client its own session")
    else:
        yield wrong(
            f"a pooler that shares connections by {kind.value}",
            "a node needs its own connection, or else it loses its registration and its messages"
            " (calls without a node work: topic_send_as, and send in Django)",
            _CONNECT_DIRECTLY,
        )
