"""Fields for names. Collation C: names compare byte by byte, and prefixes use the index."""

from typing import Any

from django.db import models


class NameField(models.CharField):
    """A node, topic or queue name: at most 100 characters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": 100, "db_collation": "C", **kwargs})


class RoleField(models.CharField):
    """The name of a PostgreSQL role: at most 63 bytes there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": 63, "db_collation": "C", **kwargs})
