"""Archive marks: PostgreSQL stores the messages of marked topics until they are archived."""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS

from psqlmessages import orm
from psqlmessages.client.stream_calls import unsubscribe
from psqlmessages.pipeline.archive import mark_calls


def mark(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Mark a topic; return False if it was marked already.

    From now on, PostgreSQL removes the topic's messages only after the pipeline has archived them.
    Runs in Django's transaction. Raises MessagesError if the name cannot be archived, there is no
    such topic, or no rule lets Django's role read the topic as the node ``pipeline.archive``.
    """
    if topic in list_marked(using):
        return False
    last_removed_id = orm.run(mark_calls.read_last_removed_id(topic), using)
    orm.run(mark_calls.mark({topic: last_removed_id}), using)
    return True


def unmark(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Remove the mark of a topic; return False if it was not marked.

    Runs in Django's transaction. Raises MessagesError if the call is refused.
    """
    return orm.run(unsubscribe(mark_calls.IDENT, topic), using)


def list_marked(using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """List the marked topics that the rules let Django's role use, ordered by name."""
    return orm.run(mark_calls.list_marked(), using)
