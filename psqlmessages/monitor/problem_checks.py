"""Checks of the running system: each finds one kind of problem in rows of its query. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.utils.timezone import localtime
from django.utils.translation import gettext, ngettext

from psqlmessages.cli.doctor_checks import (
    COMMIT_LOCK_QUERY,
    HOLDERS_QUERY,
    MAX_HOLDERS,
    MIN_LOCK_SECONDS,
    OPEN_TRANSACTIONS_QUERY,
    commit_lock_finding,
    holder_finding,
    transaction_finding,
)
from psqlmessages.exchanges.store.stats import WORKER_TIMEOUT_SECONDS
from psqlmessages.monitor.access import ADD_RULES_OF_EXCHANGE, START_EXCHANGE
from psqlmessages.monitor.formats import (
    MAX_COUNTED,
    allow_command,
    exchange_command,
    format_age,
    format_count,
)
from psqlmessages.monitor.names import find_url
from psqlmessages.monitor.problems import Describe, Link, Problem, ProblemCheck, Rows, Severity
from psqlmessages.monitor.queries import CALLER_ROLE, OLDEST_UNREAD, UNREAD_COUNT

if TYPE_CHECKING:
    from psqlmessages.conf import Settings

# A check lists at most this number of problems; that of subscriptions this number of each state.
MAX_PER_CHECK: Final = 20

CHECKS: Final[list[ProblemCheck]] = []


def _check(
    name: str, query: str, values: Callable[[Settings], Sequence[Any]] = lambda _settings: ()
) -> Callable[[Describe], Describe]:
    """Add a check, whose rows the decorated function describes; see ProblemCheck."""

    def add(describe: Describe) -> Describe:
        CHECKS.append(ProblemCheck(name, query, describe, values))
        return describe

    return add


# Queues

_AVAILABLE_COUNT: Final = f"""(
    SELECT count(*) FROM (
        SELECT FROM psqlmessages_element AS e
        WHERE e.queue_id = q.id AND e.available_at <= statement_timestamp()
        LIMIT {MAX_COUNTED + 1}
    ) AS available
)"""  # noqa: S608 - built from constants
_OLDEST_AVAILABLE: Final = """
    CROSS JOIN LATERAL (
        SELECT e.available_at FROM psqlmessages_element AS e
        WHERE e.queue_id = q.id AND e.available_at <= statement_timestamp()
        ORDER BY e.available_at LIMIT 1
    ) AS oldest (at)
"""
_IS_DEAD_LETTER_QUEUE: Final = """(
    q.name IN ('__no_route__', '__too_many_hops__')
    OR q.name IN (SELECT d.dead_letter_queue FROM psqlmessages_queue AS d)
)"""

_DEAD_LETTERS_QUERY: Final = f"""
    SELECT found.name, found.number, found.at FROM (
        SELECT q.name, {_AVAILABLE_COUNT} AS number, oldest.at
        FROM psqlmessages_queue AS q {_OLDEST_AVAILABLE} WHERE {_IS_DEAD_LETTER_QUEUE}
    ) AS found
    WHERE found.number >= %s ORDER BY found.number DESC, found.name LIMIT {MAX_PER_CHECK}
"""  # noqa: S608


@_check("dead_letters", _DEAD_LETTERS_QUERY, lambda settings: [settings.PROBLEM_DEAD_LETTERS])
def _dead_letters(rows: Rows, _now: datetime, _settings: Settings) -> Iterator[Problem]:
    for queue, number, since in rows:
        cure = gettext("Correct the selectors of the exchanges, then redrive the elements.")
        if queue == "__no_route__":
            text = ngettext(
                "{number} element found no route: see “{queue}”.",
                "{number} elements found no route: see “{queue}”.",
                number,
            )
        elif queue == "__too_many_hops__":
            text = ngettext(
                "{number} element passed too many exchanges: see “{queue}”.",
                "{number} elements passed too many exchanges: see “{queue}”.",
                number,
            )
        else:
            text = ngettext(
                "{number} dead letter in “{queue}”.", "{number} dead letters in “{queue}”.", number
            )
            cure = gettext(
                "Find and correct the cause of the failures, then redrive or delete the dead"
                " letters."
            )
        sentence = text.format(number=format_count(number), queue=queue)
        yield Problem(queue, Severity.ERROR, sentence, Link("queue", queue), cure, since)


# A consumer that waits for elements renews awaited_until. A consumer at work has leases. The last
# three columns are those of an exchange that reads the queue.
_WAITING_QUERY: Final = f"""
    SELECT q.name, oldest.at, q.awaited_until > statement_timestamp() OR EXISTS (
        SELECT FROM psqlmessages_element AS e
        WHERE e.queue_id = q.id AND e.lease IS NOT NULL AND e.available_at > statement_timestamp()
    ), x.name, x.is_running, x.id
    FROM psqlmessages_queue AS q {_OLDEST_AVAILABLE}
    LEFT JOIN LATERAL (
        SELECT x.name, x.is_running, x.id FROM psqlmessages_exchange AS x
        WHERE x.source_namespace = %s AND x.source_queue = q.name
        ORDER BY x.is_running DESC, x.name LIMIT 1
    ) AS x ON true
    WHERE NOT q.is_paused AND oldest.at < statement_timestamp() - make_interval(secs => %s)
        AND NOT {_IS_DEAD_LETTER_QUEUE}
    ORDER BY oldest.at, q.name LIMIT {MAX_PER_CHECK}
"""  # noqa: S608


@_check(
    "waiting",
    _WAITING_QUERY,
    lambda settings: [settings.DATABASE, settings.PROBLEM_WAIT_SECONDS],
)
def _waiting_elements(rows: Rows, now: datetime, _settings: Settings) -> Iterator[Problem]:
    for queue, since, has_consumer, exchange, is_running, key in rows:
        severity = Severity.WARNING if has_consumer else Severity.ERROR
        link = Link("queue", queue)
        permissions: Sequence[str] = ()
        if has_consumer:
            text = gettext(
                "The oldest element of “{queue}” has waited for {age}: the consumers are too slow."
            )
            cure = gettext(
                "Start more consumers, or check whether the same elements fail repeatedly."
            )
        elif exchange is not None:
            text = gettext(
                "The oldest element of “{queue}” has waited for {age}: the exchange “{exchange}”"
                " takes no elements."
            )
            if is_running:
                cure = gettext("Read the logs of its workers, or start a worker: {command}")
                cure = cure.format(command=exchange_command("run", exchange))
            else:
                link = Link("exchange", str(key))
                cure, permissions = _how_to_start(exchange)
        else:
            text = gettext(
                "The oldest element of “{queue}” has waited for {age}: no consumer takes elements."
            )
            cure = gettext(
                "Start the program that takes these elements. The queue's page lists the nodes that"
                " may take them."
            )
        sentence = text.format(queue=queue, age=format_age(now - since), exchange=exchange)
        yield Problem(queue, severity, sentence, link, cure, since, permissions=permissions)


_PAUSED_QUERY: Final = f"""
    SELECT q.name, {_AVAILABLE_COUNT}, oldest.at
    FROM psqlmessages_queue AS q {_OLDEST_AVAILABLE}
    WHERE q.is_paused ORDER BY oldest.at, q.name LIMIT {MAX_PER_CHECK}
"""  # noqa: S608


@_check("paused", _PAUSED_QUERY)
def _paused_queues(rows: Rows, _now: datetime, _settings: Settings) -> Iterator[Problem]:
    for queue, number, since in rows:
        sentence = ngettext(
            "The queue “{queue}” is paused: {number} element waiting.",
            "The queue “{queue}” is paused: {number} elements waiting.",
            number,
        ).format(queue=queue, number=format_count(number))
        cure = gettext("Resume the queue when its consumers are ready.")
        yield Problem(queue, Severity.WARNING, sentence, Link("queue", queue), cure, since)


# Exchanges and jobs


def _is_in_admin(model: str) -> bool:
    """Return whether the project's admin has pages of this model."""
    return bool(find_url(f"admin:psqlmessages_{model}_changelist"))


def _how_to_start(exchange: str) -> tuple[str, Sequence[str]]:
    """Return the cure for a stopped exchange, and the permissions for its page."""
    command = exchange_command("start", exchange)
    if _is_in_admin("exchange"):
        cure = gettext("Start the exchange on its page, or type: {command}")
        return cure.format(command=command), START_EXCHANGE
    return gettext("Start the exchange: {command}").format(command=command), ()


# The heartbeat of a worker is its row with the outcome 'ok'.
_EXCHANGES_QUERY: Final = f"""
    SELECT x.id, x.name, x.is_running, x.source_queue, beats.live, beats.last, beats.missing,
        beats.failing_since, waiting.since
    FROM psqlmessages_exchange AS x
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE is_live) AS live, max(seen_at) AS last,
            coalesce(min(rule) FILTER (WHERE is_live), '') AS missing,
            min(failing_since) FILTER (WHERE is_live) AS failing_since
        FROM (
            SELECT c.seen_at, c.missing_rules[1] AS rule, c.failing_since,
                c.seen_at > statement_timestamp() - interval '{WORKER_TIMEOUT_SECONDS} s' AS is_live
            FROM psqlmessages_exchangecount AS c WHERE c.exchange_id = x.id AND c.outcome = 'ok'
        ) AS beat
    ) AS beats
    LEFT JOIN LATERAL (
        SELECT oldest.at AS since FROM psqlmessages_queue AS q {_OLDEST_AVAILABLE}
        WHERE q.name = x.source_queue AND x.source_namespace = %s
    ) AS waiting ON NOT x.is_running
    WHERE x.is_running AND (beats.live = 0 OR beats.missing <> '')
        OR NOT x.is_running AND waiting.since IS NOT NULL
    ORDER BY x.name LIMIT {MAX_PER_CHECK}
"""  # noqa: S608


@_check("exchanges", _EXCHANGES_QUERY, lambda settings: [settings.DATABASE])
def _exchanges(rows: Rows, now: datetime, settings: Settings) -> Iterator[Problem]:
    for key, name, is_running, queue, workers, last_beat, missing_rule, *times in rows:
        failing_since, waiting_since = times
        permissions: Sequence[str] = ()
        if not is_running:
            severity, since = Severity.WARNING, waiting_since
            sentence = gettext("The exchange “{name}” is stopped, and elements wait in “{queue}”.")
            cure, permissions = _how_to_start(name)
        elif not workers:
            severity, since = Severity.ERROR, last_beat
            if since is None:
                sentence = gettext("No worker has run the exchange “{name}”.")
            else:
                sentence = gettext("No worker has run the exchange “{name}” for {age}.")
            command = exchange_command("run", name)
            cure = gettext("Start a worker: {command}").format(command=command)
        else:
            severity, since = Severity.ERROR, failing_since
            sentence = gettext("The exchange “{name}” is blocked: it lacks a rule.")
            namespace, _, statement = missing_rule.partition(": ")
            if namespace == settings.DATABASE and _is_in_admin("exchange"):
                permissions = ADD_RULES_OF_EXCHANGE
                cure = gettext(
                    "Add the rule on the page of the exchange, or run in the database {database}:"
                    " {statement}"
                )
            else:
                cure = gettext("Run in the database {database}: {statement}")
            cure = cure.format(database=namespace, statement=statement)
        age = "" if since is None else format_age(now - since)
        sentence = sentence.format(name=name, queue=queue, age=age)
        link = Link("exchange", str(key))
        yield Problem(name, severity, sentence, link, cure, since, permissions=permissions)


_JOBS_QUERY: Final = f"""
    SELECT name, state, seen_at, error FROM psqlmessages_pipelinejob
    WHERE state = 'failed' OR state <> 'stopped'
        AND seen_at < statement_timestamp() - interval '{WORKER_TIMEOUT_SECONDS} s'
    ORDER BY name LIMIT {MAX_PER_CHECK}
"""  # noqa: S608


@_check("jobs", _JOBS_QUERY)
def _jobs(rows: Rows, now: datetime, _settings: Settings) -> Iterator[Problem]:
    for job, state, since, error in rows:
        if state == "failed":
            text = gettext("The job “{job}” has failed: {error}")
        else:
            text = gettext("The job “{job}” has sent no heartbeat for {age}.")
        reason = error or gettext("no error was recorded")
        sentence = text.format(job=job, error=reason, age=format_age(now - since))[:300]
        if _is_in_admin("pipelinejob"):
            cure = gettext("Start the job again, or delete it in the admin if it is not needed.")
        else:
            cure = gettext("Start the job again.")
        yield Problem(job, Severity.ERROR, sentence, Link("traffic"), cure, since)


# Streams: subscriptions that have expired and missed messages, or whose oldest unread message is
# too old

# The first column: whether the subscription has expired. It then misses messages since its last
# read, or since the oldest unread message that is still stored, if that is older. OFFSET 0 keeps
# the subquery apart, so that LIMIT ends the search.
_SUBSCRIPTIONS_QUERY: Final = f"""(
    SELECT true, s.ident, s.topic, least(unread.at, s.pinged_at), s.pinged_at, 0::bigint
    FROM (
        SELECT e.*, e AS whole FROM psqlmessages_subscription AS e
        WHERE NOT (e.is_alive AND messages._is_alive(e))
        ORDER BY e.pinged_at DESC, e.topic, e.ident OFFSET 0
    ) AS s
    LEFT JOIN LATERAL (
        SELECT o.id FROM psqlmessages_topic AS o WHERE o.name = s.topic LIMIT 1
    ) AS t ON true
    LEFT JOIN LATERAL {OLDEST_UNREAD} AS unread (at) ON true
    WHERE NOT messages._has_read_all(t.id, s.whole)
    LIMIT {MAX_PER_CHECK}
) UNION ALL (
    SELECT false, s.ident, s.topic, unread.at, s.pinged_at, {UNREAD_COUNT}
    FROM psqlmessages_subscription AS s
    JOIN psqlmessages_topic AS t ON t.name = s.topic
    CROSS JOIN LATERAL {OLDEST_UNREAD} AS unread (at)
    WHERE s.is_alive AND messages._is_alive(s)
        AND unread.at < statement_timestamp() - make_interval(secs => %s)
    ORDER BY unread.at, s.topic, s.ident LIMIT {MAX_PER_CHECK}
)"""  # noqa: S608


@_check("subscriptions", _SUBSCRIPTIONS_QUERY, lambda settings: [settings.PROBLEM_LAG_SECONDS])
def _subscriptions(rows: Rows, now: datetime, settings: Settings) -> Iterator[Problem]:
    silence = timedelta(seconds=settings.PROBLEM_LAG_SECONDS)
    for has_expired, ident, topic, since, pinged_at, number in rows:
        severity = Severity.ERROR
        if has_expired:
            text = gettext(
                "The subscription of “{node}” to “{topic}” has expired: it misses messages since"
                " {time}."
            )
            cure = gettext(
                "Start the node “{node}”: it continues with new messages, and does not get those"
                " that it missed. Or delete the subscription if it is unused."
            )
        elif pinged_at < max(since, now - silence):
            text = ngettext(
                "“{node}” has not read the stream “{topic}” for {silence}: {number} message,"
                " {age} behind.",
                "“{node}” has not read the stream “{topic}” for {silence}: {number} messages,"
                " {age} behind.",
                number,
            )
            cure = gettext("Start the node “{node}”, or delete its subscription if it is unused.")
        else:
            severity = Severity.WARNING
            text = ngettext(
                "“{node}” reads the stream “{topic}” too slowly: {number} message, {age} behind.",
                "“{node}” reads the stream “{topic}” too slowly: {number} messages, {age} behind.",
                number,
            )
            cure = gettext("Check what keeps the node “{node}” busy, and read larger batches.")
        cure = cure.format(node=ident)
        sentence = text.format(
            node=ident,
            topic=topic,
            number=format_count(number),
            age=format_age(now - since),
            silence=format_age(now - pinged_at),
            time=f"{localtime(since):%Y-%m-%d %H:%M:%S %Z}",
        )
        name = f"{ident}/{topic}"
        yield Problem(name, severity, sentence, Link("stream", topic), cure, since)


# Refused calls, as recorded by the processes that made them

REFUSED_MINUTES: Final = 10
_IS_ALLOWED: Final = """(
    CASE
        WHEN r.dest = '' THEN messages._has_rule(r.role, r.ident)
        ELSE (
            SELECT CASE r.mode
                WHEN 'W' THEN p.can_write
                WHEN 'R' THEN p.can_read
                WHEN 'O' THEN p.can_observe
                WHEN 'A' THEN p.can_administer
                ELSE p.can_write AND p.can_read
            END
            FROM messages._permissions(r.role, r.ident, r.type, r.dest) AS p
        ) AND (
            r.type = 'Queue'
            OR r.type = 'Rpc' AND messages._is_known_node(r.dest)
            OR r.type = 'Topic' AND (
                r.dest LIKE '%%*'
                OR EXISTS (SELECT FROM psqlmessages_topic AS t WHERE t.name = r.dest)
            )
        )
    END
)"""
# OFFSET 0 keeps the subquery apart, so that LIMIT ends the search for rules.
_REFUSED_QUERY: Final = f"""
    SELECT r.role, r.ident, r.type, r.dest, r.mode, r.count, r.first_at
    FROM (
        SELECT {CALLER_ROLE.format("c.ident")} AS role, c.ident::text, c.type::text, c.dest::text,
            c.mode::text, c.count, c.first_at
        FROM psqlmessages_refusedcall AS c
        WHERE c.last_at > statement_timestamp() - interval '{REFUSED_MINUTES} min'
            AND c.count >= %s
        ORDER BY c.count DESC, c.ident, c.type, c.dest, c.mode OFFSET 0
    ) AS r
    WHERE r.ident = '' OR {_IS_ALLOWED} IS NOT TRUE
    LIMIT {MAX_PER_CHECK}
"""  # noqa: S608


@_check("refused_calls", _REFUSED_QUERY, lambda settings: [settings.PROBLEM_REFUSED_CALLS])
def _refused_calls(rows: Rows, _now: datetime, _settings: Settings) -> Iterator[Problem]:
    for role, ident, type_, dest, mode, number, since in rows:
        if not ident:
            text = ngettext(
                "{number} call was refused. The missing rule was not recorded.",
                "{number} calls were refused. The missing rules were not recorded.",
                number,
            )
        elif not dest:
            text = ngettext(
                "{number} call as “{node}” was refused: no rule names this node.",
                "{number} calls as “{node}” were refused: no rule names this node.",
                number,
            )
        else:
            text = ngettext(
                "{number} call of “{node}” to “{dest}” was refused: a rule is missing.",
                "{number} calls of “{node}” to “{dest}” were refused: a rule is missing.",
                number,
            )
        sentence = text.format(number=f"{number:,}", node=ident, dest=dest)
        cure = gettext("Read the errors in the logs of the programs.")
        if ident:
            cure = gettext("Stop the calls, or allow them: {command}").format(
                command=allow_command(role, ident, type_, dest, mode)
            )
            if type_ == "Rpc":
                cure += " " + gettext("The called node must have a rule of its own.")
        link = Link("node", ident) if ident else Link("nodes")
        name = " ".join(filter(None, (ident, type_, dest, mode)))
        yield Problem(name, Severity.WARNING, sentence, link, cure, since)


# The server


@_check(
    "notification_queue",
    HOLDERS_QUERY,
    lambda settings: [
        settings.PROBLEM_TRANSACTION_SECONDS,
        settings.PROBLEM_QUEUE_PERCENT / 100,
        MAX_HOLDERS,
    ],
)
def _notification_queue(rows: Rows, now: datetime, settings: Settings) -> Iterator[Problem]:
    for usage, *holder in rows:
        is_full = 100 * usage >= settings.PROBLEM_QUEUE_PERCENT
        severity = Severity.ERROR if is_full else Severity.WARNING
        if holder[0] is not None:
            has_node, pid, role, program, state, wait, seconds = holder
            since = now - timedelta(seconds=seconds)
            name = f"pid {pid}"
            held_back = gettext("held back") if has_node else gettext("perhaps held back")
            text = gettext(
                "Notification queue: {usage} full; {held_back} by pid {pid} ({role}, {program}),"
                " which {activity} for {age}."
            )
            if wait == "ClientWrite":
                activity = gettext("has not read its notifications")
            else:
                activity = gettext("is {state}").format(state=state)
            sentence = text.format(
                usage=f"{usage:.4%}",
                held_back=held_back,
                pid=pid,
                role=role or "",
                program=program or gettext("no name"),
                activity=activity,
                age=format_age(seconds),
            )
            cure = holder_finding(usage, *holder).fix
        elif is_full:
            since, name = None, ""
            sentence = gettext("Notification queue: {usage} full.").format(usage=f"{usage:.4%}")
            cure = gettext(
                "Run psqlmessages doctor as a member of pg_read_all_stats: it names the sessions."
            )
        else:
            continue
        yield Problem(name, severity, sentence, Link("topics"), cure, since)


@_check("commit_lock", COMMIT_LOCK_QUERY)
def _commit_lock(rows: Rows, now: datetime, _settings: Settings) -> Iterator[Problem]:
    for waiting, seconds, holder in rows:
        if waiting and seconds >= MIN_LOCK_SECONDS:
            since = now - timedelta(seconds=seconds)
            sentence = ngettext(
                "{number} commit has waited {age} for pid {pid}, which holds the NOTIFY lock.",
                "{number} commits wait for pid {pid}, which holds the NOTIFY lock. The first has"
                " waited {age}.",
                waiting,
            ).format(number=waiting, age=format_age(seconds), pid=holder)
            cure = commit_lock_finding(waiting, seconds, holder, None).fix
            yield Problem("", Severity.ERROR, sentence, Link("topics"), cure, since)


@_check(
    "transactions", OPEN_TRANSACTIONS_QUERY, lambda settings: [settings.PROBLEM_TRANSACTION_SECONDS]
)
def _open_transactions(rows: Rows, now: datetime, _settings: Settings) -> Iterator[Problem]:
    for row in rows[:MAX_PER_CHECK]:
        pid, transaction, prepared, role, program, seconds, waiting = row
        severity = Severity.ERROR if waiting else Severity.WARNING
        since = None if seconds is None else now - timedelta(seconds=seconds)
        name = f"pid {pid}" if prepared is None else transaction
        if prepared is None:
            text = gettext(
                "Pid {pid} ({role}, {program}) has been in a transaction for {age};"
                " sessions that wait for it: {number}."
            )
        else:
            text = gettext(
                "The prepared transaction {prepared} of {role} has been open for {age};"
                " sessions that wait for it: {number}."
            )
        sentence = text.format(
            pid=pid,
            prepared=prepared,
            role=role or "",
            program=program or gettext("no name"),
            age=gettext("unknown") if since is None else format_age(now - since),
            number=waiting,
        )
        cure = transaction_finding(*row).fix
        yield Problem(name, severity, sentence, Link("transactions"), cure, since)


_START_QUERY: Final = """
    SELECT pg_postmaster_start_time()
    WHERE pg_postmaster_start_time() > statement_timestamp() - make_interval(secs => %s)
"""


@_check("restart", _START_QUERY, lambda settings: [settings.PROBLEM_RESTART_SECONDS])
def _restart(rows: Rows, now: datetime, _settings: Settings) -> Iterator[Problem]:
    for (since,) in rows:
        sentence = gettext("PostgreSQL was started {age} ago.").format(age=format_age(now - since))
        cure = gettext(
            "Nodes reconnect automatically. If this was not planned, read the server's log."
        )
        yield Problem("", Severity.WARNING, sentence, Link("nodes"), cure, since)


# The names of all checks: each has an alert in docs/monitoring/alerts.yml.
CHECK_NAMES: Final = ("database", "process", "unchecked", *(check.name for check in CHECKS))
