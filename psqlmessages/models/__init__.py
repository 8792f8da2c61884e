"""Tables of psqlmessages. Django creates them; the SQL functions, admin and monitor use them."""

from psqlmessages.models.exchanges import Destination, Exchange, ExchangeCount
from psqlmessages.models.minutes import HistoryPeriod, QueueMinute, RefusedCall, TopicMinute
from psqlmessages.models.nodes import Body, Client, Membership, Observation, Session, Topic
from psqlmessages.models.pipeline import PipelineJob, Traffic
from psqlmessages.models.queues import Element, ElementKey, Queue, QueueCount
from psqlmessages.models.rules import Auth, WebIdentity
from psqlmessages.models.streams import StreamMessage, Subscription

__all__ = [
    "Auth",
    "Body",
    "Client",
    "Destination",
    "Element",
    "ElementKey",
    "Exchange",
    "ExchangeCount",
    "HistoryPeriod",
    "Membership",
    "Observation",
    "PipelineJob",
    "Queue",
    "QueueCount",
    "QueueMinute",
    "RefusedCall",
    "Session",
    "StreamMessage",
    "Subscription",
    "Topic",
    "TopicMinute",
    "Traffic",
    "WebIdentity",
]
