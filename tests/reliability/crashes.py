"""How often a node is told of another's crash."""

from datetime import timedelta

from psqlmessages import Node

PATIENCE, A_MOMENT = timedelta(seconds=90), timedelta(seconds=1)


def told(node: Node, ident: str) -> int:
    """Wait until a node is told of a crash, and a moment longer; how often it was told by then."""
    times, patience = 0, PATIENCE
    while True:
        for message in node.messages(timeout=patience):
            if (message.event, message.ident) == ("crash", ident):
                times, patience = times + 1, A_MOMENT
                break
        else:
            return times
