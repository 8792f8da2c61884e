"""What the doctor looks at in the notification queue: how full, who holds it back, who waits."""

from __future__ import annotations

from collections.abc import Iterator

from psqlmessages.commands.doctor_findings import Finding, Patient, State

QUEUE_LIMIT = 0.1
HELD_SECONDS = 10.0
LOCK_SECONDS = 1.0
SHOWN_HOLDERS = 5

# The monitor asks these too.
USAGE = "SELECT pg_notification_queue_usage()"

# A backend takes its notifications between two transactions, once its client has read the last.
# Those with a node hold a lock of class 1886612839; of others nobody can see whether they listen.
HOLDERS = """
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
      AND (%s OR n.has_node)
    ORDER BY n.has_node DESC, a.xact_start NULLS LAST
    LIMIT %s
"""
COMMIT_LOCK = """
    SELECT count(*) FILTER (WHERE NOT l.granted),
        coalesce(max(extract(epoch FROM clock_timestamp() - l.waitstart)), 0)::float8,
        min(l.pid) FILTER (WHERE l.granted)
    FROM pg_locks AS l
    WHERE l.locktype = 'object' AND l.database = 0 AND l.classid = 1262 AND l.objid = 0
      AND l.mode = 'AccessExclusiveLock'
"""

# Of those whose age is not shown, only the ones that others wait for.
OPEN_TRANSACTIONS = """
    SELECT o.pid, o.transaction, quote_literal(o.prepared), quote_ident(o.role), o.program,
        extract(epoch FROM clock_timestamp() - o.began_at)::float8, o.waiting
    FROM messages._open_transactions() AS o
    WHERE o.began_at < clock_timestamp() - make_interval(secs => %s)
        OR o.began_at IS NULL AND o.waiting > 0
"""


def queue(patient: Patient) -> Iterator[Finding]:
    """Tell how full the notification queue is, and which backends hold it back."""
    usage = float(patient.value(USAGE))
    is_full = usage >= QUEUE_LIMIT
    holders = patient.rows(HOLDERS, HELD_SECONDS, is_full, SHOWN_HOLDERS)
    found = f"{usage:.4%} full"
    if not is_full and not holders:
        yield Finding("queue", State.OK, found)
        return
    if not holders:
        role = patient.value("SELECT quote_ident(session_user)")
        yield Finding(
            "queue",
            State.WRONG,
            f"{found}; role {role} does not see who holds it back",
            "once it is full, every NOTIFY and every send fails",
            f"GRANT pg_read_all_stats TO {role}; and run the doctor again",
        )
    for has_node, pid, role, program, state, wait, seconds in holders:
        surely = "" if has_node else "perhaps "
        how = "does not read what is sent to it" if wait == "ClientWrite" else f"is {state}"
        yield Finding(
            "queue",
            State.WRONG,
            f"{found}; {surely}held back by pid {pid} ({role}, {program or 'no name'}),"
            f" which for {seconds:.0f} s {how}",
            "it hears nothing, and the server keeps what all send until it does;"
            " once the queue is full, every NOTIFY and every send fails",
            f"SELECT pg_terminate_backend({pid}); to prevent it:"
            f" ALTER ROLE {role} SET idle_in_transaction_session_timeout = '60s'",
        )


def commit_lock(patient: Patient) -> Iterator[Finding]:
    """See whether commits that notify wait for one that does not come to its end."""
    waiting, seconds, holder = patient.rows(COMMIT_LOCK)[0]
    if not waiting or seconds < LOCK_SECONDS:
        yield Finding("commit lock", State.OK, f"{waiting} waiting")
        return
    event = patient.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", holder)
    yield Finding(
        "commit lock",
        State.WRONG,
        f"{waiting} commits wait, the longest for {seconds:.0f} s, for pid {holder}"
        f" (which waits for {event or 'nothing that can be seen'})",
        "transactions that notify commit one after the other: one that hangs stops all senders",
        f"SELECT pg_cancel_backend({holder}); where it waits for SyncRep, see to the standby that"
        " synchronous_standby_names names",
    )


def open_transactions(patient: Patient) -> Iterator[Finding]:
    """Report transactions that have long held locks of ours, or that others wait for."""
    is_found = False
    for pid, transaction, prepared, role, program, seconds, waiting in patient.rows(
        OPEN_TRANSACTIONS, HELD_SECONDS
    ):
        is_found = True
        how_long = "for a time not shown" if seconds is None else f"for {seconds:.0f} s"
        who = f"pid {pid} ({role}, {program or 'no name'})"
        mend = f"SELECT messages._terminate({pid}, '{transaction}')"
        if prepared is not None:
            who = f"the prepared transaction {prepared} of {role}"
            mend = f"ROLLBACK PREPARED {prepared}"
        yield Finding(
            "open transactions",
            State.WRONG,
            f"{who} has been in a transaction {how_long}; sessions that wait for it: {waiting}",
            "sessions that join or leave the same topics wait for it, and nodes that lost a rule"
            " get the event late; their rights have ended all the same",
            mend,
        )
    if not is_found:
        yield Finding(
            "open transactions",
            State.OK,
            f"none over {HELD_SECONDS:.0f} s, none that others wait for",
        )
