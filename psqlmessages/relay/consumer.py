"""WebSocket consumer of a node: frames become calls, messages become frames."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from django.db import DatabaseError

from psqlmessages.conf import get_settings
from psqlmessages.models.names import NAME_CHARACTERS
from psqlmessages.relay import hub_answers
from psqlmessages.relay.auth import may_act_as
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import get_hub
from psqlmessages.relay.protocol import Request, UnreadableFrame, answer, parse_frame
from psqlmessages.relay.revalidation import in_thread
from psqlmessages.relay.socket import TRY_AGAIN_LATER, Socket

Answer = dict[str, Any]

_DONE_BEFORE: Final = {"Err": "0", "Already": 1}
# Topic functions that join, and the functions that leave again.
_BEGINS: Final = ("topic_listen", "topic_notify")
_ENDS: Final = {"topic_unlisten": "topic_listen", "topic_unnotify": "topic_notify"}


class NodeConsumer(Socket):
    """A WebSocket at /ws/node/, with one node at a time."""

    def __init__(self) -> None:
        self._topics: dict[str, set[str]] = {function: set() for function in _BEGINS}
        # The credential monitor ends a node between two operations, never during one.
        self._operating = asyncio.Lock()
        self._was_connected = False

    # Called by the hub

    def deliver(self, frame: HubMessage) -> None:
        """Send a message or event of this node; a reader that is too slow is closed."""
        header = frame.header
        if header["Type"] == "Sys" and header.get("Ident") == self.ident:
            self._on_own_event(header)
        self.put_packet(frame.packet)

    def _on_own_event(self, header: dict[str, Any]) -> None:
        if header["Evt"] == "disconnect":
            self._forget_node()
        elif begins := _ENDS.get(header["Evt"]):
            self._topics[begins].discard(header["Topic"])

    def _forget_node(self) -> None:
        self.ident = None
        for topics in self._topics.values():
            topics.clear()

    # Requests

    async def received(self, text: str) -> None:
        """Execute one frame and answer it."""
        try:
            request = parse_frame(text)
        except UnreadableFrame as error:
            self.put(answer(error.ref, hub_answers.refusal(57, error.text)))
            return
        async with self._operating:
            content = await self._run(request)
        self.put(answer(request.ref, content))

    async def _run(self, request: Request) -> Answer:
        arguments: dict[str, Any] = request.arguments
        if request.op == "init":
            return await self._init(**arguments)
        if self.ident is None:
            if request.op == "deinit":
                return _DONE_BEFORE
            return hub_answers.refusal(50, "call messages.init first")
        if request.op == "deinit":
            return await self._deinit(self.ident)
        topic = arguments.get("topic", "")
        if request.op in _BEGINS and self._has_enough(request.op, topic):
            return hub_answers.refusal(58, f"more than {get_settings().RELAY_TOPICS} topics")
        content = await get_hub().run(self.ident, self, request.op, *arguments.values())
        if content["Err"] == "0":
            self._did(request.op, topic)
        return content

    async def _init(self, ident: str, events: bool) -> Answer:
        if self.ident is not None and self.ident != ident:
            return hub_answers.refusal(58, "more than one node per WebSocket")
        if len(ident) > NAME_CHARACTERS:
            return hub_answers.refusal(54, "name or token too long")
        if not ident:
            return hub_answers.refusal(4, "cannot init without identity")
        try:
            is_allowed = await in_thread(may_act_as, self.user, ident)
        except DatabaseError:
            return hub_answers.away()
        if not is_allowed:
            return hub_answers.refusal(5, f"there are no permissions for ident {ident}")
        # Set before init, so that the credential monitor already checks the node.
        is_new, self.ident = self.ident is None, ident
        content = await get_hub().init(ident, self, events=events)
        if content["Err"] != "0" and is_new:
            self._forget_node()
        return content

    async def _deinit(self, ident: str) -> Answer:
        self._forget_node()
        return await get_hub().deinit(ident, self)

    def _has_enough(self, function: str, topic: str) -> bool:
        topics = self._topics[function]
        return topic not in topics and len(topics) >= get_settings().RELAY_TOPICS

    def _did(self, function: str, topic: str) -> None:
        if function in _BEGINS:
            self._topics[function].add(topic)
        elif begins := _ENDS.get(function):
            self._topics[begins].discard(topic)

    # End

    async def left(self, *, crashed: bool) -> None:
        """End the node, with the event ``disconnect`` or ``crash``."""
        if self.ident is not None:
            await get_hub().leave(self, crashed=crashed)

    def ident_revoked(self, ident: str) -> None:
        """End a node that the user may no longer act as; the WebSocket stays open."""
        self.spawn(self._end_node(ident))

    def unchecked(self) -> None:
        """Close, unless the hub is disconnected too: nothing is delivered then."""
        # Only at the second check in a row: if PostgreSQL has just returned, the next may succeed.
        was_connected, self._was_connected = self._was_connected, get_hub().is_connected
        if was_connected and self._was_connected:
            self.close(TRY_AGAIN_LATER, "permissions cannot be checked: try again later")

    async def _end_node(self, ident: str) -> None:
        async with self._operating:
            if self.ident != ident:
                return
            self._forget_node()
            await get_hub().leave(self, crashed=False)
        self.put(_event("disconnect", ident))


def _event(event: str, ident: str) -> str:
    return HubMessage({"Type": "Sys", "Evt": event, "Ident": ident}, None, 0).json
