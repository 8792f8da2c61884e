"""Registration of a session: its nodes and their joins of topics, which a reconnect restores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from psqlmessages.client import calls
from psqlmessages.client.calls import Call

# Functions by which a node joins a topic.
JOIN_CALLS: Final[dict[str, Callable[[str], Call[bool]]]] = {
    "topic_listen": calls.topic_listen,
    "topic_notify": calls.topic_notify,
    "topic_observe": calls.topic_observe,
}
# Functions by which a node leaves a topic; the value is the join function that each one undoes.
JOIN_BY_LEAVE: Final = {
    "topic_unlisten": "topic_listen",
    "topic_unnotify": "topic_notify",
    "topic_unobserve": "topic_observe",
}


class Registration:
    """Nodes of a session, and their joins. A join is a function ("topic_listen", …) and a topic."""

    def __init__(self, *idents: str) -> None:
        # The joins of each node, oldest node first. False: an administrator has ended the join.
        self._nodes: dict[str, dict[tuple[str, str], bool]] = {ident: {} for ident in idents}
        self.acting_node = next(iter(idents), "")

    @property
    def idents(self) -> tuple[str, ...]:
        """Names of the registered nodes, in order of registration."""
        return tuple(self._nodes)

    def on_call_succeeded(self, function: str, subject: str, ident: str = "") -> None:
        """Record a successful call of the node ``ident``; if that is "", of the acting node.

        ``subject`` is the node of ``init``, ``use`` and ``deinit``, and otherwise the topic.
        """
        if function == "init":
            self._nodes.setdefault(subject, {})
            self.acting_node = subject
        elif function == "use":
            self.acting_node = subject
        elif function == "deinit":
            self._forget(subject)
        elif function in JOIN_CALLS:
            if (joins := self._nodes.get(ident or self.acting_node)) is not None:
                joins[function, subject] = True
        else:
            self.drop(ident or self.acting_node, JOIN_BY_LEAVE[function], subject)

    def on_event(self, event: str, ident: str, topic: str) -> None:
        """Record that an administrator has ended or restored a join, if the event reports this.

        The event "disconnect" ends all joins of the node.
        """
        joins = self._nodes.get(ident, {})
        if event == "disconnect":
            joins.clear()
            return
        # Ignore joins that the node did not make: anyone who knows the channel can forge events.
        join = (JOIN_BY_LEAVE.get(event, event), topic)
        if join in joins:
            joins[join] = event in JOIN_CALLS

    def join_calls(self, ident: str) -> list[Call[bool]]:
        """Return the calls that restore the active joins of a node."""
        return [JOIN_CALLS[function](topic) for function, topic in self._active_joins(ident)]

    def joins(self) -> list[tuple[str, str, str]]:
        """Return the active joins of all nodes as (ident, function, topic), ordered by topic."""
        return sorted(
            ((ident, *join) for ident in self._nodes for join in self._active_joins(ident)),
            key=lambda join: (join[2], join[0], join[1]),
        )

    def has_join(self, ident: str, function: str, topic: str) -> bool:
        """Return whether a node has this join, and no administrator has ended it."""
        return self._nodes.get(ident, {}).get((function, topic), False)

    def drop(self, ident: str, function: str, subject: str) -> None:
        """Forget the join of the topic ``subject``; if ``function`` is "init", the whole node."""
        if function == "init":
            self._forget(ident)
        else:
            self._nodes.get(ident, {}).pop((function, subject), None)

    def _active_joins(self, ident: str) -> list[tuple[str, str]]:
        return [join for join, is_active in self._nodes.get(ident, {}).items() if is_active]

    def _forget(self, ident: str) -> None:
        self._nodes.pop(ident, None)
        if self.acting_node == ident:
            self.acting_node = next(reversed(self._nodes), "")
