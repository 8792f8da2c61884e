"""Dispatcher: delivers notifications to the receivers of this process; counters of the hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any, Final

from psqlmessages import wire
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.handlers import matches
from psqlmessages.client.messages import CONNECTION_LOST, RECONNECTED, SYS, TOPIC, Notification
from psqlmessages.client.registration import CALL_BUILDERS, UNDOES
from psqlmessages.relay import hub_answers
from psqlmessages.relay.frames import HubMessage, Receiver
from psqlmessages.relay.hub_answers import call_as_answer, log, logger

# Registry: the receiver of each node, and the nodes of each topic. No I/O.

LISTEN, OBSERVE = "topic_listen", "topic_observe"
_CACHED_TOPICS: Final = 1000


@dataclass(slots=True, eq=False)
class NodeEntry:
    """A node, its receiver, and the topic functions that it has called, with their topics.

    ``since`` counts the earlier notifications, which are for an earlier node of this name.
    """

    ident: str
    receiver: Receiver
    since: int
    wants_events: bool
    wants_bodies: bool = True
    is_registered: bool = False
    joined: set[tuple[str, str]] = field(default_factory=set)


class NodeRegistry:
    """The nodes of a hub and their topics, updated by answers and events of PostgreSQL."""

    def __init__(self) -> None:
        self._owners: dict[str, NodeEntry] = {}
        self._event_nodes: set[str] = set()
        # By id(receiver): receivers may not be hashable.
        self._idents: dict[int, dict[str, None]] = {}
        self._members: dict[tuple[str, str], dict[str, NodeEntry]] = {}
        self._patterns: list[str] = []
        self._receivers: dict[str, tuple[Receiver, ...]] = {}

    # Nodes and receivers

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def receivers(self) -> list[Receiver]:
        """All receivers that have a node, each once."""
        return _distinct(self._owners.values())

    def owner(self, ident: str) -> NodeEntry | None:
        """Return the entry of a node."""
        return self._owners.get(ident)

    def has(self, ident: str, receiver: Receiver) -> bool:
        """Return whether a node belongs to this receiver."""
        owner = self._owners.get(ident)
        return owner is not None and owner.receiver is receiver

    def idents_of(self, receiver: Receiver) -> tuple[str, ...]:
        """List a receiver's nodes."""
        return tuple(self._idents.get(id(receiver), ()))

    def registered(self) -> Iterator[str]:
        """Yield the nodes that are registered in PostgreSQL."""
        return (owner.ident for owner in self._owners.values() if owner.is_registered)

    @property
    def wants_events(self) -> bool:
        """Whether any node wants events about others."""
        return bool(self._event_nodes)

    def claim(self, ident: str, receiver: Receiver, since: int, *, wants_events: bool) -> NodeEntry:
        """Give a node to a receiver, unless another one has it; return the entry."""
        if (owner := self._owners.get(ident)) is None:
            owner = self._owners[ident] = NodeEntry(ident, receiver, since, wants_events)
            self._idents.setdefault(id(receiver), {})[ident] = None
        if owner.receiver is receiver:
            owner.wants_events = wants_events
            (self._event_nodes.add if wants_events else self._event_nodes.discard)(ident)
        return owner

    def release(self, ident: str) -> None:
        """Remove a node and its topics."""
        if (owner := self._owners.pop(ident, None)) is None:
            return
        self._event_nodes.discard(ident)
        own = self._idents[id(owner.receiver)]
        del own[ident]
        if not own:
            del self._idents[id(owner.receiver)]
        for function, topic in tuple(owner.joined):
            self._leave(owner, function, topic)

    # Topics

    def on_call_succeeded(self, ident: str, function: str, topic: str) -> None:
        """Record a successful topic function, called by the node or by an administrator."""
        if (owner := self._owners.get(ident)) is None:
            return
        if function in CALL_BUILDERS:
            owner.joined.add((function, topic))
            self._members.setdefault((function, topic), {})[ident] = owner
            self._changed(function, topic)
        elif function in UNDOES:
            self._leave(owner, UNDOES[function], topic)

    def nodes_for(self, topic: str) -> list[NodeEntry]:
        """List the nodes that get a topic's messages."""
        members = [self._members.get((LISTEN, topic), {})]
        members += (
            self._members[OBSERVE, pattern] for pattern in self._patterns if matches(pattern, topic)
        )
        return [owner for owners in members for owner in owners.values()]

    def receivers_for(self, topic: str) -> tuple[Receiver, ...]:
        """Return the receivers of a topic's messages, each once."""
        found = self._receivers.get(topic)
        if found is None:
            if len(self._receivers) >= _CACHED_TOPICS:
                self._receivers.clear()
            found = self._receivers[topic] = tuple(_distinct(self.nodes_for(topic)))
        return found

    def _leave(self, owner: NodeEntry, function: str, topic: str) -> None:
        if (function, topic) not in owner.joined:
            return
        owner.joined.remove((function, topic))
        members = self._members[function, topic]
        del members[owner.ident]
        if not members:
            del self._members[function, topic]
        self._changed(function, topic)

    def _changed(self, function: str, topic: str) -> None:
        if function == LISTEN:
            self._receivers.pop(topic, None)
        elif function == OBSERVE:
            self._patterns = [name for kind, name in self._members if kind == OBSERVE]
            self._receivers.clear()


def _distinct(owners: Iterable[NodeEntry]) -> list[Receiver]:
    return list({id(owner.receiver): owner.receiver for owner in owners}.values())


# How many nodes to try as the caller for an audience: one may have just been disconnected.
_ASKERS: Final = 3
_NOT_HERE: Final = ("50", "53")
# Upper limit of the time that other tasks of this event loop wait.
_SLICE_SECONDS: Final = 0.01
_FETCH_SECONDS: Final = 10
# How many nodes to try, one after the other, to fetch a body: rights may have just ended.
_FETCHERS: Final = 5
_EXPIRED: Final = "12"


@dataclass(slots=True)
class HubCounters:
    """Counters of a hub since it was created, and the numbers of its receivers and nodes now."""

    received: int = 0
    delivered: int = 0
    fetched: int = 0
    lost_bodies: int = 0
    failures: int = 0
    lost_connections: int = 0
    reconnects: int = 0
    receivers: int = 0
    nodes: int = 0


class Dispatcher:
    """Delivers one gateway's notifications to receivers.

    ``on_disconnected`` is called for each node that an administrator has disconnected.
    """

    def __init__(
        self,
        gateway: Gateway,
        routes: NodeRegistry,
        counters: HubCounters,
        on_disconnected: Callable[[str], None],
    ) -> None:
        self._gateway = gateway
        self._routes = routes
        self._counters = counters
        self._on_disconnected = on_disconnected
        # The nodes that get the events of this batch without ``Nodes``, by topic or node.
        self._audiences: dict[tuple[str, str], frozenset[str]] = {}
        self._seen = 0

    async def run(self) -> None:
        """Deliver until the gateway is closed."""
        yielded_at = monotonic()
        async for batch in self._gateway.batches():
            await self._look_up_audiences(batch)
            for notification in batch:
                self._seen += 1
                self._counters.received += 1
                try:
                    await self._dispatch(notification)
                except Exception:  # noqa: BLE001 - logged and counted; the next may succeed
                    self._counters.failures += 1
                    logger.exception("%s: a notification was not delivered", self._gateway.name)
                if monotonic() - yielded_at > _SLICE_SECONDS:
                    await asyncio.sleep(0)
                    yielded_at = monotonic()

    async def _dispatch(self, notification: Notification) -> None:
        at, header = time.time(), notification.header
        if header["Type"] == SYS:
            await self._deliver_event(notification, at)
        elif header["Type"] == TOPIC:
            nodes = self._routes.nodes_for(header["To"]) if notification.is_large else []
            if self._routes.receivers_for(header["To"]):
                fetchers = (node.ident for node in nodes if node.wants_bodies)
                frame = await self._framed(notification, fetchers, at)
                # Look up the receivers again: a right may have ended during the fetch.
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
            except Exception:  # noqa: BLE001 - logged and counted; others still get it
                self._counters.failures += 1
                logger.exception("%s: a receiver failed", self._gateway.name)
            else:
                delivered += 1
        self._counters.delivered += delivered

    def _owner(self, ident: str) -> NodeEntry | None:
        """Return a node's entry, unless the notification is for an earlier node of this name."""
        owner = self._routes.owner(ident)
        return owner if owner is not None and owner.since < self._seen else None

    # Bodies

    async def _framed(
        self, notification: Notification, idents: Iterable[str], at: float
    ) -> HubMessage:
        if not notification.is_large:
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
        with suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_SECONDS):
                for ident in idents:
                    answer = await self._fetch_as(ident, payload)
                    if answer["Err"] in ("0", _EXPIRED):
                        break
        return answer

    async def _fetch_as(self, ident: str, payload: str) -> Answer:
        while True:
            answer = await call_as_answer(self._gateway, ident, "get_data", payload)
            if answer["Err"] != "59" or self._gateway.is_closed:
                return answer

    # Events

    async def _look_up_audiences(self, batch: Iterable[Notification]) -> None:
        """Look up once per topic or node who gets the events that do not name their nodes."""
        self._audiences = {}
        if not self._routes.wants_events:
            return
        headers = [notification.header for notification in batch]
        subjects = dict.fromkeys(
            _subject(header)
            for header in headers
            if header["Type"] == SYS and "Nodes" not in header and _subject(header)[1]
        )
        nodes = await asyncio.gather(*(self._audience(*subject) for subject in subjects))
        self._audiences = dict(zip(subjects, nodes, strict=True))

    async def _audience(self, field: str, name: str) -> frozenset[str]:
        event = wire.serialize({"Type": SYS, "Evt": "audience", field: name})
        for ident in tuple(islice(self._routes.registered(), _ASKERS)):
            answer = await call_as_answer(self._gateway, ident, "audience", event)
            if answer["Err"] not in _NOT_HERE:
                return frozenset(answer.get("Nodes", ()))
        return frozenset()

    async def _deliver_event(self, notification: Notification, at: float) -> None:
        header = notification.header
        if header["Evt"] in (CONNECTION_LOST, RECONNECTED):
            self._deliver_local(notification, at)
            return
        owner = self._owner(header.get("Ident", ""))
        idents = header.get("Nodes")
        if not isinstance(idents, list):
            idents = self._audiences.get(_subject(header), frozenset()) - {header.get("Ident")}
        concerned = [self._owner(ident) for ident in sorted(set(idents))]
        if owner is not None and await self._was_done_to(owner, header):
            self._end_membership(owner.ident, header)
            concerned.append(owner)
        # A receiver with several nodes gets the event once.
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
        """Return whether an event reports that an administrator ended what one of our nodes did."""
        event, topic = header["Evt"], header.get("Topic", "")
        if event != "disconnect" and not (
            event in UNDOES and (UNDOES[event], topic) in owner.joined
        ):
            return False
        if "Nodes" in header:
            # Nodes includes the node itself only if another one made the change.
            return bool(owner.ident in header["Nodes"])
        if event == "topic_unobserve":
            # Only the node itself gets this event.
            return True
        return await self._is_over(owner.ident, event, topic)

    async def _is_over(self, ident: str, event: str, topic: str) -> bool:
        """Ask the server whether an event without ``Nodes`` ended what the node does.

        Such an event may also report an earlier call of the node itself. If the connection is lost
        during the query, the reconnect shows what has ended.
        """
        if event == "disconnect":
            answer = await call_as_answer(self._gateway, ident, "use")
            return answer["Err"] not in ("0", *hub_answers.UNANSWERED)
        answer = await call_as_answer(self._gateway, ident, "topic_status", topic)
        if answer["Err"] in hub_answers.UNANSWERED:
            return False
        field = "Listeners" if event == "topic_unlisten" else "Notifiers"
        return bool(ident not in answer.get(field, ()))

    def _end_membership(self, ident: str, header: dict[str, Any]) -> None:
        event, topic = header["Evt"], header.get("Topic", "")
        if event == "disconnect":
            self._on_disconnected(ident)
            return
        self._routes.on_call_succeeded(ident, event, topic)
        self._gateway.forget(ident, UNDOES[event], topic)


def _subject(header: dict[str, Any]) -> tuple[str, str]:
    # For events with a topic, leave out the node: one answer serves all events about the topic.
    field = "Topic" if "Topic" in header else "Ident"
    return field, header.get(field, "")
