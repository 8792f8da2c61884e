"""The peer of the relay: an ASGI application of Channels whose WebSockets join one group.

In the environment LAYER, a class of channels_redis, and REDIS_PORT say by which channel layer.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

GROUP = "crowd"


def options(layer: str, port: int) -> dict[str, Any]:
    """Return what both ends tell the channel layer; all else is as it comes."""
    # As before redis-py 8, whose limits end idle WebSockets, and refuse a connection where hundreds
    # leave at once (django/channels_redis #422).
    unlimited = {"socket_timeout": None, "max_connections": 2**31}
    host = {"host": "127.0.0.1", "port": port, **unlimited}
    return {"hosts": [host], "prefix": layer.partition(".")[0]}


def layer_of(layer: str, port: int) -> Any:
    """Make a channel layer to send by, without Django."""
    module, _, name = layer.rpartition(".")
    return getattr(import_module(f"channels_redis.{module}"), name)(**options(layer, port))


class Member(AsyncWebsocketConsumer):
    """Hands on what the group is told: the chat of Channels' tutorial, without its JSON."""

    async def connect(self) -> None:
        """Join before the handshake is answered."""
        await self.channel_layer.group_add(GROUP, self.channel_name)
        await self.accept()

    async def disconnect(self, code: int) -> None:
        """Leave."""
        await self.channel_layer.group_discard(GROUP, self.channel_name)

    async def told(self, event: dict[str, str]) -> None:
        """Send it to the browser."""
        await self.send(text_data=event["text"])


if "LAYER" in os.environ:
    chosen = os.environ["LAYER"]
    settings.configure(
        CHANNEL_LAYERS={
            "default": {
                "BACKEND": f"channels_redis.{chosen}",
                "CONFIG": options(chosen, int(os.environ["REDIS_PORT"])),
            }
        }
    )
    application = Member.as_asgi()
