"""Commands allow and deny: add or remove a permission of a node."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from psqlmessages.cli.output import fail, positive
from psqlmessages.rules.code import DEFAULT_TIMEOUT, Rule, allow, deny


class _Command:
    """Command allow or deny."""

    def __init__(self, name: str, help_: str, change: Callable[[Rule, str], int]) -> None:
        self.NAME = name
        self.HELP = help_
        self._change = change

    def configure(self, parser: ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("node", metavar="NODE", help="its name, or a prefix followed by *")
        parser.add_argument(
            "mode", metavar="MODE", choices=("W", "R", "RW", "O"),
            help="W (send), R (receive), RW, or O (observe a topic); for Rpc: W",
        )  # fmt: skip
        parser.add_argument(
            "type", metavar="TYPE", type=str.lower, choices=("topic", "queue", "rpc"),
            help="Topic, Queue or Rpc",
        )  # fmt: skip
        parser.add_argument(
            "destination", metavar="NAME",
            help="the topic, queue, or called node; or a prefix followed by *",
        )  # fmt: skip
        parser.add_argument(
            "--role", help="the PostgreSQL role (default: the one that Django connects as)"
        )
        if self._change is _allow:
            parser.add_argument(
                "--timeout", type=positive, default=int(DEFAULT_TIMEOUT.total_seconds()),
                help="seconds that large bodies and reply tokens are valid (default: 60)",
            )  # fmt: skip

    def run(self, arguments: Namespace) -> int:
        """Change the rule, and print the resulting permission."""
        rule = Rule(
            node=arguments.node, mode=arguments.mode, role=arguments.role,
            **{arguments.type: arguments.destination},
            timeout=getattr(arguments, "timeout", DEFAULT_TIMEOUT),
        )  # fmt: skip
        return self._change(rule, arguments.database)


def _allow(rule: Rule, using: str) -> int:
    print(f"{rule.node} may {allow(rule, using=using)} {rule.type} {rule.key[3]}")
    return 0


def _deny(rule: Rule, using: str) -> int:
    left = deny(rule, using=using)
    if left is None:
        role = f" of role {rule.role}" if rule.role else ""
        return fail(
            f"{rule.node!r}{role} has no rule for {rule.type} {rule.key[3]!r};"
            " a pattern may allow it: see the rules in the admin"
        )
    print(f"{rule.node} may {left or 'nothing'} {rule.type} {rule.key[3]}")
    return 0


ALLOW = _Command("allow", "allow a node to use a topic or queue, or to call a node", _allow)
DENY = _Command("deny", "remove such a permission", _deny)
