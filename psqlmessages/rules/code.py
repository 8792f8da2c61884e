"""Rules and queue settings as code: applied by a data migration or after ``migrate``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from django.db import connections, transaction
from django.db.backends.utils import CursorWrapper

from psqlmessages.client import queue_calls
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.queue_calls import QueueSettings
from psqlmessages.orm import resolve_alias, run

DEFAULT_TIMEOUT = timedelta(minutes=1)
MODES = {"Topic": ("W", "R", "RW", "O"), "Queue": ("W", "R", "RW", "A"), "Rpc": ("W",)}

_UPSERT = """
    INSERT INTO messages.auth AS a (role, ident, type, dest, mode, timeout)
    VALUES (coalesce(%s, session_user), %s, %s, %s, %s, %s)
    ON CONFLICT (ident, type, dest, role)
    DO UPDATE SET mode = excluded.mode, timeout = excluded.timeout
    WHERE (a.mode, a.timeout) IS DISTINCT FROM (excluded.mode, excluded.timeout)
"""
_WHERE = "WHERE role = coalesce(%s, session_user) AND (ident, type, dest) = (%s, %s, %s)"
_REMOVE = f"DELETE FROM messages.auth {_WHERE}"  # noqa: S608
_SET_MODE = f"UPDATE messages.auth SET mode = %s {_WHERE}"  # noqa: S608
_LOCK_AND_READ_MODE = f"SELECT mode FROM messages.auth {_WHERE} FOR UPDATE"  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A permission of a node: for a topic, for a queue, or to call another node (``rpc``).

    A name that ends in ``*`` is a pattern: it matches all names that begin with the rest. ``mode``
    is "W" (send), "R" (receive), "RW", for a topic also "O" (observe), and for a queue also "A"
    (administer: RW, and change its settings or remove it). The default is "RW", for ``rpc`` "W".
    ``role`` is the PostgreSQL role that may act as the node (default: the role of the Django
    connection). ``timeout`` is how long large bodies and large answers are stored: a timedelta
    or a number of seconds.

    Raises ValueError unless exactly one of ``topic``, ``queue`` and ``rpc`` is given, the mode is
    valid for this type of rule, and the timeout is positive.
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
            names = " and ".join(given) or "none"
            raise ValueError(f"a rule needs one of topic, queue and rpc, but this rule has {names}")
        if seconds_of(self.timeout, "timeout") <= 0:
            raise ValueError(f"the timeout of a rule must be positive, not {self.timeout!r}")
        if self.mode and self.mode not in MODES[self.type]:
            raise ValueError(
                f"mode {self.mode!r} is not valid for a rule of type {self.type}: use"
                f" {' or '.join(MODES[self.type])}"
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
    def mode_and_seconds(self) -> tuple[str, int]:
        """The mode, or its default, and the timeout in whole seconds, rounded up."""
        mode = self.mode or ("W" if self.type == "Rpc" else "RW")
        return mode, math.ceil(seconds_of(self.timeout, "timeout"))


def apply(rules: Iterable[Rule], *, using: str | None = None) -> int:
    """Add rules; if a rule exists, set its mode and timeout. Return how many rows changed.

    All other rules stay. Safe to repeat, for instance in a ``post_migrate`` receiver.
    """
    with connections[resolve_alias(using)].cursor() as cursor:
        return sum(_execute(cursor, _UPSERT, (*rule.key, *rule.mode_and_seconds)) for rule in rules)


def remove(rules: Iterable[Rule], *, using: str | None = None) -> int:
    """Remove rules, whatever their modes and timeouts; return how many existed."""
    with connections[resolve_alias(using)].cursor() as cursor:
        return sum(_execute(cursor, _REMOVE, rule.key) for rule in rules)


def allow(rule: Rule, *, using: str | None = None) -> str:
    """Add the rule; if it exists, add the mode and set the timeout. Return the resulting mode.

    Raises ValueError if this would combine "O" with another mode, which needs two rules.
    """
    alias = resolve_alias(using)
    with transaction.atomic(alias), connections[alias].cursor() as cursor:
        current, (added, seconds) = _lock_and_read_mode(cursor, rule), rule.mode_and_seconds
        modes = {*current, *added}
        mode = "A" if "A" in modes else "".join(letter for letter in "RWO" if letter in modes)
        if mode not in MODES[rule.type]:
            raise ValueError(
                f"{rule.node!r} has mode {current} for {rule.key[3]!r}, and a rule cannot combine O"
                " with another mode: add a second rule with a pattern, or for a different node"
            )
        _execute(cursor, _UPSERT, (*rule.key, mode, seconds))
    return mode


def deny(rule: Rule, *, using: str | None = None) -> str | None:
    """Remove the mode of ``rule`` from the existing rule; return the remaining mode.

    If no mode remains, remove the rule and return "". If there is no rule, return None. If the
    existing rule has mode A, removing A leaves RW, removing R leaves W, and removing W leaves R.
    """
    alias = resolve_alias(using)
    with transaction.atomic(alias), connections[alias].cursor() as cursor:
        current, (removed, _) = _lock_and_read_mode(cursor, rule), rule.mode_and_seconds
        # A includes R and W. Removing any of the three removes A.
        modes = "RW" if current == "A" else current
        remaining = "".join(letter for letter in modes if letter not in removed)
        if remaining:
            _execute(cursor, _SET_MODE, (remaining, *rule.key))
        elif current:
            _execute(cursor, _REMOVE, rule.key)
    return remaining if current else None


def configure_queue(
    queue: str,
    *,
    node: str,
    max_tries: int | None = None,
    dead_letter_queue: str | None = None,
    key_timeout: Duration | None = None,
    using: str | None = None,
) -> QueueSettings:
    """Change settings of a queue as ``node``, which needs a rule of mode A; return all settings.

    Creates the queue if it does not exist. None leaves a setting unchanged, and ``max_tries=0``
    means no maximum. Safe to repeat. Raises MessagesError, for instance if the rule is missing.
    """
    call = queue_calls.configure_queue(
        node,
        queue,
        max_tries=max_tries,
        dead_letter_queue=dead_letter_queue,
        key_timeout=key_timeout,
    )
    return run(call, using)


def _lock_and_read_mode(cursor: CursorWrapper, rule: Rule) -> str:
    """Lock the existing rule; return its mode, or "" if there is no rule."""
    cursor.execute(_LOCK_AND_READ_MODE, rule.key)
    row = cursor.fetchone()
    return row[0] if row else ""


def _execute(cursor: CursorWrapper, statement: str, parameters: tuple[object, ...]) -> int:
    cursor.execute(statement, parameters)
    return cursor.rowcount
