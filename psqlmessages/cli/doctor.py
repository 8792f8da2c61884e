"""Command doctor: report problems with cause and fix. Also its checks of tables and owners."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from time import monotonic, sleep

from psqlmessages.cli import doctor_checks
from psqlmessages.cli.doctor_checks import (
    Check,
    CheckContext,
    Finding,
    FindingState,
    ok,
    run_check,
    why_denied,
    wrong,
)
from psqlmessages.cli.output import CliCommand, add_json, one_line
from psqlmessages.client.connect import connect
from psqlmessages.exceptions import insert_rules

_MAX_STATEMENTS = 3

# If another node is connected, its housekeeping removes a dead node within this time.
HOUSEKEEPING_SECONDS = 3.0

_DEAD_NODES = """
    SELECT s.pid, string_agg(c.ident, ', ' ORDER BY c.ident)
    FROM psqlmessages_session AS s JOIN psqlmessages_client AS c ON c.session_id = s.id
    WHERE s.id NOT IN (SELECT messages._live_sessions())
    GROUP BY s.id, s.pid ORDER BY s.id LIMIT 5
"""
_EXPIRED_TABLES = """
    SELECT count(*), coalesce(sum(pg_table_size(spare.body)), 0)::bigint
    FROM (
        SELECT format('psqlmessages_body_%s', messages._body_slot(class, 1))::regclass AS body
        FROM generate_series(0, 6) AS class
    ) AS spare
    WHERE pg_relation_size(spare.body) > 0
"""
_UNNEEDED_TABLES = """
    SELECT count(*), coalesce(sum(pg_table_size(messages._stream_partition(n))), 0)::bigint
    FROM generate_series(0, 3) AS n, messages._stream AS s
    WHERE messages._last_checked_at('messages._streams_checked', s.maintained_at)
        < clock_timestamp() - interval '10 seconds'
      AND pg_relation_size(messages._stream_partition(n)) > 0
      AND NOT messages._has_needed_rows(n)
"""
_OWNER = """
    SELECT r.rolname, quote_ident(r.rolname), r.rolsuper
    FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner
    WHERE n.nspname = 'messages'
"""
_OBJECTS_OF_OTHERS = """
    SELECT o.kind || ' ' || o.name, o.owner::regrole::text
    FROM (
        SELECT CASE p.prokind WHEN 'p' THEN 'PROCEDURE' ELSE 'FUNCTION' END,
            p.oid::regprocedure::text, p.proowner
        FROM pg_proc AS p WHERE p.pronamespace = 'messages'::regnamespace
        UNION ALL
        SELECT CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END,
            c.oid::regclass::text, c.relowner
        FROM pg_class AS c
        WHERE c.relkind IN ('r', 'p', 'v', 'S')
          AND (c.relnamespace = 'messages'::regnamespace
              OR c.relnamespace = 'public'::regnamespace AND c.relname ^@ 'psqlmessages_')
    ) AS o (kind, name, owner)
    WHERE pg_get_userbyid(o.owner) <> %s
    ORDER BY 1
"""
_ROLES_THAT_MAY_ACT_AS_OWNER = """
    SELECT DISTINCT quote_ident(r.rolname), r.rolsuper
    FROM psqlmessages_auth AS a JOIN pg_roles AS r ON r.rolname = a.role
    WHERE r.rolname <> %s AND pg_has_role(r.oid, %s, 'MEMBER')
    ORDER BY 1
"""
# Roles that do not exist, or were created again after the rule was saved. If a dump is restored in
# another database, roles have new oids, so an existing role is not checked until the rule is saved.
_RULES_WITHOUT_THEIR_ROLE = """
    SELECT a.role, r.oid IS NOT NULL, count(*),
        format('DELETE FROM messages.auth WHERE role = %L', a.role),
        format('UPDATE messages.auth SET role = role WHERE role = %L', a.role)
    FROM psqlmessages_auth AS a LEFT JOIN pg_roles AS r ON r.rolname = a.role
    WHERE r.oid IS NULL OR a.role_identity <> r.oid || ' ' || messages._database_identity()
        AND split_part(a.role_identity, ' ', 2) = messages._database_identity()
    GROUP BY 1, 2
    ORDER BY 1
"""
_ROLES_WITH_CREATE = """
    SELECT n.nspname, coalesce(quote_ident(r.rolname), 'PUBLIC')
    FROM pg_namespace AS n
    CROSS JOIN aclexplode(n.nspacl) AS a
    LEFT JOIN pg_roles AS r ON r.oid = a.grantee
    WHERE n.nspname IN ('public', 'messages') AND a.privilege_type = 'CREATE'
      AND a.grantee <> n.nspowner AND (r.rolname = %s) IS NOT TRUE
    ORDER BY 1, 2
"""


def dead_nodes(context: CheckContext) -> Iterator[Finding]:
    """Check for nodes with a closed connection, which housekeeping should have removed."""
    deadline = monotonic() + HOUSEKEEPING_SECONDS
    while (rows := context.rows(_DEAD_NODES)) and monotonic() < deadline:
        sleep(HOUSEKEEPING_SECONDS / 10)
    if not rows:
        yield ok("none")
    for pid, idents in rows:
        yield wrong(
            f"{idents}: registered, but the connection (pid {pid}) is closed",
            "its program has crashed, or the database was restored from a dump; no other node runs"
            " housekeeping, which would end the session",
            "psqlmessages prune",
        )


def expired_bodies(context: CheckContext) -> Iterator[Finding]:
    """Check for tables with only expired bodies, which housekeeping should have emptied."""
    tables, size = context.rows(_EXPIRED_TABLES)[0]
    why = "they use disk space: no node runs housekeeping, or an open transaction reads them"
    found = f"tables with only expired bodies: {tables}, of {size:,} bytes"
    yield wrong(found, why, "psqlmessages prune") if tables else ok("none")


def stream_tables(context: CheckContext) -> Iterator[Finding]:
    """Check for tables of unneeded stream messages, which housekeeping should have emptied."""
    tables, size = context.rows(_UNNEEDED_TABLES)[0]
    why = "they use disk space: no node publishes, reads or runs housekeeping"
    found = f"tables that no subscription and no retention needs: {tables}, of {size:,} bytes"
    yield wrong(found, why, "psqlmessages prune") if tables else ok("no unneeded messages")


def owners(context: CheckContext) -> Iterator[Finding]:
    """Check that one ordinary role owns everything, and no role of a rule may act as this owner."""
    rows = context.rows(_OWNER)
    if not rows:
        yield Finding(FindingState.UNKNOWN, "the schema messages does not exist")
        return
    owner, quoted_owner, is_superuser = rows[0]
    findings = [_superuser_finding(quoted_owner)] if is_superuser else []
    findings += _check_owners_of_objects(context, owner, quoted_owner)
    findings += _check_roles_of_rules(context, owner, quoted_owner)
    yield from findings or [ok(f"{owner} owns everything")]


def rules(context: CheckContext) -> Iterator[Finding]:
    """Check that there are rules, and that no role was dropped since its rules were saved."""
    if not context.value("SELECT EXISTS (SELECT FROM psqlmessages_auth)"):
        role = context.value("SELECT session_user::text")
        fix = insert_rules((role, context.node, "Topic", context.topic, "RW"))
        yield wrong("there are no rules", why_denied(fix), fix)
        return
    rows = context.rows(_RULES_WITHOUT_THEIR_ROLE)
    if not rows:
        yield ok("the role of each rule exists")
    for role, exists, count, delete, save_again in rows:
        subject = f"{count} rules name" if count > 1 else "1 rule names"
        if exists:
            found = f"{subject} the role {role}, which has been dropped and created again"
            why = "the new role has the permissions of the former role"
            fix = f"{delete}; -- or, if they are meant for the new role, {save_again}"
        else:
            found = f"{subject} the role {role}, which does not exist"
            why = "a new role with this name would get the permissions"
            fix = f"{delete}; -- or create the role"
        yield wrong(found, f"rules refer to a role by name: {why}", fix)


def create_rights(context: CheckContext) -> Iterator[Finding]:
    """Check which roles may create functions that could be called instead of PostgreSQL's own."""
    owner = context.value(_OWNER)
    roles = context.rows(_ROLES_WITH_CREATE, owner)
    if not roles:
        yield ok("only the owners")
    for schema, role in roles:
        yield wrong(
            f"{role} may create objects in the schema {schema}",
            "the functions of psqlmessages could call a function of this role instead of"
            " PostgreSQL's own, with the privileges of the owner",
            f"REVOKE CREATE ON SCHEMA {schema} FROM {role}",
        )


def _superuser_finding(owner: str) -> Finding:
    return wrong(
        f"the superuser {owner} owns the schema messages",
        "the functions run with the privileges of their owner, so a bug could expose the server",
        f"ALTER ROLE {owner} NOSUPERUSER; -- or let an ordinary role own the database and migrate",
    )


def _check_owners_of_objects(context: CheckContext, owner: str, quoted: str) -> Iterator[Finding]:
    rows = context.rows(_OBJECTS_OF_OTHERS, owner)
    if not rows:
        return
    roles = ", ".join(sorted({role for _, role in rows}))
    statements = "; ".join(f"ALTER {name} OWNER TO {quoted}" for name, _ in rows[:_MAX_STATEMENTS])
    more = f"; -- and {len(rows) - _MAX_STATEMENTS} more" if len(rows) > _MAX_STATEMENTS else ""
    yield wrong(
        f"functions or tables of {roles}, not of {owner}: {len(rows)}",
        "the owner of a function can replace it, and a function runs with its owner's privileges",
        statements + more,
    )


def _check_roles_of_rules(context: CheckContext, owner: str, quoted: str) -> Iterator[Finding]:
    for role, is_superuser in context.rows(_ROLES_THAT_MAY_ACT_AS_OWNER, owner, owner):
        yield wrong(
            f"{role}, which rules name, may act as {owner}, the owner",
            "this role can change the rules that restrict it",
            f"ALTER ROLE {role} NOSUPERUSER" if is_superuser else f"REVOKE {quoted} FROM {role}",
        )


CHECKS: tuple[Check, ...] = (
    doctor_checks.server,
    doctor_checks.installed,
    doctor_checks.pooler,
    doctor_checks.listening,
    doctor_checks.notification_queue,
    doctor_checks.commit_lock,
    doctor_checks.open_transactions,
    doctor_checks.clock,
    dead_nodes,
    expired_bodies,
    stream_tables,
    owners,
    rules,
    create_rights,
)


def run(
    arguments: Namespace,
    *further_checks: Check,
    complete_fix: Callable[[str], str] = str,
    **names: str,
) -> int:
    """Run the checks and print the findings; fail if one of them is a problem.

    ``complete_fix`` adds the options that select the checked database to the text of a fix.
    ``names`` are the fields ``node`` and ``topic`` of CheckContext, if they are known.
    """
    findings = []
    for finding in run_checks(arguments.dsn, *further_checks, **names):
        completed = replace(finding, fix=complete_fix(finding.fix))
        findings.append(completed)
        if not arguments.json:
            print(_describe(completed), flush=True)
    problems = sum(finding.state is FindingState.WRONG for finding in findings)
    if arguments.json:
        print(json.dumps({"wrong": problems, "findings": [asdict(each) for each in findings]}))
    else:
        unknown = sum(finding.state is FindingState.UNKNOWN for finding in findings)
        summary = f"{problems} wrong" if problems else "nothing wrong"
        print(f"\n{summary}" + (f", {unknown} unknown" if unknown else ""), file=sys.stderr)
    return 1 if problems else 0


def run_checks(dsn: str, *further_checks: Check, **names: str) -> Iterator[Finding]:
    """Yield the findings for a database; raise psycopg.Error if the server is unreachable."""
    with connect(dsn) as connection:
        for check in (*CHECKS, *further_checks):
            yield from run_check(check, CheckContext(dsn, connection, **names))


def _describe(finding: Finding) -> str:
    lines = [f"{finding.state.value:7}  {finding.check:14}  {one_line(finding.found)}"]
    for label, text in (("why", finding.why), ("fix", finding.fix)):
        if text:
            lines.append(f"{'':9}{label}: {one_line(text)}")
    return "\n".join(lines)


COMMAND = CliCommand("doctor", "report problems with their cause and fix", add_json, run)
