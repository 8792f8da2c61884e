"""Command doctor with Django: also checks the rules that the project's node and handlers need."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator

from psqlmessages.cli import doctor
from psqlmessages.cli.doctor_checks import CheckContext, Finding, ok, wrong
from psqlmessages.conf import get_settings
from psqlmessages.handler_registry import EVERY_NODE, registry

NAME, HELP, configure = doctor.NAME, doctor.HELP, doctor.configure

# A name may be a prefix and *, in rules as in handlers.
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
    """Check that a rule names PSQLMESSAGES["NODE"], and one allows what each handler receives."""
    missing: list[tuple[str, str]] = []

    def need(why: str, rule: str, **wanted: str) -> None:
        given = {"ident": "", "type": "", "dest": "", "mode": "", "role": ""} | wanted
        ((is_allowed,),) = context.connection.execute(_IS_ALLOWED, given).fetchall()
        if not is_allowed:
            missing.append((why, f"python manage.py psqlmessages allow {rule}"))

    node, role = get_settings().NODE, context.connection.info.user
    if node:
        rule = f"{shlex.quote(node)} RW Topic TOPIC --role {shlex.quote(role)}"
        need(f"no rule names the node {node} for the role {role}", rule, ident=node, role=role)
    for handler in registry.of(None):
        receiver = "" if handler.node == EVERY_NODE else handler.node
        if handler.topic:
            need(
                f"no rule lets {receiver or 'a node'} receive {handler.topic}, for {handler.name}",
                f"{shlex.quote(receiver or node or 'NODE')} R Topic {shlex.quote(handler.topic)}",
                ident=receiver, type="Topic", dest=handler.topic, mode="R|O",
            )  # fmt: skip
        else:
            need(
                f"no rule lets anyone call {receiver or 'a node'}, for {handler.name}",
                f"CALLER W Rpc {shlex.quote(receiver or 'NODE')}", type="Rpc", dest=receiver,
            )  # fmt: skip
    for found, mend in missing:
        why = "everything is denied unless a rule allows it"
        yield wrong(found, why, mend)
    if not missing:
        yield ok("the node and the handlers have theirs")


def run(arguments: Namespace) -> int:
    """Run the checks of the database and of the project."""
    return doctor.run(arguments, needed_rules)
