"""PubSub: plain NOTIFY channels with segmented payloads; no rules, no tables, nothing stored."""

from psqlmessages.pubsub.bus_state import BusCounters, Event
from psqlmessages.pubsub.pubsub import AsyncPubSub, PubSub

__all__ = ["AsyncPubSub", "BusCounters", "Event", "PubSub"]
