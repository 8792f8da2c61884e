"""PubSub: bare channels with segmented payloads: no rules, no tables, nothing stored."""

from psqlmessages.pubsub.async_pubsub import AsyncPubSub
from psqlmessages.pubsub.events import Counters, Event
from psqlmessages.pubsub.pubsub import PubSub

__all__ = ["AsyncPubSub", "Counters", "Event", "PubSub"]
