"""Refused calls of this process, counted by node and missing rule. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

from psqlmessages.exceptions import (
    Caller,
    DestinationNotAuthorized,
    IdentNotAuthorized,
    IdentNotExistent,
    MessagesError,
    ModeNotAuthorized,
    TopicNotExistent,
    needed_mode,
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

# The SQL functions about topics that take a node as argument. All others are about queues.
_TOPIC_CALL: Final = re.compile(
    r"messages\.(topic|publish|subscri|unsubscribe|stream_horizons|read_stream|connect_stream)"
)
# The calls that need each mode. For sizes, topic_auth, topic_status and unsubscribe, any mode
# suffices. The other calls about queues (pause, resume, remove and drain) need both W and R.
_MODE_CALLS: Final = {
    "W": re.compile(r"messages\.(topic_send|topic_(un)?notify|publish|push|rpc)"),
    "R": re.compile(
        r"messages\.(topic_(un)?listen|topic_auth|topic_status|subscri|unsubscribe|connect_stream"
        r"|stream_horizons|read_stream|pop|reserve|renew|commit|rollback|release|queue_listen|peek"
        r"|sizes)"
    ),
    "O": re.compile(r"messages\.topic_(un)?observe"),
    "A": re.compile(r"messages\.(configure_queue|remove_queue|\w+_elements)"),
}
# The second argument of these calls is a lease.
_LEASE_CALL: Final = re.compile(r"messages\.(commit|rollback|release)\b")

Params = Sequence[Any] | Mapping[str, Any]


class NeededRule(NamedTuple):
    """A rule that a node lacks; fields are "" if neither the error nor the call names them."""

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

    def record(self, ident: str, error: object, sql: str = "", params: Params = ()) -> None:
        """Count a call of a node that ended with this error, if it was refused."""
        if not isinstance(error, _ERROR_CLASSES):
            return
        with self._lock:
            self.total += 1
        self.add(Counter([needed_rule(ident, error, sql, params)]))

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


def rule_of_call(sql: str, params: Params) -> NeededRule:
    """Return the rule that a call needs; its first arguments are a node and a destination."""
    ident, dest = (*(params.values() if isinstance(params, Mapping) else params), "", "")[:2]
    if not isinstance(ident, str):
        # The pipeline has statements whose first argument is not the node.
        ident = dest = ""
    if isinstance(dest, list) and len(dest) == 1:
        (dest,) = dest
    if not isinstance(dest, str) or _LEASE_CALL.search(sql):
        dest = ""
    type_ = "Topic" if _TOPIC_CALL.search(sql) else "Queue"
    # A statement with several functions does not say which of them was refused.
    modes = [mode for mode, calls in _MODE_CALLS.items() if calls.search(sql)]
    return NeededRule(ident, type_, dest, modes[0] if len(modes) == 1 else "")


def needed_rule(ident: str, error: MessagesError, sql: str, params: Params) -> NeededRule:
    """Return the rule that the caller lacks, as far as the error and the call name it."""
    values = error.values
    named_ident = values.get("ident", "")
    if isinstance(error, IdentNotAuthorized):
        return NeededRule(named_ident, "", "", "")
    called = rule_of_call(sql, params)
    if isinstance(error, IdentNotExistent):
        if "messages.rpc" in sql:
            return NeededRule(ident, "Rpc", named_ident, "W")
        return called if called.ident == named_ident else NeededRule(named_ident, "", "", "")
    type_, dest = values.get("type", "Topic"), values.get("dest", "")
    mode = values.get("mode") or needed_mode(called.mode, called.dest, type_, dest)
    return NeededRule(ident, type_, dest, mode)


def caller_of(role: str, sql: str, params: Params) -> Caller:
    """Return the caller of a call that a role makes, for the text of its error."""
    ident, type_, dest, mode = rule_of_call(sql, params)
    return Caller(role, ident or "NODE", type_, dest or type_.upper(), mode)


refused_calls: Final = RefusedCalls()
