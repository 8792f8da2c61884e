"""Frames of the monitor as JSON values. Pure functions."""

from __future__ import annotations

from typing import Any, Final

from psqlmessages.monitor.history import KEPT, RATE_SECONDS, MessageRecord, TopicHistory
from psqlmessages.monitor.queries import RULES, RuleRow

# Each point of a sparkline covers this many seconds.
BUCKET_SECONDS: Final = 10
_NAMES_IN_ROW: Final = 3
_NAMES: Final = 200
BODY_BYTES: Final = 4096


def row(topic: TopicHistory, second: int, buckets: int) -> dict[str, Any]:
    """Describe a topic for the list, with its last ``buckets`` buckets."""
    return {
        "topic": topic.name,
        **figures(topic, second),
        **members(topic, _NAMES_IN_ROW),
        "buckets": _buckets(topic, second // BUCKET_SECONDS, buckets),
    }


def figures(topic: TopicHistory, second: int) -> dict[str, Any]:
    """Return a topic's totals since the monitor started, and its rates per second."""
    rate = topic.rate(second)
    return {
        "count": topic.count,
        "size": topic.size,
        "last": topic.last_at or None,
        "rate": rate.count / RATE_SECONDS,
        "size_rate": rate.size / RATE_SECONDS,
    }


def _buckets(topic: TopicHistory, newest: int, number: int) -> list[int]:
    """Return the number of the first bucket, followed by the message count of each bucket."""
    first = newest - number + 1
    if topic.seconds is None or topic.last_at < first * BUCKET_SECONDS:
        return []
    return [first, *topic.seconds.sums(first * BUCKET_SECONDS, BUCKET_SECONDS, number)]


def topic_frame(
    topic: TopicHistory,
    second: int,
    *,
    with_bodies: bool,
    after: int = 0,
    seconds: range | None = None,
) -> dict[str, Any]:
    """Describe a topic for its own page: messages numbered above ``after``, and these seconds.

    By default, describe its whole history.
    """
    seconds = range(second - KEPT + 1, second) if seconds is None else seconds
    each = topic.seconds.each(seconds.start, seconds.stop - 1) if topic.seconds else []
    return {
        "name": topic.name,
        "is_there": topic.is_there,
        **figures(topic, second),
        "seconds": [(seconds.start + n, *amount) for n, amount in enumerate(each) if amount.count],
        "tail": [
            message_frame(message, with_body=with_bodies)
            for message in topic.tail
            if message.number > after
        ],
    }


def members(topic: TopicHistory, most: int = _NAMES) -> dict[str, Any]:
    """Return a topic's senders and listeners, limited to what a page can show, and their counts."""
    return {
        "notifiers": sorted(topic.notifiers)[:most],
        "notifier_count": len(topic.notifiers),
        "listeners": sorted(topic.listeners)[:most],
        "listener_count": len(topic.listeners),
    }


def authorized(rules: list[RuleRow] | None) -> dict[str, Any]:
    """Describe the rules for a topic; null if they could not be read."""
    if rules is None:
        return {"rules": None, "has_more_rules": False}
    return {
        "rules": [rule._asdict() for rule in rules[:RULES]],
        "has_more_rules": len(rules) > RULES,
    }


def message_frame(message: MessageRecord, *, with_body: bool) -> dict[str, Any]:
    """Describe a message without its reply token, which would let others answer it."""
    described = {
        "number": message.number,
        "at": message.at,
        "from": message.sender,
        "size": message.size,
        "enc": message.enc,
        "wants_answer": message.wants_answer,
        "is_kept": message.is_kept,
    }
    if with_body and message.body is not None:
        beginning = message.body.encode(errors="replace")[:BODY_BYTES].decode(errors="ignore")
        described["body"] = beginning
        described["is_cut"] = message.is_cut or len(beginning) < len(message.body)
    return described
