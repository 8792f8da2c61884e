"""The tables of psqlmessages. SQL reads and writes them; Django makes and shows them."""

from psqlmessages.models.bodies import Body
from psqlmessages.models.exchanges import Destination, Exchange, ExchangeCount
from psqlmessages.models.identities import WebIdentity
from psqlmessages.models.pipeline import PipelineJob, Traffic
from psqlmessages.models.queues import Element, ElementKey, Queue, QueueCount
from psqlmessages.models.rules import Auth
from psqlmessages.models.sessions import Client, Session
from psqlmessages.models.streams import StreamMessage, Subscription
from psqlmessages.models.topics import Membership, Observation, Topic

__all__ = [
    "Auth",
    "Body",
    "Client",
    "Destination",
    "Element",
    "ElementKey",
    "Exchange",
    "ExchangeCount",
    "Membership",
    "Observation",
    "PipelineJob",
    "Queue",
    "QueueCount",
    "Session",
    "StreamMessage",
    "Subscription",
    "Topic",
    "Traffic",
    "WebIdentity",
]
