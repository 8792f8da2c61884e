"""Routes: which receiver has which node, and which nodes a topic's messages are for. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from psqlmessages.client.handlers import matches
from psqlmessages.client.registration import ENDS, MAKERS
from psqlmessages.relay.frames import Receiver

LISTEN, OBSERVE = "topic_listen", "topic_observe"
_CACHED_TOPICS: Final = 1000


@dataclass(slots=True, eq=False)
class Owner:
    """A node and the receiver that has it.

    ``since`` counts the arrivals that came before and so are for an earlier node of this name.
    """

    ident: str
    receiver: Receiver
    since: int
    wants_events: bool
    wants_bodies: bool = True
    is_registered: bool = False


class Routes:
    """The nodes of a hub. What they do follows the answers and events of PostgreSQL."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._curious: set[str] = set()
        # Receivers need not be hashable.
        self._idents: dict[int, dict[str, None]] = {}
        self._joined: dict[str, set[tuple[str, str]]] = {}
        self._members: dict[tuple[str, str], dict[str, None]] = {}
        self._patterns: list[str] = []
        self._receivers: dict[str, tuple[Receiver, ...]] = {}

    # Who has which node

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def receivers(self) -> list[Receiver]:
        """Every receiver that has a node, once."""
        return _distinct(self._owners.values())

    def owner(self, ident: str) -> Owner | None:
        """Find who has a node."""
        return self._owners.get(ident)

    def has(self, ident: str, receiver: Receiver) -> bool:
        """Whether a node is this receiver's."""
        owner = self._owners.get(ident)
        return owner is not None and owner.receiver is receiver

    def idents_of(self, receiver: Receiver) -> tuple[str, ...]:
        """List a receiver's nodes."""
        return tuple(self._idents.get(id(receiver), ()))

    def registered(self) -> Iterator[str]:
        """Give the nodes that PostgreSQL knows."""
        return (owner.ident for owner in self._owners.values() if owner.is_registered)

    @property
    def is_anyone_curious(self) -> bool:
        """Whether any node wants events about others."""
        return bool(self._curious)

    def claim(self, ident: str, receiver: Receiver, since: int, *, wants_events: bool) -> Owner:
        """Give a node to a receiver, which keeps it where it had it already."""
        if (owner := self._owners.get(ident)) is None:
            owner = self._owners[ident] = Owner(ident, receiver, since, wants_events)
            self._idents.setdefault(id(receiver), {})[ident] = None
        if owner.receiver is receiver:
            owner.wants_events = wants_events
            (self._curious.add if wants_events else self._curious.discard)(ident)
        return owner

    def release(self, ident: str) -> Owner | None:
        """Take a node from its receiver, with all that it does."""
        if (owner := self._owners.pop(ident, None)) is None:
            return None
        self._curious.discard(ident)
        own = self._idents[id(owner.receiver)]
        del own[ident]
        if not own:
            del self._idents[id(owner.receiver)]
        for function, topic in tuple(self._joined.get(ident, ())):
            self._leave(ident, function, topic)
        return owner

    # What nodes do

    def ran(self, ident: str, function: str, topic: str) -> None:
        """Take note of a topic function that succeeded, or was undone by an administrator."""
        if ident not in self._owners:
            return
        if function in MAKERS:
            self._join(ident, function, topic)
        elif function in ENDS:
            self._leave(ident, ENDS[function], topic)

    def does(self, ident: str, function: str, topic: str) -> bool:
        """Whether a node listens to a topic, notifies it or observes it, by that name."""
        return (function, topic) in self._joined.get(ident, ())

    def nodes_for(self, topic: str) -> list[Owner]:
        """List the nodes that get a topic's messages."""
        members = [self._members.get((LISTEN, topic), {})]
        members += (
            self._members[OBSERVE, pattern] for pattern in self._patterns if matches(pattern, topic)
        )
        return [self._owners[ident] for own in members for ident in own]

    def receivers_for(self, topic: str) -> tuple[Receiver, ...]:
        """Give the receivers of a topic's messages, each once."""
        found = self._receivers.get(topic)
        if found is None:
            if len(self._receivers) >= _CACHED_TOPICS:
                self._receivers.clear()
            found = self._receivers[topic] = tuple(_distinct(self.nodes_for(topic)))
        return found

    def _join(self, ident: str, function: str, topic: str) -> None:
        self._joined.setdefault(ident, set()).add((function, topic))
        self._members.setdefault((function, topic), {})[ident] = None
        self._changed(function, topic)

    def _leave(self, ident: str, function: str, topic: str) -> None:
        members = self._members.get((function, topic), {})
        if ident not in members:
            return
        del members[ident]
        if not members:
            del self._members[function, topic]
        joined = self._joined[ident]
        joined.remove((function, topic))
        if not joined:
            del self._joined[ident]
        self._changed(function, topic)

    def _changed(self, function: str, topic: str) -> None:
        if function == LISTEN:
            self._receivers.pop(topic, None)
        elif function == OBSERVE:
            self._patterns = [name for kind, name in self._members if kind == OBSERVE]
            self._receivers.clear()


def _distinct(owners: Iterable[Owner]) -> list[Receiver]:
    return list({id(owner.receiver): owner.receiver for owner in owners}.values())
