"""Prepared: hot calls as prepared statements, by libpq's own functions.

A cursor of psycopg adapts, describes and collects for any type and number of rows; that takes as
long as a short round trip. Here are one row, one column, and text or arrays of text.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from psycopg import pq

_SUCCESS: Final = b'{"Err":"0"}'
_JSON_OID: Final = 114
_TEXT_OID: Final = 25
_PLACEHOLDER: Final = re.compile("%[sb]")
_ARRAY_HEAD: Final = struct.Struct("!5i")
_LENGTH: Final = struct.Struct("!i")


class Statement(NamedTuple):
    """A statement that a connection has prepared: its name, and the formats of its parameters."""

    name: bytes
    sql: bytes
    formats: tuple[pq.Format, ...]

    @classmethod
    def of(cls, sql: str, number: int) -> Statement:
        """Translate psycopg's placeholders: %s for text, %b for arrays of text."""
        found = _PLACEHOLDER.findall(sql)
        pieces = _PLACEHOLDER.split(sql)
        numbered = "".join(f"{piece}${n}" for n, piece in enumerate(pieces[:-1], 1)) + pieces[-1]
        formats = tuple(pq.Format.BINARY if kind == "%b" else pq.Format.TEXT for kind in found)
        return cls(f"psqlmessages_{number}".encode(), numbered.encode(), formats)


def encoded(params: Sequence[Any]) -> list[bytes | None]:
    """Write parameters as they travel: str, None, or a list of str."""
    return [
        value.encode() if isinstance(value, str) else None if value is None else _array(value)
        for value in params
    ]


def _array(texts: list[str]) -> bytes:
    if not texts:
        return struct.pack("!3i", 0, 0, _TEXT_OID)
    pieces = [_ARRAY_HEAD.pack(1, 0, _TEXT_OID, len(texts), 1)]
    pack = _LENGTH.pack
    for body in map(str.encode, texts):
        pieces.append(pack(len(body)))
        pieces.append(body)
    return b"".join(pieces)


def first_value(result: pq.abc.PGresult) -> Any:
    """Read the first column of the first row, which is JSON or text."""
    value = result.get_value(0, 0) if result.ntuples else None
    if value is None:
        return None
    if value == _SUCCESS:
        return {"Err": "0"}
    return json.loads(value) if result.ftype(0) == _JSON_OID else value.decode()
