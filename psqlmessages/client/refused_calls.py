"""Refused calls of this process: how many calls of which node lacked which rule. No I/O."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Final, NamedTuple

from psqlmessages.exceptions import (
    DestinationNotAuthorized,
    IdentNotAuthorized,
    IdentNotExistent,
    MessagesError,
    ModeNotAuthorized,
    TopicNotExistent,
)

# Callers choose the names, so limit their number: the calls of further ones are counted together.
MAX_RULES: Final = 500
_KINDS: Final = (
    DestinationNotAuthorized,
    IdentNotAuthorized,
    IdentNotExistent,
    ModeNotAuthorized,
    TopicNotExistent,
)


class NeededRule(NamedTuple):
    """A rule that a node lacks; ``dest`` and ``mode`` are "" if the error does not name them."""

    ident: str
    type: str
    dest: str
    mode: str


OTHERS: Final = NeededRule("", "", "", "")


class RefusedCalls:
    """Counts refused calls by missing rule. Threads may share it."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: Counter[NeededRule] = Counter()
        self._lock = Lock()

    def record(self, ident: str, error: object) -> None:
        """Count a call of a node that ended with this error, if it was refused."""
        if not isinstance(error, _KINDS):
            return
        rule = needed_rule(ident, error)
        with self._lock:
            self.total += 1
            is_full = rule not in self._counts and len(self._counts) >= MAX_RULES
            self._counts[OTHERS if is_full else rule] += 1

    def take(self) -> Counter[NeededRule]:
        """Return the counts since the last call of this method."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return counts

    def add(self, counts: Counter[NeededRule]) -> None:
        """Add counts that were taken, but could not be stored."""
        with self._lock:
            for rule, count in counts.items():
                is_full = rule not in self._counts and len(self._counts) >= MAX_RULES
                self._counts[OTHERS if is_full else rule] += count


def needed_rule(ident: str, error: MessagesError) -> NeededRule:
    """Return the rule that would allow a refused call."""
    values = error.values
    named = values.get("ident", "")
    if isinstance(error, IdentNotAuthorized) or named == ident:
        return NeededRule(named, "", "", "")
    if isinstance(error, IdentNotExistent):
        return NeededRule(ident, "Rpc", named, "W")
    type_ = values.get("type", "Topic")
    return NeededRule(ident, type_, values.get("dest", ""), values.get("mode", ""))


refused_calls: Final = RefusedCalls()
