"""Registration of a session: its nodes and topics, which a reconnect restores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from psqlmessages.client import calls
from psqlmessages.client.calls import Call

# Functions by which a node joins a topic.
JOIN_CALLS: Final[dict[str, Callable[[str], Call[bool]]]] = {
    "topic_listen": calls.topic_listen,
    "topic_notify": calls.topic_notify,
    "topic_observe": calls.topic_observe,
}
# Functions by which a node leaves a topic, and the function that each undoes.
UNDOES: Final = {
    "topic_unlisten": "topic_listen",
    "topic_unnotify": "topic_notify",
    "topic_unobserve": "topic_observe",
}


class Registration:
    """Nodes of a session, and their joins: pairs of function ("topic_listen", …) and topic."""

    def __init__(self, *idents: str) -> None:
        # By node, in order of registration: its joins; False if an administrator has ended a join.
        self._nodes: dict[str, dict[tuple[str, str], bool]] = {ident: {} for ident in idents}
        self.acting = next(iter(idents), "")

    @property
    def idents(self) -> tuple[str, ...]:
        """Names of the registered nodes, in order of registration."""
        return tuple(self._nodes)

    def on_call_succeeded(self, function: str, subject: str, ident: str = "") -> None:
        """Record a successful call of ``ident``, or of the acting node if it is empty.

        ``subject`` is the node of ``init``, ``use`` and ``deinit``, and otherwise the topic.
        """
        if function == "init":
            self._nodes.setdefault(subject, {})
            self.acting = subject
        elif function == "use":
            self.acting = subject
        elif function == "deinit":
            self._forget(subject)
        elif function in JOIN_CALLS:
            if (joins := self._nodes.get(ident or self.acting)) is not None:
                joins[function, subject] = True
        else:
            self.drop(ident or self.acting, UNDOES[function], subject)

    def on_event(self, event: str, ident: str, topic: str) -> None:
        """Record an event: an administrator may have ended or restored a join of our nodes."""
        joins = self._nodes.get(ident, {})
        if event == "disconnect":
            joins.clear()
            return
        # Ignore joins that the node did not make: anyone who knows the channel can forge events.
        join = (UNDOES.get(event, event), topic)
        if join in joins:
            joins[join] = event in JOIN_CALLS

    def calls_to_restore(self) -> list[tuple[str, list[Call[Any]]]]:
        """Return each node with the calls that join its topics, in the order of registration."""
        return [
            (
                ident,
                [JOIN_CALLS[function](topic) for function, topic in self._active_joins(ident)],
            )
            for ident in self._nodes
        ]

    def joins(self) -> list[tuple[str, str, str]]:
        """Return the joins of all nodes as (ident, function, topic), ordered by topic."""
        return sorted(
            ((ident, *join) for ident in self._nodes for join in self._active_joins(ident)),
            key=lambda join: (join[2], join[0], join[1]),
        )

    def has(self, ident: str, function: str, topic: str) -> bool:
        """Return whether a node has joined a topic with this function, and not left it."""
        return self._nodes.get(ident, {}).get((function, topic), False)

    def drop(self, ident: str, function: str, subject: str) -> None:
        """Forget a node (``function`` is "init", ``subject`` the node) or one of its joins."""
        if function == "init":
            self._forget(ident)
        else:
            self._nodes.get(ident, {}).pop((function, subject), None)

    def _active_joins(self, ident: str) -> list[tuple[str, str]]:
        return [join for join, is_active in self._nodes.get(ident, {}).items() if is_active]

    def _forget(self, ident: str) -> None:
        self._nodes.pop(ident, None)
        if self.acting == ident:
            self.acting = next(reversed(self._nodes), "")
