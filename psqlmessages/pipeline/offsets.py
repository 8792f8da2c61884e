"""Offsets of streams, as they stand in checkpoints: which cluster, and how far in each topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psqlmessages.pipeline.errors import MessagesGone, OtherCluster


@dataclass(frozen=True)
class Offset:
    """Positions in topics: the id of the last message read of each."""

    cluster: str
    positions: Mapping[str, int]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Offset:
        """Read what a checkpoint holds."""
        return cls(str(value["cluster"]), {str(t): int(p) for t, p in value["positions"].items()})

    def as_json(self) -> dict[str, Any]:
        """Write it. Spark compares offsets as text, so the order is always the same."""
        return {"cluster": self.cluster, "positions": dict(sorted(self.positions.items()))}


def check_cluster(expected: str, found: str) -> None:
    """Raise OtherCluster where a checkpoint is of another database than the one connected to."""
    if expected != found:
        raise OtherCluster(
            f"the checkpoint was written against the database {expected}, and this is {found}"
            " (cluster/database): its positions mean nothing here. Connect to the one it was"
            " written against, or begin with a new checkpoint"
        )


def check_not_put_back(offset: Offset, last: Mapping[str, int]) -> None:
    """Raise OtherCluster where a topic's last message comes before what was read of it.

    Ids only grow: the server was put back to an earlier state, or lost what it had committed last.
    """
    for topic, position in offset.positions.items():
        if 0 < last.get(topic, 0) < position:
            raise OtherCluster(
                f"topic {topic}: this query has read up to {position}, and the last message is"
                f" {last[topic]}: the database was put back to an earlier state, and new messages"
                " have ids that were read already. Begin with a new checkpoint"
            )


def vanished(topic: str, position: int) -> MessagesGone:
    """Make the error of a topic that went while a batch was planned or read."""
    return MessagesGone(
        f"topic {topic}: it is there no more, or no rule lets it be read: what came after"
        f" {position} is lost to this query. Set failOnDataLoss=false to go on without it"
    )


def gone(topic: str, position: int, removed: int, timeout: int) -> MessagesGone:
    """Make the error of messages that are kept no more: what, and how to mend it."""
    return MessagesGone(
        f"topic {topic}: this query has read up to {position}, and messages up to {removed} are"
        f" kept no more: {removed - position} at most are lost to it. Set failOnDataLoss=false"
        " to go on with what is kept, or begin with a new checkpoint; a longer timeout (now"
        f" {timeout} s) or a retention of the topic keeps messages for a query that is away"
    )
