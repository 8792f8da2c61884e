"""The table of traffic: windows are written whole, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Final

from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.traffic import Window

_COLUMNS: Final = tuple(field.name for field in fields(Window))
_KEY: Final = ("window_seconds", "starts_at", "topic", "sender")
_TYPES: Final = ("text", "text", "int", "timestamptz", "bigint", "bigint", *["float8"] * 6)
# A window's count only grows. A smaller one comes from a job that began anew, without its
# checkpoint, when some of the window's messages were no longer kept.
_UPSERT: Final = f"""
    WITH written AS (
        INSERT INTO psqlmessages_traffic AS t ({", ".join(_COLUMNS)})
        SELECT * FROM unnest({", ".join(f"%s::{type_}[]" for type_ in _TYPES)})
        ON CONFLICT ({", ".join(_KEY)}) DO UPDATE
        SET {", ".join(f"{name} = excluded.{name}" for name in _COLUMNS if name not in _KEY)}
        WHERE t.count <= excluded.count
        RETURNING 1
    )
    SELECT count(*) FROM written
"""  # noqa: S608 - names of ours alone


class TrafficTable:
    """Writes windows, on a connection of its own, as a role that may: the tables' owner."""

    def __init__(self) -> None:
        self._database = Database({})

    def write(self, windows: Sequence[Window]) -> int:
        """Make the windows what they are now; return how many it changed.

        The same may be written again. A database that goes away is waited for, some minutes.
        """
        if not windows:
            return 0
        columns = [list(map(attrgetter(name), windows)) for name in _COLUMNS]
        ((changed,),) = self._database.rows(_UPSERT, columns)
        return int(changed)

    def close(self) -> None:
        """Disconnect."""
        self._database.close()
