"""Registration of a session: what a new session must restore after a reconnect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from psqlmessages.client import calls
from psqlmessages.client.calls import Call

MAKERS: Final[dict[str, Callable[[str], Call[bool]]]] = {
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
    """Idents of a session, and what each of them listens to, sends to and observes."""

    def __init__(self, ident: str = "") -> None:
        # In the order in which all is registered again. False: somebody else has ended it.
        self._nodes: dict[str, dict[tuple[str, str], bool]] = {ident: {}} if ident else {}
        self.acting = ident

    @property
    def idents(self) -> tuple[str, ...]:
        """Idents registered, in the order in which they were."""
        return tuple(self._nodes)

    def __contains__(self, ident: str) -> bool:
        return ident in self._nodes

    def topics(self, function: str) -> frozenset[str]:
        """Topics on which the acting node has called a function, e.g. "topic_listen"."""
        own = self._joins_of(self.acting)
        return frozenset(topic for name, topic in own if name == function)

    def on_call_succeeded(self, function: str, subject: str, ident: str = "") -> None:
        """Take note of a call that succeeded, made as ``ident`` or as the acting node."""
        if function == "init":
            self._nodes.setdefault(subject, {})
            self.acting = subject
        elif function == "use":
            self.acting = subject
        elif function == "deinit":
            self._forget(subject)
        else:
            self._note(ident or self.acting, function, subject)

    def on_event(self, event: str, ident: str, topic: str) -> None:
        """Take note of an event: an administrator may have ended what one of our nodes did."""
        own = self._nodes.get(ident, {})
        if event == "disconnect":
            own.clear()
            return
        # Of what the node itself has done only: whoever knows the channel can forge events.
        join = (ENDS.get(event, event), topic)
        if join in own:
            own[join] = event in MAKERS

    def replay(self) -> list[tuple[str, list[Call[Any]]]]:
        """Per ident, the calls that follow its init, in the order in which they were first made."""
        return [
            (ident, [MAKERS[function](topic) for function, topic in self._joins_of(ident)])
            for ident in self._nodes
        ]

    def joins(self) -> list[tuple[str, str, str]]:
        """List what all nodes do as ident, function and topic, ordered by topic."""
        return sorted(
            ((ident, *join) for ident in self._nodes for join in self._joins_of(ident)),
            key=lambda join: (join[2], join[0], join[1]),
        )

    def has(self, ident: str, function: str, topic: str) -> bool:
        """Whether a node has called a function on a topic and not ended that."""
        return self._nodes.get(ident, {}).get((function, topic), False)

    def drop(self, ident: str, function: str, subject: str) -> None:
        """Forget what cannot be registered again."""
        if function == "init":
            self._forget(ident)
        else:
            self._nodes.get(ident, {}).pop((function, subject), None)

    def _joins_of(self, ident: str) -> list[tuple[str, str]]:
        return [join for join, holds in self._nodes.get(ident, {}).items() if holds]

    def _note(self, ident: str, function: str, topic: str) -> None:
        own = self._nodes.get(ident)
        if own is None:
            return
        if function in MAKERS:
            own[function, topic] = True
        else:
            own.pop((ENDS[function], topic), None)

    def _forget(self, ident: str) -> None:
        self._nodes.pop(ident, None)
        if self.acting == ident:
            self.acting = next(reversed(self._nodes), "")
