"""Density: where in a topic's ids its messages lie, found by counting a hundredth of them.

All topics draw their ids from one sequence, so a topic's may be few here and many there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.ranges import Range, Weighed
from psqlmessages.pipeline.stream_calls import call

# Narrower ranges are cut evenly: counting would cost more than an uneven cut.
_WIDE: Final = 200_000
_WINDOWS: Final = 64
_SHARE: Final = 100
_MOST_TOPICS: Final = 16


def weighed(database: Database, client: str, wholes: Sequence[Range]) -> list[Weighed]:
    """Cut wide ranges into windows, and estimate how many messages are in each part."""
    widest = sorted((r for r in wholes if r.width > _WIDE), key=lambda r: -r.width)
    cut = {whole: list(_windows(whole)) for whole in widest[:_MOST_TOPICS]}
    windows = [window for of_one in cut.values() for window in of_one]
    counts = dict(zip(windows, _counts(database, client, windows), strict=True))
    return [
        Weighed(part, counts[part] * _SHARE if part in counts else part.width)
        for whole in wholes
        for part in cut.get(whole, [whole])
    ]


def _windows(whole: Range) -> Iterator[Range]:
    bounds = [whole.low + whole.width * n // _WINDOWS for n in range(_WINDOWS + 1)]
    for low, high in pairwise(bounds):
        yield Range(whole.topic, low, high, whole.is_checked)


def _counts(database: Database, client: str, windows: Sequence[Range]) -> Iterator[int]:
    if not windows:
        return
    looks = []
    for window in windows:
        middle = (window.low + window.high) // 2
        part = Range(window.topic, middle, middle + max(1, window.width // _SHARE))
        rows = call(client, part, None, with_bodies=False)
        looks.append(f"(SELECT count(*) FROM {rows})")  # noqa: S608
    (row,) = database.rows(f"SELECT {', '.join(looks)}")
    yield from row
