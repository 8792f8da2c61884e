"""PubSub: plain NOTIFY channels with segmented payloads; no rules, no tables, nothing stored."""

from psqlmessages.pubsub.async_pubsub import AsyncPubSub
from psqlmessages.pubsub.bus_state import BusCounters, Event
from psqlmessages.pubsub.pubsub import PubSub

__all__ = ["AsyncPubSub", "BusCounters", "Event", "PubSub"]
