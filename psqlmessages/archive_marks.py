"""Archive marks: PostgreSQL stores the messages of marked topics until they are archived."""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS

from psqlmessages import orm
from psqlmessages.pipeline.archive import marks


def mark(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Mark a topic; return False if it was marked already.

    PostgreSQL then stores the topic's messages until they are archived. Runs in Django's
    transaction. Raises InvalidArgument if the pipeline cannot name the topic, and NotAuthorized or
    NotExistent unless a rule lets Django's role read the topic as the node ``pipeline.archive``.
    """
    if is_marked(topic, using):
        return False
    last_removed_id = orm.run(marks.read_last_removed_id(topic), using)
    orm.run(marks.mark({topic: last_removed_id}), using)
    return True


def unmark(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Remove the mark of a topic; return False if it was not marked."""
    return orm.run(marks.unmark(topic), using)


def is_marked(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Return whether :func:`list_marked` contains the topic."""
    return topic in list_marked(using)


def list_marked(using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """List the marked topics that Django's role may use, ordered by name."""
    return orm.run(marks.list_marked(), using)
