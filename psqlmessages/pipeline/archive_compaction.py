"""Compaction: many small files of a topic's day become few large ones; a log entry swaps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from math import ceil
from typing import TYPE_CHECKING, Final

from psqlmessages.pipeline.archive_layout import ArchiveFault, File
from psqlmessages.pipeline.archive_log import Entry

if TYPE_CHECKING:
    from psqlmessages.pipeline.archive import Archive

# Files of this size are left alone.
LARGE_BYTES: Final = 128 * 1024 * 1024
# So many files of about the same size are merged: each row is then written anew a few times only.
MANY: Final = 16
_SMALLEST_BYTES: Final = 32 * 1024


def due(files: Iterable[File], today: date) -> Iterator[list[File]]:
    """Yield what is worth merging: many files of about one size; of days before, any small ones.

    Each is of one topic and one day.
    """
    for small in _small(files):
        if small[0].date < today.isoformat() and len(small) > 1:
            yield small
            continue
        sizes: dict[int, list[File]] = defaultdict(list)
        for file in small:
            sizes[_size_class(file)].append(file)
        yield from (same for same in sizes.values() if len(same) >= MANY)


def compact_some(archive: Archive) -> int:
    """Merge the first of what is due, as a job does between batches; how many files went."""
    first = next(due(archive.log.files.values(), datetime.now(UTC).date()), None)
    return merge(archive, first) if first else 0


def compact_all(archive: Archive) -> Iterator[tuple[list[File], int]]:
    """Merge all small files of each topic and day; yield them, and how many went (0: too late)."""
    archive.log.refresh()
    for small in list(_small(archive.log.files.values())):
        if len(small) > 1:
            yield small, merge(archive, small)


def merge(archive: Archive, files: list[File]) -> int:
    """Write files anew as few, and swap them in one entry; how many went, 0 where others did it.

    Other processes may add files meanwhile. Raises ArchiveFault where rows got lost in reading.
    """
    return archive.looked_at(lambda: _merged(archive, files))


def _merged(archive: Archive, files: list[File]) -> int:
    if any(file.path not in archive.log.files for file in files):
        return 0
    number = max(1, ceil(sum(file.bytes for file in files) / LARGE_BYTES))
    rows = archive.read(files)
    rows = rows.coalesce(1) if number == 1 else rows.repartitionByRange(number, "id")
    with archive.staged(rows) as made:
        if sum(file.rows for file in made) != sum(file.rows for file in files):
            raise ArchiveFault(
                f"{files[0].path} and {len(files) - 1} more hold other rows than the log says"
            )
        entry = Entry(add=made, remove=tuple(file.path for file in files))
        while all(path in archive.log.files for path in entry.remove):
            if archive.log.commit(entry):
                return len(files) - len(made)
            archive.log.refresh()
    return 0


def _small(files: Iterable[File]) -> Iterator[list[File]]:
    groups: dict[tuple[str, str], list[File]] = defaultdict(list)
    for file in files:
        if file.bytes < LARGE_BYTES:
            groups[file.topic, file.date].append(file)
    yield from groups.values()


def _size_class(file: File) -> int:
    """Return the power of eight that a size is about, from the smallest that is worth telling."""
    return max(file.bytes // _SMALLEST_BYTES, 1).bit_length() // 3
