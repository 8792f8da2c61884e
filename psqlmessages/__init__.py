"""psqlmessages: a secure message broker in PostgreSQL: topics, RPC, durable streams and queues.

Each name is imported when it is first used. So a program that uses Node imports no AsyncNode.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from psqlmessages.client.async_node import AsyncNode
    from psqlmessages.client.messages import Message
    from psqlmessages.client.node import Node
    from psqlmessages.client.options import Options
    from psqlmessages.client.queue_calls import Element, QueueSizes
    from psqlmessages.client.stream_calls import Published, StreamMessage, SubscriptionState
    from psqlmessages.client.subscription import AsyncSubscription, Subscription
    from psqlmessages.pubsub import AsyncPubSub, PubSub

__all__ = [
    "AsyncNode",
    "AsyncPubSub",
    "AsyncSubscription",
    "Element",
    "Message",
    "Node",
    "Options",
    "PubSub",
    "Published",
    "QueueSizes",
    "StreamMessage",
    "Subscription",
    "SubscriptionState",
    "__version__",
]

_NAMES = {
    "client.async_node": ("AsyncNode",),
    "client.messages": ("Message",),
    "client.node": ("Node",),
    "client.options": ("Options",),
    "client.queue_calls": ("Element", "QueueSizes"),
    "client.stream_calls": ("Published", "StreamMessage", "SubscriptionState"),
    "client.subscription": ("AsyncSubscription", "Subscription"),
    "pubsub": ("AsyncPubSub", "PubSub"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name == "__version__":
        return import_module("importlib.metadata").version("psqlmessages")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names of the module, with public names that are not imported yet."""
    return sorted({*globals(), *__all__})
