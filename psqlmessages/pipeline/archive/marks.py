"""Marks: topics that keep their messages until they are archived. A mark is a subscription.

No Spark, and no I/O: calls as values, for the pipeline and for Django.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psqlmessages.client.calls import Call, check_names, raise_for_error
from psqlmessages.exceptions import InvalidArgument

# The node that the archive acts as.
IDENT: Final = "pipeline.archive"
# The most that a subscription can have: 68 years after its last sign of life.
FOR_EVER_SECONDS: Final = 2**31 - 1


def can_be_archived(topic: str) -> bool:
    """Say whether the pipeline can read a topic: in its options, names stand between commas."""
    return "," not in topic and topic == topic.strip()


def removed(topic: str) -> Call[int]:
    """Return the id up to which a topic's messages are kept no more; 0: all are kept."""
    return Call(
        "SELECT messages.stream_horizons(%s, ARRAY[%s::text])",
        check_names(IDENT, topic),
        lambda answer: int(raise_for_error(answer)["Topics"][0]["Removed"]),
    )


def mark(positions: Mapping[str, int]) -> Call[dict[str, int]]:
    """Keep what lies after these positions until it is archived.

    The result: topics of which messages after the position are gone already, and up to which.
    Raises InvalidArgument for a topic that cannot be archived.
    """
    for topic in positions:
        if not can_be_archived(topic):
            raise InvalidArgument(
                f"topic {topic!r} cannot be archived: its name holds a comma, or begins or ends"
                " with a blank"
            )
    return Call(
        "SELECT messages.subscribe_from(%s, %s::text[], %s::bigint[], %s)",
        (
            *check_names(IDENT),
            list(check_names(*positions)),
            list(positions.values()),
            FOR_EVER_SECONDS,
        ),
        lambda answer: {
            each["Topic"]: each["Removed"] for each in raise_for_error(answer)["Missed"]
        },
    )


def unmark(topic: str) -> Call[bool]:
    """Keep nothing for the archive any more; the result is whether the topic was marked."""
    return Call(
        "SELECT messages.unsubscribe(%s, %s)",
        check_names(IDENT, topic),
        lambda answer: not raise_for_error(answer).get("Already"),
    )


def marked() -> Call[list[str]]:
    """List the marked topics that a rule lets this role use, in order of their names."""
    return Call(
        "SELECT json_agg(s.topic ORDER BY s.topic) FROM messages.stream_subscriptions AS s"
        " WHERE s.client = %s",
        check_names(IDENT),
        lambda answer: list(answer or ()),
    )
