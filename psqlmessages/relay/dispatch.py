"""Dispatcher: from a notification to the sockets that receive it, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any, Final

from psqlmessages import wire
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.handlers import matches
from psqlmessages.client.messages import CONNECTION_LOST, RECONNECTED, SYS, TOPIC
from psqlmessages.client.node_state import Notification
from psqlmessages.client.registration import ENDS, MAKERS
from psqlmessages.relay import hub_answers
from psqlmessages.relay.frames import HubMessage, Receiver
from psqlmessages.relay.hub_answers import call_as_answer, log, logger

# Routes: which receiver has which node, and which nodes a topic's messages are for. No I/O.

LISTEN, OBSERVE = "topic_listen", "topic_observe"
_CACHED_TOPICS: Final = 1000


@dataclass(slots=True, eq=False)
class NodeEntry:
    """A node and the receiver that has it.

    ``since`` counts the arrivals that came before and so are for an earlier node of this name.
    """

    ident: str
    receiver: Receiver
    since: int
    wants_events: bool
    wants_bodies: bool = True
    is_registered: bool = False


class NodeRegistry:
    """The nodes of a hub. What they do follows the answers and events of PostgreSQL."""

    def __init__(self) -> None:
        self._owners: dict[str, NodeEntry] = {}
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

    def owner(self, ident: str) -> NodeEntry | None:
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

    def claim(self, ident: str, receiver: Receiver, since: int, *, wants_events: bool) -> NodeEntry:
        """Give a node to a receiver, which keeps it where it had it already."""
        if (owner := self._owners.get(ident)) is None:
            owner = self._owners[ident] = NodeEntry(ident, receiver, since, wants_events)
            self._idents.setdefault(id(receiver), {})[ident] = None
        if owner.receiver is receiver:
            owner.wants_events = wants_events
            (self._curious.add if wants_events else self._curious.discard)(ident)
        return owner

    def release(self, ident: str) -> NodeEntry | None:
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

    def on_call_succeeded(self, ident: str, function: str, topic: str) -> None:
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

    def nodes_for(self, topic: str) -> list[NodeEntry]:
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


def _distinct(owners: Iterable[NodeEntry]) -> list[Receiver]:
    return list({id(owner.receiver): owner.receiver for owner in owners}.values())


# Audience: which nodes of a hub hear of the events that do not name them.

Audience = frozenset[str]

_NOBODY: Final[Audience] = frozenset()
# As which nodes to ask: one may have been disconnected a moment ago.
_ASKERS: Final = 3
_NOT_HERE: Final = ("50", "53")


class Audiences:
    """Who hears of the events of one batch; asked once for each subject, and kept no longer."""

    def __init__(self, gateway: Gateway, routes: NodeRegistry) -> None:
        self._gateway = gateway
        self._routes = routes
        self._found: dict[tuple[str, str], Audience] = {}

    async def ask(self, batch: Iterable[Notification]) -> None:
        """Ask for all events of a batch that do not say whom they are for."""
        self._found = {}
        if not self._routes.is_anyone_curious:
            return
        subjects = dict.fromkeys(
            _subject(notification.header)
            for notification in batch
            if "Nodes" not in notification.header and _is_event(notification.header)
        )
        nodes = await asyncio.gather(*(self._ask(*subject) for subject in subjects))
        self._found = dict(zip(subjects, nodes, strict=True))

    def of(self, header: dict[str, Any]) -> Audience:
        """Tell whom an event of the batch is for, but for the node that it is about."""
        return self._found.get(_subject(header), _NOBODY) - {header.get("Ident")}

    async def _ask(self, field: str, name: str) -> Audience:
        event = wire.serialize({"Type": "Sys", "Evt": "audience", field: name})
        for ident in tuple(islice(self._routes.registered(), _ASKERS)):
            answer = await call_as_answer(self._gateway, ident, "audience", event)
            if answer["Err"] not in _NOT_HERE:
                return frozenset(answer.get("Nodes", ()))
        return _NOBODY


def _is_event(header: dict[str, Any]) -> bool:
    return header["Type"] == "Sys" and ("Topic" in header or "Ident" in header)


def _subject(header: dict[str, Any]) -> tuple[str, str]:
    # Without its node, one answer serves all events about a topic.
    field = "Topic" if "Topic" in header else "Ident"
    return field, header.get(field, "")


# What else runs in this loop waits so long at most.
_SLICE_SECONDS: Final = 0.01
_FETCH_SECONDS: Final = 10
# As which nodes a body is fetched, one after the other: rights may have ended a moment ago.
_FETCHERS: Final = 5
_EXPIRED: Final = "12"


@dataclass(slots=True)
class HubCounters:
    """What a hub has done since it was made."""

    received: int = 0
    delivered: int = 0
    fetched: int = 0
    lost_bodies: int = 0
    failures: int = 0
    lost_connections: int = 0
    reconnects: int = 0


class Dispatcher:
    """One gateway's arrivals on their way to receivers.

    ``let_go`` is called for each node that an administrator has disconnected.
    """

    def __init__(
        self,
        gateway: Gateway,
        routes: NodeRegistry,
        counters: HubCounters,
        let_go: Callable[[str], None],
    ) -> None:
        self._gateway = gateway
        self._routes = routes
        self._counters = counters
        self._let_go = let_go
        self._audiences = Audiences(gateway, routes)
        self._seen = 0

    async def run(self) -> None:
        """Deliver until the gateway is closed."""
        rested_at = monotonic()
        async for batch in self._gateway.batches():
            await self._audiences.ask(batch)
            for notification in batch:
                self._seen += 1
                self._counters.received += 1
                try:
                    await self._dispatch(notification)
                except Exception:  # noqa: BLE001 - logged and counted; the next may be sound
                    self._counters.failures += 1
                    logger.exception("%s: a notification was not delivered", self._gateway.name)
                if monotonic() - rested_at > _SLICE_SECONDS:
                    await asyncio.sleep(0)
                    rested_at = monotonic()

    async def _dispatch(self, notification: Notification) -> None:
        at, header = time.time(), notification.header
        if header["Type"] == SYS:
            await self._deliver_event(notification, at)
        elif header["Type"] == TOPIC:
            nodes = self._routes.nodes_for(header["To"]) if notification.is_kept else []
            if self._routes.receivers_for(header["To"]):
                fetchers = (node.ident for node in nodes if node.wants_bodies)
                frame = await self._framed(notification, fetchers, at)
                # Asked again: a right may have ended while the body was fetched.
                self._deliver(frame, self._routes.receivers_for(header["To"]))
        elif (owner := self._owner(header["To"])) is not None:
            frame = await self._framed(notification, (owner.ident,), at)
            if self._owner(header["To"]) is owner:
                self._deliver(frame, (owner.receiver,))

    def _deliver(self, frame: HubMessage, receivers: Iterable[Receiver]) -> None:
        delivered = 0
        for receiver in receivers:
            try:
                receiver.deliver(frame)
            except Exception:  # noqa: BLE001 - logged and counted; the others are to get it
                self._counters.failures += 1
                logger.exception("%s: a receiver failed", self._gateway.name)
            else:
                delivered += 1
        self._counters.delivered += delivered

    def _owner(self, ident: str) -> NodeEntry | None:
        """Find who has a node, unless the arrival is for an earlier one of this name."""
        owner = self._routes.owner(ident)
        return owner if owner is not None and owner.since < self._seen else None

    # Bodies

    async def _framed(
        self, notification: Notification, idents: Iterable[str], at: float
    ) -> HubMessage:
        if not notification.is_kept:
            return HubMessage(notification.header, notification.text, at)
        fetchers = tuple(islice(idents, _FETCHERS))
        if not fetchers:
            return HubMessage(notification.header, None, at)
        answer = await self._fetch(notification.payload, fetchers)
        if answer["Err"] == "0":
            self._counters.fetched += 1
            return HubMessage(notification.header, answer["Body"], at)
        self._counters.lost_bodies += 1
        log.warning("%s: a body was not fetched: %s", self._gateway.name, answer["Errstr"])
        return HubMessage({**notification.header, **answer}, None, at)

    async def _fetch(self, payload: str, idents: tuple[str, ...]) -> Answer:
        answer = hub_answers.away()
        try:
            async with asyncio.timeout(_FETCH_SECONDS):
                for ident in idents:
                    answer = await self._fetch_as(ident, payload)
                    if answer["Err"] in ("0", _EXPIRED):
                        break
        except TimeoutError:
            pass
        return answer

    async def _fetch_as(self, ident: str, payload: str) -> Answer:
        while True:
            answer = await call_as_answer(self._gateway, ident, "get_data", payload)
            if answer["Err"] != "59" or self._gateway.is_closed:
                return answer

    # Events

    async def _deliver_event(self, notification: Notification, at: float) -> None:
        header = notification.header
        if header["Evt"] in (CONNECTION_LOST, RECONNECTED):
            self._deliver_local(notification, at)
            return
        owner = self._owner(header.get("Ident", ""))
        named = header.get("Nodes")
        idents = set(named if isinstance(named, list) else self._audiences.of(header))
        concerned = [self._owner(ident) for ident in sorted(idents)]
        if owner is not None and await self._was_done_to(owner, header):
            self._follow(owner, header)
            concerned.append(owner)
        # A receiver with several nodes gets it once.
        receivers = {
            id(node.receiver): node.receiver
            for node in concerned
            if node is not None and (node.wants_events or node is owner)
        }
        self._deliver(HubMessage(header, None, at), receivers.values())

    def _deliver_local(self, notification: Notification, at: float) -> None:
        header = notification.header
        if notification.away is not None:
            self._counters.reconnects += 1
            header = {**header, "Away": round(notification.away.total_seconds(), 3)}
        else:
            self._counters.lost_connections += 1
        self._deliver(HubMessage(header, None, at), self._routes.receivers)

    async def _was_done_to(self, owner: NodeEntry, header: dict[str, Any]) -> bool:
        """Whether an event tells that an administrator ended what one of our nodes did."""
        event, topic = header["Evt"], header.get("Topic", "")
        if event != "disconnect" and not (
            event in ENDS and self._routes.does(owner.ident, ENDS[event], topic)
        ):
            return False
        if "Nodes" in header:
            # A node is told of what it did not do itself.
            return bool(owner.ident in header["Nodes"])
        if event == "topic_unobserve":
            # Nobody else is told of it.
            return True
        return await self._is_over(owner.ident, event, topic)

    async def _is_over(self, ident: str, event: str, topic: str) -> bool:
        """Ask: without Nodes the event may as well tell others what the node did itself before.

        Where the connection is lost meanwhile, its return shows what is over.
        """
        if event == "disconnect":
            answer = await call_as_answer(self._gateway, ident, "use")
            return answer["Err"] not in ("0", *hub_answers.UNANSWERED)
        answer = await call_as_answer(self._gateway, ident, "topic_status", topic)
        if answer["Err"] in hub_answers.UNANSWERED:
            return False
        field = "Listeners" if event == "topic_unlisten" else "Notifiers"
        return bool(ident not in answer.get(field, ()))

    def _follow(self, owner: NodeEntry, header: dict[str, Any]) -> None:
        event, topic = header["Evt"], header.get("Topic", "")
        if event == "disconnect":
            self._let_go(owner.ident)
            return
        self._routes.on_call_succeeded(owner.ident, event, topic)
        self._gateway.forget(owner.ident, ENDS[event], topic)
