"""SQL literals, for statements without parameters. Pure functions."""

from __future__ import annotations

from datetime import UTC, datetime


def text(value: str) -> str:
    r"""Return a string literal that does not depend on the setting standard_conforming_strings.

    Raises ValueError for characters that PostgreSQL cannot store: ``\0`` and lone surrogates.
    """
    if "\0" in value:
        raise ValueError("the text has a NUL character")
    value.encode()
    quoted = value.replace("'", "''")
    if "\\" not in quoted:
        return f"'{quoted}'"
    escaped = quoted.replace("\\", "\\\\")
    return f"E'{escaped}'"


def timestamp(value: datetime) -> str:
    """Return a timestamptz literal (UTC if ``value`` has no zone); raises ValueError."""
    aware = value if value.utcoffset() is not None else value.replace(tzinfo=UTC)
    if aware.year < 1000:
        raise ValueError("PostgreSQL may misread a year before 1000")
    return f"'{aware.astimezone(UTC).isoformat()}'::timestamptz"
