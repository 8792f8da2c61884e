"""The peer of the relay: an ASGI application of Channels whose WebSockets join one group.

The environment variables LAYER (a class of channels_redis) and REDIS_PORT name the channel layer.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

GROUP = "crowd"


def options(layer: str, port: int) -> dict[str, Any]:
    """Return the configuration of the channel layer; other settings have their defaults."""
    # The defaults before redis-py 8. The limits of redis-py 8 end idle WebSockets, and refuse a
    # connection if hundreds disconnect at the same time (django/channels_redis #422).
    unlimited = {"socket_timeout": None, "max_connections": 2**31}
    host = {"host": "127.0.0.1", "port": port, **unlimited}
    return {"hosts": [host], "prefix": layer.partition(".")[0]}


def create_layer(layer: str, port: int) -> Any:
    """Create a channel layer for sending, without Django."""
    module, _, name = layer.rpartition(".")
    return getattr(import_module(f"channels_redis.{module}"), name)(**options(layer, port))


class GroupConsumer(AsyncWebsocketConsumer):
    """Sends the group's messages to its WebSocket: Channels' tutorial chat, without its JSON."""

    async def connect(self) -> None:
        """Join the group, then accept the handshake."""
        await self.channel_layer.group_add(GROUP, self.channel_name)
        await self.accept()

    async def disconnect(self, code: int) -> None:
        """Leave the group."""
        await self.channel_layer.group_discard(GROUP, self.channel_name)

    async def group_message(self, event: dict[str, str]) -> None:
        """Send a message of the group to the browser."""
        await self.send(text_data=event["text"])


if "LAYER" in os.environ:
    layer = os.environ["LAYER"]
    settings.configure(
        CHANNEL_LAYERS={
            "default": {
                "BACKEND": f"channels_redis.{layer}",
                "CONFIG": options(layer, int(os.environ["REDIS_PORT"])),
            }
        }
    )
    application = GroupConsumer.as_asgi()
