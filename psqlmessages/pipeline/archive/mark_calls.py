"""Calls that mark topics for the archive. No I/O, no Spark.

A mark is a subscription of the node IDENT: it retains the messages that are not archived yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psqlmessages.client.calls import Call, check_names, raise_for_error
from psqlmessages.client.stream_calls import subscribe_from
from psqlmessages.exceptions import InvalidArgument

# The node name of the archive.
IDENT: Final = "pipeline.archive"
# 68 years, the longest timeout of a subscription.
_TIMEOUT_SECONDS: Final = 2**31 - 1


def can_be_archived(topic: str) -> bool:
    """Return whether a topic can be archived: the source's option ``topic`` must accept its name.

    The option is a list of names with commas, and ignores spaces around names.
    """
    return "," not in topic and topic == topic.strip()


def read_last_removed_id(topic: str) -> Call[int]:
    """Create a call that returns the id of the last removed message of a topic; 0 if none was."""
    return Call(
        "SELECT messages.stream_horizons(%s, ARRAY[%s::text])",
        check_names(IDENT, topic),
        # If ``topic`` is a pattern, there may be no topics. `mark` refuses patterns later.
        lambda answer: next((int(t["Removed"]) for t in raise_for_error(answer)["Topics"]), 0),
    )


def mark(positions: Mapping[str, int]) -> Call[dict[str, int]]:
    """Create a call that marks topics, or moves their marks: topic → last archived id.

    The call returns the topics whose messages after that id were removed: topic → last removed id.
    Raises InvalidArgument for a topic that cannot be archived.
    """
    for topic in positions:
        if not can_be_archived(topic):
            raise InvalidArgument(
                f"topic {topic!r} cannot be archived: its name contains a comma, or starts or"
                " ends with whitespace"
            )
    return subscribe_from(IDENT, positions, _TIMEOUT_SECONDS)


def list_marked() -> Call[list[str]]:
    """Create a call that lists the marked topics that the rules let the role use, by name."""
    return Call(
        "SELECT json_agg(s.topic ORDER BY s.topic) FROM messages.stream_subscriptions AS s"
        " WHERE s.client = %s",
        check_names(IDENT),
        lambda answer: list(answer or ()),
    )
