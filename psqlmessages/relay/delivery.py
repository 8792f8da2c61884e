"""Delivery: hands what a gateway received to the receivers it is for, in the order it came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any, Final

from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.listening import Arrival
from psqlmessages.client.messages import CONNECTION_LOST, RECONNECTED, SYS, TOPIC
from psqlmessages.client.registration import ENDS
from psqlmessages.relay import answers
from psqlmessages.relay.audience import Audiences
from psqlmessages.relay.calls import answered, log, logger
from psqlmessages.relay.frames import Frame, Receiver
from psqlmessages.relay.routes import Owner, Routes

# What else runs in this loop waits so long at most.
_SLICE_SECONDS: Final = 0.01
_FETCH_SECONDS: Final = 10
# As which nodes a body is fetched, one after the other: rights may have ended a moment ago.
_FETCHERS: Final = 5
_EXPIRED: Final = "12"


@dataclass(slots=True)
class Tally:
    """What a hub has done since it was made."""

    received: int = 0
    delivered: int = 0
    fetched: int = 0
    lost_bodies: int = 0
    failures: int = 0
    lost_connections: int = 0
    reconnects: int = 0


class Delivery:
    """One gateway's arrivals on their way to receivers.

    ``let_go`` is called for each node that an administrator has disconnected.
    """

    def __init__(
        self, gateway: Gateway, routes: Routes, tally: Tally, let_go: Callable[[str], None]
    ) -> None:
        self._gateway = gateway
        self._routes = routes
        self._tally = tally
        self._let_go = let_go
        self._audiences = Audiences(gateway, routes)
        self._seen = 0

    async def run(self) -> None:
        """Deliver until the gateway is closed."""
        rested_at = monotonic()
        async for batch in self._gateway.batches():
            await self._audiences.ask(batch)
            for arrival in batch:
                self._seen += 1
                self._tally.received += 1
                try:
                    await self._hand_out(arrival)
                except Exception:  # noqa: BLE001 - logged and counted; the next may be sound
                    self._tally.failures += 1
                    logger.exception("%s: a notification was not delivered", self._gateway.name)
                if monotonic() - rested_at > _SLICE_SECONDS:
                    await asyncio.sleep(0)
                    rested_at = monotonic()

    async def _hand_out(self, arrival: Arrival) -> None:
        at, header = time.time(), arrival.header
        if header["Type"] == SYS:
            await self._hand_out_event(arrival, at)
        elif header["Type"] == TOPIC:
            nodes = self._routes.nodes_for(header["To"]) if arrival.is_kept else []
            if self._routes.receivers_for(header["To"]):
                fetchers = (node.ident for node in nodes if node.wants_bodies)
                frame = await self._framed(arrival, fetchers, at)
                # Asked again: a right may have ended while the body was fetched.
                self._deliver(frame, self._routes.receivers_for(header["To"]))
        elif (owner := self._owner(header["To"])) is not None:
            frame = await self._framed(arrival, (owner.ident,), at)
            if self._owner(header["To"]) is owner:
                self._deliver(frame, (owner.receiver,))

    def _deliver(self, frame: Frame, receivers: Iterable[Receiver]) -> None:
        delivered = 0
        for receiver in receivers:
            try:
                receiver.deliver(frame)
            except Exception:  # noqa: BLE001 - logged and counted; the others are to get it
                self._tally.failures += 1
                logger.exception("%s: a receiver failed", self._gateway.name)
            else:
                delivered += 1
        self._tally.delivered += delivered

    def _owner(self, ident: str) -> Owner | None:
        """Find who has a node, unless the arrival is for an earlier one of this name."""
        owner = self._routes.owner(ident)
        return owner if owner is not None and owner.since < self._seen else None

    # Bodies

    async def _framed(self, arrival: Arrival, idents: Iterable[str], at: float) -> Frame:
        if not arrival.is_kept:
            return Frame(arrival.header, arrival.text, at)
        fetchers = tuple(islice(idents, _FETCHERS))
        if not fetchers:
            return Frame(arrival.header, None, at)
        answer = await self._fetch(arrival.payload, fetchers)
        if answer["Err"] == "0":
            self._tally.fetched += 1
            return Frame(arrival.header, answer["Body"], at)
        self._tally.lost_bodies += 1
        log.warning("%s: a body was not fetched: %s", self._gateway.name, answer["Errstr"])
        return Frame({**arrival.header, **answer}, None, at)

    async def _fetch(self, payload: str, idents: tuple[str, ...]) -> Answer:
        answer = answers.away()
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
            answer = await answered(self._gateway, ident, "get_data", payload)
            if answer["Err"] != "59" or self._gateway.is_closed:
                return answer

    # Events

    async def _hand_out_event(self, arrival: Arrival, at: float) -> None:
        header = arrival.header
        if header["Evt"] in (CONNECTION_LOST, RECONNECTED):
            self._hand_out_local(arrival, at)
            return
        owner = self._owner(header.get("Ident", ""))
        named = header.get("Nodes")
        told = set(named if isinstance(named, list) else self._audiences.of(header))
        concerned = [self._owner(ident) for ident in sorted(told)]
        if owner is not None and await self._was_done_to(owner, header):
            self._follow(owner, header)
            concerned.append(owner)
        # A receiver with several nodes gets it once.
        receivers = {
            id(node.receiver): node.receiver
            for node in concerned
            if node is not None and (node.wants_events or node is owner)
        }
        self._deliver(Frame(header, None, at), receivers.values())

    def _hand_out_local(self, arrival: Arrival, at: float) -> None:
        header = arrival.header
        if arrival.away is not None:
            self._tally.reconnects += 1
            header = {**header, "Away": round(arrival.away.total_seconds(), 3)}
        else:
            self._tally.lost_connections += 1
        self._deliver(Frame(header, None, at), self._routes.receivers)

    async def _was_done_to(self, owner: Owner, header: dict[str, Any]) -> bool:
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
            answer = await answered(self._gateway, ident, "use")
            return answer["Err"] not in ("0", *answers.UNANSWERED)
        answer = await answered(self._gateway, ident, "topic_status", topic)
        if answer["Err"] in answers.UNANSWERED:
            return False
        field = "Listeners" if event == "topic_unlisten" else "Notifiers"
        return bool(ident not in answer.get(field, ()))

    def _follow(self, owner: Owner, header: dict[str, Any]) -> None:
        event, topic = header["Evt"], header.get("Topic", "")
        if event == "disconnect":
            self._let_go(owner.ident)
            return
        self._routes.ran(owner.ident, event, topic)
        self._gateway.forget(owner.ident, ENDS[event], topic)
