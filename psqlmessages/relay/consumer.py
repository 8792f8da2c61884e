"""WebSocket consumer of a node: frames become calls, messages become frames."""

from __future__ import annotations

import asyncio
from typing import Any

from django.db import DatabaseError

from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.registration import JOIN_CALLS
from psqlmessages.conf import get_settings
from psqlmessages.models.names import NAME_CHARACTERS
from psqlmessages.relay.auth import may_act_as
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import get_hub
from psqlmessages.relay.hub_answers import UNREACHABLE_ANSWER, error_answer
from psqlmessages.relay.protocol import InvalidFrame, Request, format_answer, parse_frame
from psqlmessages.relay.revalidation import in_thread
from psqlmessages.relay.socket import TRY_AGAIN_LATER, Socket


class NodeConsumer(Socket):
    """A WebSocket at /ws/node/, with one node at a time."""

    def __init__(self) -> None:
        # Held during an operation, so that the credential monitor cannot end the node during it.
        self._operation_lock = asyncio.Lock()
        self._was_hub_connected = False

    # Called by the hub

    def deliver(self, message: HubMessage) -> None:
        """Send a message or event to the client; close the WebSocket if the client is too slow."""
        header = message.header
        is_disconnect = header["Type"] == "Sys" and header["Evt"] == "disconnect"
        if is_disconnect and header.get("Ident") == self.ident:
            self.ident = None
        self.put_frame(message.frame)

    # Requests

    async def on_frame(self, text: str) -> None:
        """Execute one frame and answer it."""
        try:
            request = parse_frame(text)
        except InvalidFrame as error:
            self.put(format_answer(error.ref, error_answer(57, error.text)))
            return
        async with self._operation_lock:
            answer = await self._run(request)
        self.put(format_answer(request.ref, answer))

    async def _run(self, request: Request) -> Answer:
        arguments: dict[str, Any] = request.arguments
        if request.op == "init":
            return await self._init(**arguments)
        if request.op == "deinit":
            ident, self.ident = self.ident, None
            return await get_hub().deinit(ident or "", self)
        if self.ident is None:
            return error_answer(50, "call messages.init first")
        if request.op in JOIN_CALLS:
            limit = get_settings().RELAY_TOPICS
            if not get_hub().may_join(self.ident, request.op, arguments["topic"], limit):
                return error_answer(58, f"more than {limit} topics")
        return await get_hub().run(self.ident, self, request.op, *arguments.values())

    async def _init(self, ident: str, events: bool) -> Answer:
        if self.ident is not None and self.ident != ident:
            return error_answer(58, "more than one node per WebSocket")
        if len(ident) > NAME_CHARACTERS:
            return error_answer(54, "name or token too long")
        if not ident:
            return error_answer(4, "cannot init without identity")
        try:
            is_allowed = await in_thread(may_act_as, self.user, ident)
        except DatabaseError:
            return UNREACHABLE_ANSWER
        if not is_allowed:
            return error_answer(5, f"there are no permissions for ident {ident}")
        # Set before init, so that the credential monitor checks the node from the start.
        is_new = self.ident is None
        self.ident = ident
        answer = await get_hub().init(ident, self, wants_events=events)
        if answer["Err"] != "0" and is_new:
            self.ident = None
        return answer

    # End

    async def on_closed(self, *, has_crashed: bool) -> None:
        """End the node, with the event ``disconnect`` or ``crash``."""
        if self.ident is not None:
            await get_hub().leave(self, has_crashed=has_crashed)

    def on_ident_revoked(self, ident: str) -> None:
        """End a node that the user may no longer act as; the WebSocket stays open."""
        self.spawn(self._end_node(ident))

    def on_unchecked(self) -> None:
        """Close the WebSocket, unless the hub is disconnected too and so delivers nothing."""
        # Wait for a second call with a connected hub: right after an outage, a check may succeed.
        was_hub_connected, self._was_hub_connected = self._was_hub_connected, get_hub().is_connected
        if was_hub_connected and self._was_hub_connected:
            self.close(TRY_AGAIN_LATER, "permissions cannot be checked: try again later")

    async def _end_node(self, ident: str) -> None:
        async with self._operation_lock:
            if self.ident != ident:
                return
            self.ident = None
            await get_hub().leave(self, has_crashed=False)
        event = HubMessage({"Type": "Sys", "Evt": "disconnect", "Ident": ident}, None, 0)
        self.put_frame(event.frame)
