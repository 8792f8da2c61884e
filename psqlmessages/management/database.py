"""Commands install, prune and doctor: the functions, expired data and problems of a database."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from django.db import connections, transaction

from psqlmessages import schema, traffic_windows
from psqlmessages.cli import doctor, prune
from psqlmessages.cli.doctor_checks import CheckContext, Finding, ok, why_denied, wrong
from psqlmessages.cli.output import CliCommand, fail
from psqlmessages.conf import get_settings
from psqlmessages.handler_registry import EVERY_NODE, registry


def _install(arguments: Namespace) -> int:
    """Install the functions; fail if a migration that they may need is not applied."""
    alias = arguments.database
    if schema.has_unapplied_migrations(connections[alias]):
        return fail(
            f"not all migrations are applied to database {alias!r}. First run:"
            f" python manage.py migrate psqlmessages --database {alias}"
        )
    with transaction.atomic(using=alias):
        schema.install(connections[alias])
        schema.write_settings(using=alias)
    print(f"installed the functions of this version ({schema.digest()}) in database {alias!r}")
    return 0


def _prune(arguments: Namespace) -> int:
    """Run `prune`, and also remove old traffic windows; print the numbers."""
    counts = prune.prune(arguments.dsn)
    removed_windows = traffic_windows.prune(arguments.database)
    if arguments.json:
        print(json.dumps({**counts, "removed_windows": removed_windows}))
    else:
        print(f"{prune.format_counts(counts)}; removed traffic windows: {removed_windows:,}")
    return 0


# The first words of a fix that is a command of psqlmessages, or "migrate psqlmessages".
_FIX_COMMAND = re.compile(r"^(?:python manage\.py )?(migrate )?psqlmessages")

# Whether a rule matches all parameters. An empty type, mode or role matches every rule. The mode is
# a regular expression. In rules and parameters, ident and dest may be patterns, which end in *. A
# rule and a parameter match if a name exists that fits both.
_HAS_RULE = """
    SELECT EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE (%(type)s = '' OR a.type = %(type)s) AND (%(mode)s = '' OR a.mode ~ %(mode)s)
          AND (%(role)s = '' OR a.role = %(role)s)
          AND NOT EXISTS (
              SELECT FROM (VALUES (a.ident, %(ident)s), (a.dest, %(dest)s)) AS n (ours, wanted)
              WHERE n.ours <> n.wanted
                AND NOT (n.ours LIKE '%%*' AND n.wanted ^@ left(n.ours, -1))
                AND NOT (n.wanted LIKE '%%*' AND n.ours ^@ left(n.wanted, -1))
          )
    )
"""


def needed_rules(context: CheckContext) -> Iterator[Finding]:
    """Check that PSQLMESSAGES["NODE"] and the nodes of the handlers have rules."""
    findings: list[Finding] = []

    def require_rule(problem: str, allow_arguments: str, **columns: str) -> None:
        columns = {"ident": "*", "type": "", "dest": "*", "mode": "", "role": ""} | columns
        if not context.connection.execute(_HAS_RULE, columns).fetchall()[0][0]:
            fix = f"python manage.py psqlmessages allow {allow_arguments}"
            findings.append(wrong(problem, why_denied(fix), fix))

    node, role = get_settings().NODE, context.connection.info.user
    if node:
        topic = shlex.quote(_known_names().get("topic", "TOPIC"))
        arguments = f"{shlex.quote(node)} RW Topic {topic} --role {shlex.quote(role)}"
        problem = f"no rule names the node {node} for the role {role}"
        require_rule(problem, arguments, ident=node, role=role)
    for handler in registry.list_handlers(None):
        receiver = "" if handler.node == EVERY_NODE else handler.node
        purpose = f"for the handler {handler.name}"
        if handler.topic:
            # If the handler has patterns, a rule for one matching topic or node is enough.
            require_rule(
                f"no rule lets {receiver or 'any node'} receive {handler.topic}, {purpose}",
                f"{shlex.quote(receiver or node or 'NODE')} R Topic {shlex.quote(handler.topic)}",
                ident=handler.node, type="Topic", dest=handler.topic, mode="R|O",
            )  # fmt: skip
        else:
            # `call` of psqlmessages.django adds a suffix to NODE, so the rule needs a pattern.
            caller, callee = f"{node}.*" if node else "CALLER", receiver or node or "NODE"
            require_rule(
                f"no rule lets any node call {receiver or 'a node'}, {purpose}",
                f"{shlex.quote(caller)} W Rpc {shlex.quote(callee)}", type="Rpc", dest=handler.node,
            )  # fmt: skip
    yield from findings or [ok("the node and the handlers have their rules")]


def _known_names() -> dict[str, str]:
    """Return a node and a topic of this project, for the texts of fixes.

    The key "node" or "topic" is missing if the project names none.
    """
    handlers = registry.list_handlers(None)
    nodes = [get_settings().NODE, *(each.node for each in handlers if each.node != EVERY_NODE)]
    topics = [each.topic for each in handlers]
    names = {"node": next(filter(None, nodes), ""), "topic": next(filter(None, topics), "")}
    return {key: name for key, name in names.items() if name}


def _doctor(arguments: Namespace) -> int:
    is_default = arguments.database == get_settings().DATABASE
    option = "" if is_default else f" --database {shlex.quote(arguments.database)}"

    def add_option(fix: str) -> str:
        return _FIX_COMMAND.sub(rf"python manage.py \1psqlmessages{option}", fix)

    return doctor.run(arguments, needed_rules, complete_fix=add_option, **_known_names())


INSTALL = CliCommand(
    "install",
    "reinstall the SQL functions. Use this if functions are missing or of another version although"
    " `migrate` has nothing to apply. Django must connect as the owner of the tables",
    lambda parser: None,
    _install,
)
PRUNE = replace(
    prune.COMMAND, help=f"{prune.COMMAND.help}; also remove old traffic windows", run=_prune
)
DOCTOR = replace(doctor.COMMAND, run=_doctor)
