"""Names and their fields. Collation C: names compare byte by byte, prefixes use the index."""

from typing import Any, Final

from django.db import models

NAME_CHARACTERS: Final = 100


def is_name(name: str) -> bool:
    """Tell whether PostgreSQL could hold a node or topic of this name."""
    if not 0 < len(name) <= NAME_CHARACTERS or "\0" in name:
        return False
    # Lone surrogates, which JSON can write, are no text.
    return name.encode(errors="replace").decode() == name


def patterns(name: str) -> list[str]:
    """List what a row may hold to mean a name: itself, and each of its beginnings with *."""
    # No row holds more: a name of kilobytes must not cost its square.
    most = min(len(name), NAME_CHARACTERS)
    return [name, *(f"{name[:length]}*" for length in range(most + 1))]


class NameField(models.CharField):
    """A node, topic or queue name: at most 100 characters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": NAME_CHARACTERS, "db_collation": "C", **kwargs})


class RoleField(models.CharField):
    """The name of a PostgreSQL role: at most 63 bytes there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": 63, "db_collation": "C", **kwargs})
