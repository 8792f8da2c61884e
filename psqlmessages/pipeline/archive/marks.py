"""Calls that mark topics for the archive. No I/O, no Spark.

A mark is a subscription of the node IDENT: it retains the messages after its position until they
are archived.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psqlmessages.client.calls import Call, check_names, raise_for_error
from psqlmessages.client.stream_calls import unsubscribe
from psqlmessages.exceptions import InvalidArgument

# The node name of the archive.
IDENT: Final = "pipeline.archive"
# 68 years, the longest timeout of a subscription.
_TIMEOUT_SECONDS: Final = 2**31 - 1


def can_be_archived(topic: str) -> bool:
    """Return whether the pipeline can name a topic: its options separate names by commas."""
    return "," not in topic and topic == topic.strip()


def read_last_removed_id(topic: str) -> Call[int]:
    """Return the id up to which messages of a topic were removed; 0 if none were."""
    return Call(
        "SELECT messages.stream_horizons(%s, ARRAY[%s::text])",
        check_names(IDENT, topic),
        lambda answer: int(raise_for_error(answer)["Topics"][0]["Removed"]),
    )


def mark(positions: Mapping[str, int]) -> Call[dict[str, int]]:
    """Mark topics: retain their messages after these positions until they are archived.

    Returns the topics that lost messages after their position, with the last removed id. Raises
    InvalidArgument for a topic that cannot be archived.
    """
    for topic in positions:
        if not can_be_archived(topic):
            raise InvalidArgument(
                f"topic {topic!r} cannot be archived: its name contains a comma, or starts or"
                " ends with whitespace"
            )
    names, ids = list(check_names(*positions)), list(positions.values())
    return Call(
        "SELECT messages.subscribe_from(%s, %s::text[], %s::bigint[], %s)",
        (*check_names(IDENT), names, ids, _TIMEOUT_SECONDS),
        lambda answer: {m["Topic"]: m["Removed"] for m in raise_for_error(answer)["Missed"]},
    )


def unmark(topic: str) -> Call[bool]:
    """Remove the mark of a topic; return False if there was none."""
    return unsubscribe(IDENT, topic)


def list_marked() -> Call[list[str]]:
    """List the marked topics that the rules allow this role to use, ordered by name."""
    return Call(
        "SELECT json_agg(s.topic ORDER BY s.topic) FROM messages.stream_subscriptions AS s"
        " WHERE s.client = %s",
        check_names(IDENT),
        lambda answer: list(answer or ()),
    )
