"""Refused calls of this process, counted by node and missing rule. No I/O."""

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

# Callers choose the names, so limit how many missing rules are counted, and count the rest as
# OTHERS.
MAX_RULES: Final = 500
_ERROR_CLASSES: Final = (
    DestinationNotAuthorized,
    IdentNotAuthorized,
    IdentNotExistent,
    ModeNotAuthorized,
    TopicNotExistent,
)


class NeededRule(NamedTuple):
    """A rule that a node lacks; fields are "" if the error does not name them."""

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
        if not isinstance(error, _ERROR_CLASSES):
            return
        with self._lock:
            self.total += 1
        self.add(Counter([needed_rule(ident, error)]))

    def take(self) -> Counter[NeededRule]:
        """Return the counts since the last call of this method."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return counts

    def add(self, counts: Counter[NeededRule]) -> None:
        """Add counts, such as those from ``take`` that could not be stored in the database."""
        with self._lock:
            for rule, count in counts.items():
                is_full = rule not in self._counts and len(self._counts) >= MAX_RULES
                self._counts[OTHERS if is_full else rule] += count


def needed_rule(ident: str, error: MessagesError) -> NeededRule:
    """Return the rule that the caller lacks, as far as the error names it."""
    values = error.values
    named_ident = values.get("ident", "")
    if isinstance(error, IdentNotAuthorized) or named_ident == ident:
        return NeededRule(named_ident, "", "", "")
    if isinstance(error, IdentNotExistent):
        return NeededRule(ident, "Rpc", named_ident, "W")
    type_ = values.get("type", "Topic")
    return NeededRule(ident, type_, values.get("dest", ""), values.get("mode", ""))


refused_calls: Final = RefusedCalls()
