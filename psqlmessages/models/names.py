"""Names and their fields. Collation C compares bytes, so that prefixes use the index."""

from typing import Any, Final

from django.db import models

from psqlmessages.wire import describe_unstorable

NAME_CHARACTERS: Final = 100


def is_name(name: str) -> bool:
    """Return whether PostgreSQL can store a node or topic with this name."""
    return 0 < len(name) <= NAME_CHARACTERS and not describe_unstorable(name)


def patterns(name: str) -> list[str]:
    """List the values in rules that match a name: itself, and each of its prefixes with *."""
    # Rules contain no longer patterns, and time grows with the square of the length.
    longest = min(len(name), NAME_CHARACTERS)
    return [name, *(f"{name[:length]}*" for length in range(longest + 1))]


class NameField(models.CharField):
    """A node, topic or queue name: at most 100 characters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": NAME_CHARACTERS, "db_collation": "C", **kwargs})


class RoleField(models.CharField):
    """The name of a PostgreSQL role: at most 63 bytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": 63, "db_collation": "C", **kwargs})
