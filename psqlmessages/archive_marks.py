"""Archive marks for Django: topics that store their messages until the pipeline archives them."""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS

from psqlmessages import orm
from psqlmessages.pipeline.archive import marks


def mark(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Store a topic's messages, from the oldest one, until archived; False if already marked.

    Runs on Django's connection, within its transaction. Raises the errors of
    :mod:`psqlmessages.exceptions`: a rule must let the role of the database read the topic as
    ``pipeline.archive``.
    """
    if is_marked(topic, using):
        return False
    position = orm.run(marks.read_removed_id(topic), using)
    orm.run(marks.mark({topic: position}), using)
    return True


def unmark(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Stop storing a topic's messages for the archive; False if the topic was not marked."""
    return orm.run(marks.unmark(topic), using)


def is_marked(topic: str, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Return whether a topic's messages are stored until they are archived."""
    return topic in list_marked(using)


def list_marked(using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """List the marked topics, ordered by name."""
    return orm.run(marks.list_marked(), using)
