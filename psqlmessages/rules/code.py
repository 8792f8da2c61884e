"""Rules as code: declared in a module, and applied by a data migration or after ``migrate``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from django.db import connections, transaction
from django.db.backends.utils import CursorWrapper

from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.orm import resolve_alias

DEFAULT_TIMEOUT = timedelta(minutes=1)
MODES = {"Topic": ("W", "R", "RW", "O"), "Queue": ("W", "R", "RW", "A"), "Rpc": ("W",)}

_APPLY = """
    INSERT INTO messages.auth AS a (role, ident, type, dest, mode, timeout)
    VALUES (coalesce(%s, session_user), %s, %s, %s, %s, %s)
    ON CONFLICT (ident, type, dest, role)
    DO UPDATE SET mode = excluded.mode, timeout = excluded.timeout
    WHERE (a.mode, a.timeout) IS DISTINCT FROM (excluded.mode, excluded.timeout)
"""
_WHERE = "WHERE role = coalesce(%s, session_user) AND (ident, type, dest) = (%s, %s, %s)"
_REMOVE = f"DELETE FROM messages.auth {_WHERE}"  # noqa: S608
_SET_MODE = f"UPDATE messages.auth SET mode = %s {_WHERE}"  # noqa: S608
_MODE = f"SELECT mode FROM messages.auth {_WHERE} FOR UPDATE"  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A permission of a node: for a topic, for a queue, or to call another node (``rpc``).

    A name that ends in ``*`` is a pattern: it stands for all names that begin with it. ``mode`` is
    "W" (send), "R" (receive), "RW", for a topic also "O" (observe), and for a queue also "A"
    (administer: RW, and change its settings or remove it). The default is "RW", for ``rpc`` "W".
    ``role`` is the PostgreSQL role that may act as the node, by default the one as which Django
    connects. ``timeout``, a timedelta or a number of seconds, is how long large bodies and
    answers are stored. Raises ValueError if a mode does not fit, the timeout is not positive, or
    not one destination is given.
    """

    node: str
    topic: str | None = None
    queue: str | None = None
    rpc: str | None = None
    mode: str = ""
    role: str | None = None
    timeout: Duration = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        given = [name for name in ("topic", "queue", "rpc") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"a rule has exactly one of topic, queue and rpc: this has {found}")
        if seconds_of(self.timeout, "timeout") <= 0:
            raise ValueError(f"the timeout of a rule must be positive, not {self.timeout!r}")
        if self.mode and self.mode not in MODES[self.type]:
            raise ValueError(
                f"mode {self.mode!r}: for a {self.type} rule it is {' or '.join(MODES[self.type])}"
            )

    @property
    def type(self) -> str:
        """The type of the rule: Topic, Queue or Rpc."""
        return "Topic" if self.topic is not None else "Queue" if self.queue is not None else "Rpc"

    @property
    def key(self) -> tuple[str | None, str, str, str]:
        """Role, node, type and destination."""
        return self.role, self.node, self.type, self.topic or self.queue or self.rpc or ""

    @property
    def values(self) -> tuple[str, int]:
        """Mode, and timeout in seconds."""
        mode = self.mode or ("W" if self.type == "Rpc" else "RW")
        return mode, math.ceil(seconds_of(self.timeout, "timeout"))


def apply(rules: Iterable[Rule], *, using: str | None = None) -> int:
    """Add rules, and set mode and timeout of existing ones; return how many rows changed.

    Other rules stay. Safe to repeat: call it from a data migration or a ``post_migrate`` receiver.
    """
    with connections[resolve_alias(using)].cursor() as cursor:
        return sum(_execute(cursor, _APPLY, (*rule.key, *rule.values)) for rule in rules)


def remove(rules: Iterable[Rule], *, using: str | None = None) -> int:
    """Remove rules with this role, node and destination; return their number."""
    with connections[resolve_alias(using)].cursor() as cursor:
        return sum(_execute(cursor, _REMOVE, rule.key) for rule in rules)


def allow(rule: Rule, *, using: str | None = None) -> str:
    """Add the rule, or its mode to the mode of the existing rule; return the resulting mode.

    Raises ValueError for "O" together with another mode: they need rules with different names.
    """
    alias = resolve_alias(using)
    with transaction.atomic(alias), connections[alias].cursor() as cursor:
        modes = {*_current_mode(cursor, rule), *rule.values[0]}
        mode = "A" if "A" in modes else "".join(letter for letter in "RWO" if letter in modes)
        if mode not in MODES[rule.type]:
            raise ValueError(
                f"{rule.node!r} has mode {''.join(sorted(modes - set(rule.values[0])))} for"
                f" {rule.key[3]!r} already: O and other modes need rules with different names,"
                " for instance a pattern"
            )
        _execute(cursor, _APPLY, (*rule.key, mode, rule.values[1]))
    return mode


def deny(rule: Rule, *, using: str | None = None) -> str | None:
    """Remove the rule's mode from the existing rule; return the remaining mode.

    If none remains, remove the rule and return "". Return None if there is no rule. If A is
    removed, R and W remain.
    """
    alias = resolve_alias(using)
    with transaction.atomic(alias), connections[alias].cursor() as cursor:
        current = _current_mode(cursor, rule)
        # A includes R and W. If any of these is removed, A does not remain.
        modes = "RW" if current == "A" else current
        remaining = "".join(letter for letter in modes if letter not in rule.values[0])
        if remaining:
            _execute(cursor, _SET_MODE, (remaining, *rule.key))
        elif current:
            _execute(cursor, _REMOVE, rule.key)
    return remaining if current else None


def _current_mode(cursor: CursorWrapper, rule: Rule) -> str:
    cursor.execute(_MODE, rule.key)
    row = cursor.fetchone()
    return row[0] if row else ""


def _execute(cursor: CursorWrapper, statement: str, values: tuple[object, ...]) -> int:
    """Run a statement; return the number of changed rows."""
    cursor.execute(statement, values)
    return cursor.rowcount
