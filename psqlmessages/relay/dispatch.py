"""Dispatcher: delivers notifications to the receivers of this process. Counters of the hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, Final

from psqlmessages import wire
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.handlers import matches
from psqlmessages.client.messages import CONNECTION_LOST, RECONNECTED, SYS, TOPIC, Notification
from psqlmessages.client.registration import JOIN_BY_LEAVE, JOIN_CALLS
from psqlmessages.relay.frames import HubMessage, Receiver
from psqlmessages.relay.hub_answers import (
    UNANSWERED,
    UNREACHABLE_ANSWER,
    call_as_answer,
    log,
    logger,
)

# Registry: the receiver of each node, and the nodes of each topic. No I/O.

LISTEN, OBSERVE = "topic_listen", "topic_observe"
_MAX_CACHED_TOPICS: Final = 1000


@dataclass(slots=True, eq=False)
class NodeEntry:
    """A node, its receiver, and the topics that the node has joined.

    The first ``earlier_notifications`` notifications of the gateway are for earlier nodes of this
    name. ``joined``: for each SQL function and topic, how many notifications had been received when
    the function answered. Events among these may be older than the call.
    """

    ident: str
    receiver: Receiver
    earlier_notifications: int
    wants_events: bool
    wants_bodies: bool = True
    is_registered: bool = False
    joined: dict[tuple[str, str], int] = field(default_factory=dict)


class NodeRegistry:
    """The nodes of a hub and their topics, updated by answers and events of PostgreSQL."""

    def __init__(self) -> None:
        self._entries: dict[str, NodeEntry] = {}
        self._event_nodes: set[str] = set()
        # The keys are id(receiver), because receivers may not be hashable.
        self._idents: dict[int, dict[str, None]] = {}
        # The keys are pairs of an SQL function and a topic, then node names.
        self._members: dict[tuple[str, str], dict[str, NodeEntry]] = {}
        self._patterns: list[str] = []
        # A cache of receivers_for().
        self._receivers: dict[str, tuple[Receiver, ...]] = {}

    # Nodes and receivers

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def receivers(self) -> list[Receiver]:
        """All receivers that have a node, each once."""
        return _distinct_receivers(self._entries.values())

    def entry(self, ident: str) -> NodeEntry | None:
        """Return the entry of a node; None if no receiver has the node."""
        return self._entries.get(ident)

    def belongs_to(self, ident: str, receiver: Receiver) -> bool:
        """Return whether a node belongs to this receiver."""
        entry = self._entries.get(ident)
        return entry is not None and entry.receiver is receiver

    def idents_of(self, receiver: Receiver) -> tuple[str, ...]:
        """List a receiver's nodes."""
        return tuple(self._idents.get(id(receiver), ()))

    def registered_idents(self) -> Iterator[str]:
        """Yield the nodes that are registered in PostgreSQL."""
        return (entry.ident for entry in self._entries.values() if entry.is_registered)

    @property
    def wants_events(self) -> bool:
        """Whether any node wants events about other nodes."""
        return bool(self._event_nodes)

    def claim(
        self, ident: str, receiver: Receiver, earlier_notifications: int, *, wants_events: bool
    ) -> NodeEntry:
        """Give a node to a receiver, unless another receiver has the node; return its entry."""
        entry = self._entries.get(ident)
        if entry is None:
            entry = NodeEntry(ident, receiver, earlier_notifications, wants_events)
            self._entries[ident] = entry
            self._idents.setdefault(id(receiver), {})[ident] = None
        if entry.receiver is receiver:
            entry.wants_events = wants_events
            if wants_events:
                self._event_nodes.add(ident)
            else:
                self._event_nodes.discard(ident)
        return entry

    def release(self, ident: str) -> None:
        """Remove a node and its topics."""
        if (entry := self._entries.pop(ident, None)) is None:
            return
        self._event_nodes.discard(ident)
        receiver_idents = self._idents[id(entry.receiver)]
        del receiver_idents[ident]
        if not receiver_idents:
            del self._idents[id(entry.receiver)]
        for function, topic in tuple(entry.joined):
            self._leave(entry, function, topic)

    # Topics

    def on_call_succeeded(
        self, ident: str, function: str, topic: str, received_count: int = 0
    ) -> None:
        """Record a successful call of a topic function, by the node or by an administrator."""
        if (entry := self._entries.get(ident)) is None:
            return
        if function in JOIN_CALLS:
            entry.joined[function, topic] = received_count
            self._members.setdefault((function, topic), {})[ident] = entry
            self._refresh_cache(function, topic)
        elif function in JOIN_BY_LEAVE:
            self._leave(entry, JOIN_BY_LEAVE[function], topic)

    def may_join(self, ident: str, function: str, topic: str, limit: int) -> bool:
        """Whether a node has joined this topic, or fewer than ``limit`` topics, by a function."""
        entry = self._entries.get(ident)
        if entry is None or len(entry.joined) < limit or (function, topic) in entry.joined:
            return True
        return [join for join, _ in entry.joined].count(function) < limit

    def nodes_for(self, topic: str) -> list[NodeEntry]:
        """List the nodes that get a topic's messages; some may occur more than once."""
        nodes = list(self._members.get((LISTEN, topic), {}).values())
        for pattern in self._patterns:
            if matches(pattern, topic):
                nodes += self._members[OBSERVE, pattern].values()
        return nodes

    def receivers_for(self, topic: str) -> tuple[Receiver, ...]:
        """Return the receivers of a topic's messages, each once."""
        receivers = self._receivers.get(topic)
        if receivers is None:
            if len(self._receivers) >= _MAX_CACHED_TOPICS:
                self._receivers.clear()
            receivers = tuple(_distinct_receivers(self.nodes_for(topic)))
            self._receivers[topic] = receivers
        return receivers

    def _leave(self, entry: NodeEntry, function: str, topic: str) -> None:
        if (function, topic) not in entry.joined:
            return
        del entry.joined[function, topic]
        members = self._members[function, topic]
        del members[entry.ident]
        if not members:
            del self._members[function, topic]
        self._refresh_cache(function, topic)

    def _refresh_cache(self, function: str, topic: str) -> None:
        if function == LISTEN:
            self._receivers.pop(topic, None)
        elif function == OBSERVE:
            self._patterns = [name for kind, name in self._members if kind == OBSERVE]
            self._receivers.clear()


def _distinct_receivers(entries: Iterable[NodeEntry]) -> list[Receiver]:
    return list({id(entry.receiver): entry.receiver for entry in entries}.values())


# Try this many nodes as the caller of ``audience``: a node may have just been disconnected.
_MAX_ASKING_NODES: Final = 3
# Look up the recipients of up to this many events together.
_MAX_LOOKUPS: Final = 100
_NOT_REGISTERED: Final = ("50", "53")
# After this time, let other tasks of the event loop run.
_SLICE_SECONDS: Final = 0.01
# Try up to this many nodes, for up to this time, to fetch a body: a right may have just ended.
_FETCH_SECONDS: Final = 10
_MAX_FETCHING_NODES: Final = 5
_BODY_EXPIRED: Final = "12"

Header = dict[str, Any]
# Call and await it before the next notification is dispatched.
Continuation = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class HubCounters:
    """Counters of a hub since its creation, and the present numbers of its receivers and nodes."""

    received: int = 0
    delivered: int = 0
    fetched: int = 0
    lost_bodies: int = 0
    lost_connections: int = 0
    reconnects: int = 0
    receivers: int = 0
    nodes: int = 0


class Dispatcher:
    """Delivers one gateway's notifications to receivers, in order.

    The gateway's session calls :meth:`dispatch` after each read. If the delivery of a notification
    needs an answer from PostgreSQL, a task delivers this notification and the following ones.
    ``on_disconnected`` is called for each node that an administrator has disconnected.
    """

    def __init__(
        self,
        gateway: Gateway,
        registry: NodeRegistry,
        counters: HubCounters,
        on_disconnected: Callable[[str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._gateway = gateway
        self._inbox = gateway.inbox
        self._registry = registry
        self._counters = counters
        self._on_disconnected = on_disconnected
        self._spawn = spawn
        self._has_task = False
        self._taken_count = 0
        # The recipients of events without ``Nodes``. The keys are results of _subject().
        self._recipients: dict[tuple[str, str], frozenset[str]] = {}
        # The number of the last notification to which these recipients apply.
        self._recipients_until = 0
        gateway.set_inbox_callback(self.dispatch)

    @property
    def received_count(self) -> int:
        """Number of notifications received so far, whether dispatched or not."""
        return self._taken_count + len(self._inbox)

    def dispatch(self) -> None:
        """Deliver the received notifications, unless a task does; start a task if necessary."""
        if not self._has_task and (continuation := self._dispatch_slice()) is not None:
            self._has_task = True
            self._spawn(self._continue(continuation))

    async def _continue(self, continuation: Continuation | None) -> None:
        while continuation is not None and not self._gateway.is_closed:
            try:
                await continuation()
            except Exception:  # noqa: BLE001 - logged; the next may succeed
                self._on_failed()
            taken_before = self._taken_count
            continuation = self._dispatch_slice()
            self._gateway.mark_taken(self._taken_count - taken_before)
        self._has_task = False

    def _dispatch_slice(self) -> Continuation | None:
        """Deliver notifications for 10 ms; return a continuation, or None if the inbox is empty."""
        inbox, until = self._inbox, monotonic() + _SLICE_SECONDS
        while inbox:
            notification = inbox.popleft()
            self._taken_count += 1
            self._counters.received += 1
            try:
                continuation = self._dispatch_one(notification)
            except Exception:  # noqa: BLE001 - logged; the next may succeed
                self._on_failed()
                continue
            if continuation is not None:
                return continuation
            if inbox and monotonic() > until:
                return partial(asyncio.sleep, 0)
        return None

    def _dispatch_one(self, notification: Notification) -> Continuation | None:
        received_at = time.time()
        header = notification.header
        if header["Type"] == SYS:
            return self._dispatch_event(notification, received_at)
        if notification.is_large and (idents := self._fetchers(header)):
            return partial(self._fetch_and_deliver, notification, idents, received_at)
        self._deliver(self._receivers_of(header), header, notification.text, received_at)
        return None

    def _receivers_of(self, header: Header) -> Sequence[Receiver]:
        if header["Type"] == TOPIC:
            return self._registry.receivers_for(header["To"])
        entry = self._current_entry(header["To"])
        return (entry.receiver,) if entry is not None else ()

    def _current_entry(self, ident: str) -> NodeEntry | None:
        """Return a node's entry; None if the notification is for an earlier node of this name."""
        entry = self._registry.entry(ident)
        if entry is None or entry.earlier_notifications >= self._taken_count:
            return None
        return entry

    def _deliver(
        self, receivers: Sequence[Receiver], header: Header, body: str | None, received_at: float
    ) -> None:
        if not receivers:
            return
        message = HubMessage(header, body, received_at)
        delivered = 0
        for receiver in receivers:
            try:
                receiver.deliver(message)
            except Exception:  # noqa: BLE001 - logged; others still get it
                logger.exception("%s: a receiver failed", self._gateway.name)
            else:
                delivered += 1
        self._counters.delivered += delivered

    def _on_failed(self) -> None:
        logger.exception("%s: a notification was not delivered", self._gateway.name)

    # Large bodies

    def _fetchers(self, header: Header) -> tuple[str, ...]:
        """Return the names of up to five nodes that may fetch the body of a message."""
        if header["Type"] == TOPIC:
            nodes = self._registry.nodes_for(header["To"])
            idents = (node.ident for node in nodes if node.wants_bodies)
            return tuple(islice(idents, _MAX_FETCHING_NODES))
        return (header["To"],) if self._current_entry(header["To"]) is not None else ()

    async def _fetch_and_deliver(
        self, notification: Notification, idents: tuple[str, ...], received_at: float
    ) -> None:
        header = notification.header
        answer = await self._fetch(notification.payload, idents)
        if answer["Err"] == "0":
            self._counters.fetched += 1
            body = answer["Body"]
        else:
            self._counters.lost_bodies += 1
            log.warning("%s: a body was not fetched: %s", self._gateway.name, answer["Errstr"])
            header, body = {**header, **answer}, None
        # Look up the receivers only now: a right may have ended during the fetch.
        self._deliver(self._receivers_of(header), header, body, received_at)

    async def _fetch(self, payload: str, idents: tuple[str, ...]) -> Answer:
        answer = UNREACHABLE_ANSWER
        with suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_SECONDS):
                for ident in idents:
                    answer = await self._fetch_as(ident, payload)
                    if answer["Err"] in ("0", _BODY_EXPIRED):
                        break
        return answer

    async def _fetch_as(self, ident: str, payload: str) -> Answer:
        while True:
            answer = await call_as_answer(self._gateway, ident, "get_data", payload)
            if answer["Err"] != "59" or self._gateway.is_closed:
                return answer

    # Events

    def _dispatch_event(
        self, notification: Notification, received_at: float
    ) -> Continuation | None:
        header = notification.header
        if header["Evt"] in (CONNECTION_LOST, RECONNECTED):
            if notification.away is not None:
                self._counters.reconnects += 1
                header = {**header, "Away": round(notification.away.total_seconds(), 3)}
            else:
                self._counters.lost_connections += 1
            self._deliver(self._registry.receivers, header, None, received_at)
            return None
        may_end = self._may_end_membership(header)
        if isinstance(idents := header.get("Nodes"), list) and not self._may_be_outdated(header):
            # Nodes includes the node itself only if the node did not make the change itself.
            has_ended = may_end and header["Ident"] in idents
            self._deliver_event(header, idents, has_ended, received_at)
        elif may_end or self._registry.wants_events:
            return partial(self._ask_and_deliver, header, received_at)
        return None

    async def _ask_and_deliver(self, header: Header, received_at: float) -> None:
        """Ask PostgreSQL for the recipients of an event and its effect here, then deliver it."""
        idents = await self._look_up_recipients(_subject(header))
        has_ended = self._may_end_membership(header) and await self._has_ended(header)
        others = idents - {header.get("Ident", "")}
        self._deliver_event(header, others, has_ended, received_at)

    def _deliver_event(
        self, header: Header, idents: Iterable[str], has_ended: bool, received_at: float
    ) -> None:
        own = self._current_entry(header.get("Ident", ""))
        entries = [self._current_entry(ident) for ident in sorted(set(idents))]
        if own is not None and has_ended:
            event, topic = header["Evt"], header.get("Topic", "")
            if event == "disconnect":
                self._on_disconnected(own.ident)
            else:
                self._registry.on_call_succeeded(own.ident, event, topic)
                self._gateway.forget(own.ident, JOIN_BY_LEAVE[event], topic)
            entries.append(own)
        receivers = _distinct_receivers(
            entry for entry in entries if entry is not None and (entry.wants_events or entry is own)
        )
        self._deliver(receivers, header, None, received_at)

    async def _look_up_recipients(self, subject: tuple[str, str]) -> frozenset[str]:
        """Return the nodes that get events about a topic or node.

        Also looks up the recipients of the next events in the inbox, at the same time.
        """
        if self._taken_count > self._recipients_until:
            waiting = [each.header for each in islice(self._inbox, _MAX_LOOKUPS)]
            subjects = {subject: None} | {
                _subject(header): None
                for header in waiting
                if header["Type"] == SYS and "Nodes" not in header
            }
            nodes = await asyncio.gather(*(self._fetch_recipients(*each) for each in subjects))
            self._recipients = dict(zip(subjects, nodes, strict=True))
            self._recipients_until = self._taken_count + len(waiting)
        return self._recipients.get(subject, frozenset())

    async def _fetch_recipients(self, field: str, name: str) -> frozenset[str]:
        if not name or not self._registry.wants_events:
            return frozenset()
        event = wire.serialize({"Type": SYS, "Evt": "audience", field: name})
        for ident in tuple(islice(self._registry.registered_idents(), _MAX_ASKING_NODES)):
            answer = await call_as_answer(self._gateway, ident, "audience", event)
            if answer["Err"] not in _NOT_REGISTERED:
                return frozenset(answer.get("Nodes", ()))
        return frozenset()

    def _may_end_membership(self, header: Header) -> bool:
        """Return whether an event may end a node of this hub, or its membership in a topic."""
        entry = self._current_entry(header.get("Ident", ""))
        event, topic = header["Evt"], header.get("Topic", "")
        return entry is not None and (
            event == "disconnect"
            or (event in JOIN_BY_LEAVE and (JOIN_BY_LEAVE[event], topic) in entry.joined)
        )

    def _may_be_outdated(self, header: Header) -> bool:
        """Return whether an event may be older than the node's present membership in the topic."""
        entry = self._current_entry(header.get("Ident", ""))
        join = (JOIN_BY_LEAVE.get(header["Evt"], ""), header.get("Topic", ""))
        return entry is not None and entry.joined.get(join, 0) >= self._taken_count

    async def _has_ended(self, header: Header) -> bool:
        """Ask PostgreSQL whether the node's registration, or membership in the topic, has ended.

        The event alone is not enough: it may report an earlier call of the node itself, or be older
        than the node's last call. False if there is no answer: the next reconnect finds the state.
        """
        event, ident, topic = header["Evt"], header["Ident"], header.get("Topic", "")
        if event == "topic_unobserve":
            # Only the node itself gets this event.
            return True
        if event == "disconnect":
            answer = await call_as_answer(self._gateway, ident, "use")
            return answer["Err"] not in ("0", *UNANSWERED)
        answer = await call_as_answer(self._gateway, ident, "topic_status", topic)
        if answer["Err"] in UNANSWERED:
            return False
        field = "Listeners" if event == "topic_unlisten" else "Notifiers"
        return bool(ident not in answer.get(field, ()))


def _subject(header: Header) -> tuple[str, str]:
    """Return the field and name of an event's topic, or of its node if it has no topic."""
    field = "Topic" if "Topic" in header else "Ident"
    return field, header.get(field, "")
