"""Leases as an offset holds them: one text, as short as their secrets allow. Pure functions."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final
from uuid import UUID

# That many a call takes.
MOST: Final = 4096

_FORM: Final = struct.Struct(">q16s")


def packed(leases: Iterable[str]) -> str:
    """Write leases as 32 characters each, where their own form has some 50."""
    return base64.b64encode(b"".join(_FORM.pack(*_parts(lease)) for lease in leases)).decode()


def unpacked(text: str) -> list[str]:
    """Read what :func:`packed` wrote."""
    found = _FORM.iter_unpack(base64.b64decode(text, validate=True))
    return [f"{id_}.{UUID(bytes=secret)}" for id_, secret in found]


def in_calls(leases: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut leases into as many as one call takes."""
    for first in range(0, len(leases), MOST):
        yield leases[first : first + MOST]


def in_parts(leases: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Cut leases into parts of about equal size, none of them empty."""
    size = -(-len(leases) // max(1, parts))
    return [leases[first : first + size] for first in range(0, len(leases), size or 1)]


def _parts(lease: str) -> tuple[int, bytes]:
    id_, _, secret = lease.partition(".")
    return int(id_), UUID(secret).bytes
