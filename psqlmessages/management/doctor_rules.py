"""Command doctor with Django: also checks the rules that the project's node and handlers need."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from psqlmessages.cli import doctor
from psqlmessages.cli.doctor_checks import CheckContext, Finding, ok, why_denied, wrong
from psqlmessages.conf import get_settings
from psqlmessages.handler_registry import EVERY_NODE, registry

# A command in a fix, to which `complete` adds the alias of the database.
_COMMAND = re.compile(r"^(?:python manage\.py )?(migrate )?psqlmessages")

# An empty parameter matches every rule, and mode is a regular expression. The names of a rule may
# be a prefix followed by *.
_IS_ALLOWED = """
    SELECT EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE (%(type)s = '' OR a.type = %(type)s) AND (%(mode)s = '' OR a.mode ~ %(mode)s)
          AND (%(ident)s = '' OR a.ident = %(ident)s
              OR right(a.ident, 1) = '*' AND %(ident)s ^@ left(a.ident, -1))
          AND (%(dest)s = '' OR a.dest = %(dest)s
              OR right(a.dest, 1) = '*' AND %(dest)s ^@ left(a.dest, -1))
          AND (%(role)s = '' OR a.role = %(role)s)
    )
"""


def needed_rules(context: CheckContext) -> Iterator[Finding]:
    """Check that PSQLMESSAGES["NODE"] and the nodes of the handlers have rules."""
    missing: list[tuple[str, str]] = []

    def check(found: str, rule: str, **fields: str) -> None:
        fields = {"ident": "", "type": "", "dest": "", "mode": "", "role": ""} | fields
        ((is_allowed,),) = context.connection.execute(_IS_ALLOWED, fields).fetchall()
        if not is_allowed:
            missing.append((found, f"python manage.py psqlmessages allow {rule}"))

    node, role = get_settings().NODE, context.connection.info.user
    if node:
        topic = shlex.quote(_known_names().get("topic", "TOPIC"))
        rule = f"{shlex.quote(node)} RW Topic {topic} --role {shlex.quote(role)}"
        check(f"no rule names the node {node} for the role {role}", rule, ident=node, role=role)
    for handler in registry.list_handlers(None):
        receiver = "" if handler.node == EVERY_NODE else handler.node
        if handler.topic:
            check(
                f"no rule lets {receiver or 'a node'} receive {handler.topic}, for {handler.name}",
                f"{shlex.quote(receiver or node or 'NODE')} R Topic {shlex.quote(handler.topic)}",
                ident=receiver, type="Topic", dest=handler.topic, mode="R|O",
            )  # fmt: skip
        else:
            # The sessions of `call` append a suffix to the name.
            caller, callee = f"{node}.*" if node else "CALLER", receiver or node or "NODE"
            check(
                f"no rule lets anyone call {receiver or 'a node'}, for {handler.name}",
                f"{shlex.quote(caller)} W Rpc {shlex.quote(callee)}", type="Rpc", dest=receiver,
            )  # fmt: skip
    for found, fix in missing:
        yield wrong(found, why_denied(fix), fix)
    if not missing:
        yield ok("the node and the handlers have their rules")


def _known_names() -> dict[str, str]:
    """Return a node and a topic of this project, as far as known."""
    handlers = registry.list_handlers(None)
    nodes = [get_settings().NODE, *(each.node for each in handlers if each.node != EVERY_NODE)]
    names = {"node": nodes, "topic": [each.topic for each in handlers]}
    return {key: found[0] for key, known in names.items() if (found := [*filter(None, known)])}


def _run(arguments: Namespace) -> int:
    is_default = arguments.database == get_settings().DATABASE
    option = "" if is_default else f" --database {shlex.quote(arguments.database)}"

    def complete(fix: str) -> str:
        return _COMMAND.sub(rf"python manage.py \1psqlmessages{option}", fix)

    return doctor.run(arguments, needed_rules, complete=complete, **_known_names())


COMMAND = replace(doctor.COMMAND, run=_run)
