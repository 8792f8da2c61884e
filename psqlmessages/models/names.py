"""Names of nodes, topics, queues and roles: checks, patterns, display, and model fields."""

import re
from collections.abc import Iterable
from typing import Any, Final

from django.db import models
from django.urls.converters import StringConverter
from django.utils.translation import gettext

from psqlmessages.wire import describe_unstorable

NAME_CHARACTERS: Final = 100


def is_name(name: str) -> bool:
    """Return whether PostgreSQL can store this text as a name of a node, topic or queue."""
    return 0 < len(name) <= NAME_CHARACTERS and not describe_unstorable(name)


class NameConverter(StringConverter):
    """A name in a path of a URL; it may contain slashes and newlines."""

    regex = r"[\s\S]+"


# Unicode controls that change the direction of text. An isolate is text between two of them.
_DIRECTION_CONTROLS: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
_ISOLATE: Final = "\u2068"
_END_OF_ISOLATE: Final = "\u2069"


def isolate(name: object | None) -> str:
    """Return a name that does not change the direction of the text around it.

    A name may contain U+202E, which reverses the text after it. None becomes "".
    """
    text = "" if name is None else str(name)
    if not (controls := _DIRECTION_CONTROLS.findall(text)):
        return text
    # Each U+2069 in the text ends an isolate, so begin one more isolate for each. Then end all that
    # may be open: one U+2069 for each control is enough, and surplus ones have no effect.
    begins = 1 + controls.count(_END_OF_ISOLATE)
    return _ISOLATE * begins + text + _END_OF_ISOLATE * (begins + len(controls))


def list_names(names: Iterable[object], maximum: int, separator: str = ", ") -> str:
    """List at most ``maximum`` names as text, and the number of omitted names; "" without names.

    For one omitted name, the text is "and more": callers may read only one name above the maximum.
    """
    texts = [isolate(name) for name in names]
    listed, omitted = separator.join(texts[:maximum]), len(texts) - maximum
    if omitted <= 0:
        return listed
    text = gettext("{names} and {number} more") if omitted > 1 else gettext("{names} and more")
    return text.format(names=listed, number=f"{omitted:,}")


def patterns(name: str) -> list[str]:
    """List the values in rules that match a name: the name, and each of its prefixes with *."""
    # Patterns in rules are at most this long, and all prefixes of a longer name would take long.
    longest = min(len(name), NAME_CHARACTERS)
    return [name, *(f"{name[:length]}*" for length in range(longest + 1))]


class NameField(models.CharField):
    """A name of at most 100 characters. With collation C, an index finds names by prefix."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": NAME_CHARACTERS, "db_collation": "C", **kwargs})


class RoleField(models.CharField):
    """The name of a PostgreSQL role: at most 63 characters, as PostgreSQL allows 63 bytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": 63, "db_collation": "C", **kwargs})
