"""Layout: where an archive keeps a topic's messages, and what its files hold."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final

from psqlmessages.exceptions import MessagesError

# What every file holds: the topic too, so that its folder's name may be another.
COLUMNS: Final = {
    "id": "bigint",
    "topic": "string",
    "sender": "string",
    "body": "string",
    "enc": "string",
    "headers": "string",
    "published_at": "timestamp",
}
SCHEMA: Final = ", ".join(f"{name} {type_}" for name, type_ in COLUMNS.items())

# Of a name without any other character, and without what looks like the end of a changed one.
_PLAIN: Final = re.compile(r"(?!.*-[0-9a-f]{16}$)(?!__HIVE)[A-Za-z0-9._-]{1,60}")
_OTHER: Final = re.compile(r"[^A-Za-z0-9._-]")


class ArchiveFault(MessagesError):
    """An archive is not what it should be, or not of this database."""


def key(topic: str) -> str:
    """Return 16 characters that stand for a topic: hexadecimal, so safe in any path."""
    return sha256(topic.encode()).hexdigest()[:16]


def folder(topic: str) -> str:
    """Return the name of a topic's folder: its own where that is safe in any path.

    Else with the unsafe characters replaced, cut, and made unique again. Where letters' case does
    not count in paths, two topics may share a folder: their files have names of their own.
    """
    if _PLAIN.fullmatch(topic):
        return f"stream={topic}"
    return f"stream={_OTHER.sub('_', topic)[:60]}-{key(topic)}"


@dataclass(frozen=True, slots=True)
class File:
    """One file of an archive, below its folder data: rows of one topic and one day, by id.

    ``first`` and ``last`` are ids. ``staged`` is where it lies until it is moved to ``path``.
    """

    path: str
    topic: str
    date: str
    rows: int
    first: int
    last: int
    bytes: int
    staged: str = ""

    @classmethod
    def of(cls, staged: str, row: Any, unique: str) -> File:
        """Make the entry of a file that was just written, of what was found in it."""
        date = staged.rpartition("/date=")[2].partition("/")[0]
        name = f"{row['first']}-{row['last']}-{key(row['topic'])}-{unique}.parquet"
        return cls(
            path=f"{folder(row['topic'])}/date={date}/{name}",
            topic=row["topic"],
            date=date,
            rows=row["rows"],
            first=row["first"],
            last=row["last"],
            bytes=row["bytes"],
            staged=staged,
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as the log keeps it."""
        return asdict(self)
