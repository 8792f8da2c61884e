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
# Functions that leave a topic, and those that have joined it.
_ENDS: Final = {"topic_unlisten": "topic_listen", "topic_unnotify": "topic_notify"}


class NodeConsumer(Socket):
    """A WebSocket at /ws/node/, with one node at a time."""

    def __init__(self) -> None:
        self._topics: dict[str, set[str]] = {function: set() for function in _ENDS.values()}
        # The credential monitor ends a node between two operations, never during one.
        self._operating = asyncio.Lock()
        self._was_connected = False

    # Called by the hub

    def deliver(self, frame: HubMessage) -> None:
        """Send a message or event of this node; a reader that is too slow is closed."""
        header = frame.header
        if header["Type"] == "Sys" and header.get("Ident") == self.ident:
            if header["Evt"] == "disconnect":
                self._forget_node()
            else:
                self._record_end(header["Evt"], header.get("Topic", ""))
        self.put_packet(frame.packet)

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
            ident = self.ident
            self._forget_node()
            return await get_hub().deinit(ident, self)
        topic, most = arguments.get("topic", ""), get_settings().RELAY_TOPICS
        joined = self._topics.get(request.op)
        if joined is not None and topic not in joined and len(joined) >= most:
            return hub_answers.refusal(58, f"more than {most} topics")
        content = await get_hub().run(self.ident, self, request.op, *arguments.values())
        if content["Err"] == "0" and joined is not None:
            joined.add(topic)
        elif content["Err"] == "0":
            self._record_end(request.op, topic)
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

    def _record_end(self, function: str, topic: str) -> None:
        if begins := _ENDS.get(function):
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
        self.put_packet(
            HubMessage({"Type": "Sys", "Evt": "disconnect", "Ident": ident}, None, 0).packet
        )
