"""Commands allow, deny, token and definitions: rules, web identities, and tokens of users."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from datetime import timedelta
from pathlib import Path

from django.contrib.auth import get_user_model

from psqlmessages.cli.output import CliCommand, fail, positive, print_lines, read_input
from psqlmessages.relay import auth as relay_auth
from psqlmessages.rules import changes, document
from psqlmessages.rules.code import DEFAULT_TIMEOUT, Rule, allow, deny

_MAX_DAYS = 3650


def _add_rule_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="node name, or a pattern that ends in *")
    parser.add_argument(
        "mode", metavar="MODE", choices=("W", "R", "RW", "O", "A"),
        help="W (send or push), R (receive or take), RW (both), O (observe a topic), or A"
        " (administer a queue, includes RW). Rpc has only W",
    )  # fmt: skip
    parser.add_argument(
        "type", metavar="TYPE", type=str.lower, choices=("topic", "queue", "rpc"),
        help="Topic, Queue or Rpc",
    )  # fmt: skip
    parser.add_argument(
        "destination", metavar="NAME",
        help="the topic, the queue, or the node to call; or a pattern that ends in *",
    )  # fmt: skip
    parser.add_argument(
        "--role", help="the PostgreSQL role (default: the one that Django connects as)"
    )


def _configure_allow(parser: ArgumentParser) -> None:
    _add_rule_arguments(parser)
    parser.add_argument(
        "--timeout", type=positive, default=int(DEFAULT_TIMEOUT.total_seconds()),
        help="seconds for which large bodies and answers are stored (default: 60)",
    )  # fmt: skip


def _configure_token(parser: ArgumentParser) -> None:
    parser.add_argument("user", metavar="USER", help="the name of the user")
    parser.add_argument(
        "--days", type=_parse_days, default=30.0, help="validity of the token (default: 30 days)"
    )
    parser.add_argument(
        "--websocket",
        action="store_true",
        help="print a token for WebSockets only: the REST API does not accept it",
    )


def _allow(arguments: Namespace) -> int:
    rule = _rule_of(arguments)
    mode = allow(rule, using=arguments.database)
    print(f"{rule.node} may {mode} {rule.type} {arguments.destination}")
    return 0


def _deny(arguments: Namespace) -> int:
    rule = _rule_of(arguments)
    remaining_mode = deny(rule, using=arguments.database)
    if remaining_mode is None:
        role = f" of role {rule.role}" if rule.role else ""
        return fail(
            f"node {rule.node!r}{role} has no rule for {rule.type} {arguments.destination!r}. If a"
            " rule with a pattern allows this, change that rule in the admin"
        )
    print(f"{rule.node} may {remaining_mode or 'nothing'} {rule.type} {arguments.destination}")
    return 0


def _token(arguments: Namespace) -> int:
    """Print a token; fail if the user does not exist or is not active."""
    try:
        from psqlmessages.rest import auth as rest_auth
    except ImportError:
        return fail("REST and WebSockets are not installed: pip install 'psqlmessages[web]'")
    users = get_user_model()
    try:
        user = users._default_manager.get_by_natural_key(arguments.user)
    except users.DoesNotExist:
        return fail(f"there is no user {arguments.user!r}")
    if not user.is_active:
        return fail(f"the user {arguments.user!r} is not active")
    token_for = relay_auth.token_for if arguments.websocket else rest_auth.token_for
    print(token_for(user, timedelta(days=arguments.days)))
    return 0


def _rule_of(arguments: Namespace) -> Rule:
    return Rule(
        node=arguments.node, mode=arguments.mode, role=arguments.role,
        **{arguments.type: arguments.destination},
        timeout=getattr(arguments, "timeout", DEFAULT_TIMEOUT),
    )  # fmt: skip


def _parse_days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        raise ArgumentTypeError(f"not a number of days: {text!r}") from None
    if not 0 < days <= _MAX_DAYS:
        raise ArgumentTypeError(f"must be more than 0 and at most {_MAX_DAYS:,} days: {text!r}")
    return days


def _configure_definitions(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", choices=("export", "import"), help="export or import"
    )
    parser.add_argument("file", metavar="FILE", help='the file; "-" is standard input or output')
    parser.add_argument("--dry-run", action="store_true", help="import: only print the changes")
    parser.add_argument(
        "--replace", action="store_true", help="import: remove entries that are not in the file"
    )


def _definitions(arguments: Namespace) -> int:
    """Export or import. If the file has errors, print each on a line, change nothing, and fail."""
    if arguments.action == "export":
        text = document.write(changes.read_current(arguments.database))
        if arguments.file == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.file).write_text(text, encoding="utf-8")
        return 0
    try:
        wanted = document.read(read_input(arguments.file))
        changes.check_users_and_groups(wanted, arguments.database)
    except document.MalformedDefinitions as error:
        return fail(*error.errors)
    current = changes.read_current(arguments.database)
    difference = changes.difference(current, wanted, is_replacing=arguments.replace)
    print_lines(difference.lines())
    if not arguments.dry_run:
        try:
            changes.apply(difference, changes.fingerprint(current), arguments.database)
        except changes.DefinitionsChanged:
            return fail("the rules or web identities have changed during the import: run it again")
    print(f"{'dry run: ' if arguments.dry_run else ''}{difference.summary()}", file=sys.stderr)
    return 0


ALLOW = CliCommand(
    "allow", "allow a node to use a topic or queue, or to call a node", _configure_allow, _allow
)
DENY = CliCommand("deny", "remove a permission of a node", _add_rule_arguments, _deny)
TOKEN = CliCommand(
    "token",
    "print a token with which a program calls the REST API or opens WebSockets as a user",
    _configure_token,
    _token,
)
DEFINITIONS = CliCommand(
    "definitions",
    "export rules and web identities to JSON, or import them",
    _configure_definitions,
    _definitions,
)
