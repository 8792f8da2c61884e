"""Names and their fields. Collation C compares bytes, so that prefixes use the index."""

import re
from typing import Any, Final

from django.db import models

from psqlmessages.wire import describe_unstorable

NAME_CHARACTERS: Final = 100


def is_name(name: str) -> bool:
    """Return whether PostgreSQL can store a node or topic with this name."""
    return 0 < len(name) <= NAME_CHARACTERS and not describe_unstorable(name)


# Controls that change the direction of the text around them; isolates begin and end with these.
_DIRECTION_CONTROLS: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
_ISOLATE: Final = "\u2068"
_END_OF_ISOLATE: Final = "\u2069"


def isolate(named: object | None) -> str:
    """Return a name that leaves the direction of a sentence around it unchanged, when displayed.

    A name may contain U+202E, which reverses the text after it. None becomes "".
    """
    text = "" if named is None else str(named)
    if not (found := _DIRECTION_CONTROLS.findall(text)):
        return text
    # The text may end the isolate, and begin others.
    ends = 1 + found.count(_END_OF_ISOLATE)
    return _ISOLATE * ends + text + _END_OF_ISOLATE * (ends + len(found))


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
