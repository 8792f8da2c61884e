"""psqlmessages: PostgreSQL as a secured message system: topics, RPC, durable streams and queues.

What is not an exception is imported when it is first asked for: who uses Node alone need not wait
for asyncio's half and for the bus without rules.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from psqlmessages.exceptions import (
    AlreadyRegistered,
    AskerNotExistent,
    BatchOutOfOrder,
    BodyTooLarge,
    CalleeGone,
    CallFailed,
    CallTimeout,
    ConnectionLost,
    ConnectionShared,
    DestinationMissing,
    DestinationNotAuthorized,
    IdentEmpty,
    IdentInUse,
    IdentMissing,
    IdentNotAuthorized,
    IdentNotExistent,
    IdentTaken,
    IdentTakenByOtherRole,
    InvalidArgument,
    LimitReached,
    MalformedArgument,
    MalformedFrame,
    MalformedMessage,
    MessageExpired,
    MessageNotExistent,
    MessagesError,
    ModeNotAuthorized,
    NameTooLong,
    NodeClosed,
    NoListeners,
    NotAuthorized,
    NotConnected,
    NotExistent,
    NotificationQueueFull,
    NotInitialized,
    NotInstalled,
    NotListening,
    NotNotifying,
    NotOfThisSession,
    NotPositive,
    NotSubscribed,
    OutOfOrder,
    QueueNotExistent,
    RelayAway,
    ReturnNotAuthorized,
    RowsNotStaged,
    ServerUnreachable,
    TokenEmpty,
    TokenMalformed,
    TopicNotExistent,
    UnknownEncoding,
    Unreachable,
)

if TYPE_CHECKING:
    from psqlmessages.client.async_node import AsyncNode
    from psqlmessages.client.messages import Message
    from psqlmessages.client.node import Node
    from psqlmessages.client.options import Options
    from psqlmessages.client.queue_calls import Element, QueueSizes
    from psqlmessages.client.stream_calls import Published, StreamMessage, SubscriptionState
    from psqlmessages.client.subscription import AsyncSubscription, Subscription
    from psqlmessages.pubsub import AsyncPubSub, PubSub

__all__ = [
    "AlreadyRegistered",
    "AskerNotExistent",
    "AsyncNode",
    "AsyncPubSub",
    "AsyncSubscription",
    "BatchOutOfOrder",
    "BodyTooLarge",
    "CallFailed",
    "CallTimeout",
    "CalleeGone",
    "ConnectionLost",
    "ConnectionShared",
    "DestinationMissing",
    "DestinationNotAuthorized",
    "Element",
    "IdentEmpty",
    "IdentInUse",
    "IdentMissing",
    "IdentNotAuthorized",
    "IdentNotExistent",
    "IdentTaken",
    "IdentTakenByOtherRole",
    "InvalidArgument",
    "LimitReached",
    "MalformedArgument",
    "MalformedFrame",
    "MalformedMessage",
    "Message",
    "MessageExpired",
    "MessageNotExistent",
    "MessagesError",
    "ModeNotAuthorized",
    "NameTooLong",
    "NoListeners",
    "Node",
    "NodeClosed",
    "NotAuthorized",
    "NotConnected",
    "NotExistent",
    "NotInitialized",
    "NotInstalled",
    "NotListening",
    "NotNotifying",
    "NotOfThisSession",
    "NotPositive",
    "NotSubscribed",
    "NotificationQueueFull",
    "Options",
    "OutOfOrder",
    "PubSub",
    "Published",
    "QueueNotExistent",
    "QueueSizes",
    "RelayAway",
    "ReturnNotAuthorized",
    "RowsNotStaged",
    "ServerUnreachable",
    "StreamMessage",
    "Subscription",
    "SubscriptionState",
    "TokenEmpty",
    "TokenMalformed",
    "TopicNotExistent",
    "UnknownEncoding",
    "Unreachable",
]

_PLACES = {
    "AsyncNode": "client.async_node",
    "AsyncPubSub": "pubsub",
    "AsyncSubscription": "client.subscription",
    "Element": "client.queue_calls",
    "Message": "client.messages",
    "Node": "client.node",
    "Options": "client.options",
    "PubSub": "pubsub",
    "Published": "client.stream_calls",
    "QueueSizes": "client.queue_calls",
    "StreamMessage": "client.stream_calls",
    "Subscription": "client.subscription",
    "SubscriptionState": "client.stream_calls",
}


def __getattr__(name: str) -> object:
    """Import what is asked for the first time."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Name all there is, imported already or not."""
    return sorted({*globals(), *__all__})
