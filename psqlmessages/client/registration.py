"""Registration of a session: its nodes and topics, to be restored after a reconnect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from psqlmessages.client import calls
from psqlmessages.client.calls import Call

CALL_BUILDERS: Final[dict[str, Callable[[str], Call[bool]]]] = {
    "topic_listen": calls.topic_listen,
    "topic_notify": calls.topic_notify,
    "topic_observe": calls.topic_observe,
}
ENDS: Final = {
    "topic_unlisten": "topic_listen",
    "topic_unnotify": "topic_notify",
    "topic_unobserve": "topic_observe",
}


class Registration:
    """Nodes of a session, and the topics they listen to, send to and observe."""

    def __init__(self, ident: str = "") -> None:
        # In the order of registration, which a replay repeats. False: another session has ended it.
        self._nodes: dict[str, dict[tuple[str, str], bool]] = {ident: {}} if ident else {}
        self.acting = ident

    @property
    def idents(self) -> tuple[str, ...]:
        """Names of the registered nodes, in order of registration."""
        return tuple(self._nodes)

    def __contains__(self, ident: str) -> bool:
        return ident in self._nodes

    def topics(self, function: str) -> frozenset[str]:
        """Return the topics for which the acting node has called a function ("topic_listen", …)."""
        own = self._joins_of(self.acting)
        return frozenset(topic for name, topic in own if name == function)

    def on_call_succeeded(self, function: str, subject: str, ident: str = "") -> None:
        """Record a successful call of ``ident``, or of the acting node."""
        if function == "init":
            self._nodes.setdefault(subject, {})
            self.acting = subject
        elif function == "use":
            self.acting = subject
        elif function == "deinit":
            self._forget(subject)
        elif (own := self._nodes.get(ident or self.acting)) is None:
            return
        elif function in CALL_BUILDERS:
            own[function, subject] = True
        else:
            own.pop((ENDS[function], subject), None)

    def on_event(self, event: str, ident: str, topic: str) -> None:
        """Record an event: an administrator may have ended a registration of our nodes."""
        own = self._nodes.get(ident, {})
        if event == "disconnect":
            own.clear()
            return
        # Only registrations that the node made: anyone who knows the channel can forge events.
        join = (ENDS.get(event, event), topic)
        if join in own:
            own[join] = event in CALL_BUILDERS

    def replay(self) -> list[tuple[str, list[Call[Any]]]]:
        """Return for each node the calls that follow its init, in the order of registration."""
        return [
            (ident, [CALL_BUILDERS[function](topic) for function, topic in self._joins_of(ident)])
            for ident in self._nodes
        ]

    def joins(self) -> list[tuple[str, str, str]]:
        """List the registrations of all nodes as (ident, function, topic), ordered by topic."""
        return sorted(
            ((ident, *join) for ident in self._nodes for join in self._joins_of(ident)),
            key=lambda join: (join[2], join[0], join[1]),
        )

    def has(self, ident: str, function: str, topic: str) -> bool:
        """Return whether a node has called a function for a topic and not undone it."""
        return self._nodes.get(ident, {}).get((function, topic), False)

    def drop(self, ident: str, function: str, subject: str) -> None:
        """Forget a registration that cannot be restored."""
        if function == "init":
            self._forget(ident)
        else:
            self._nodes.get(ident, {}).pop((function, subject), None)

    def _joins_of(self, ident: str) -> list[tuple[str, str]]:
        return [join for join, holds in self._nodes.get(ident, {}).items() if holds]

    def _forget(self, ident: str) -> None:
        self._nodes.pop(ident, None)
        if self.acting == ident:
            self.acting = next(reversed(self._nodes), "")
