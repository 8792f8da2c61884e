"""Log: what an archive holds, as numbered entries that are each written at once or not at all.

An entry says which files come, which go, and how far each topic is archived then. It counts from
the moment it is there; only then are its files moved to where plain readers look, and by whoever
comes next where that was cut off. So there is nothing in between two entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import time
from typing import Any, Final
from uuid import uuid4

from psqlmessages.pipeline.archive_folder import Folder
from psqlmessages.pipeline.archive_layout import ArchiveFault, File

DATA: Final = "data"
STAGING: Final = "_staging"

_LOG: Final = "_log"
_ENTRIES_PER_SNAPSHOT: Final = 100
_DAY_SECONDS: Final = 24 * 60 * 60
_HOUR_SECONDS: Final = 60 * 60
_RACES: Final = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: files that come and go, and positions (topic → last archived id) that moved."""

    add: tuple[File, ...] = ()
    remove: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""
    cluster: str = ""

    def as_json(self) -> str:
        """Return it as text, with the time it was made at, which only people read."""
        return json.dumps(
            {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "identity": self.identity,
                "cluster": self.cluster,
                "positions": dict(self.positions),
                "remove": list(self.remove),
                "add": [file.as_json() for file in self.add],
            },
            ensure_ascii=False,
        )

    @classmethod
    def of(cls, text: str) -> Entry:
        """Read one."""
        found: dict[str, Any] = json.loads(text)
        return cls(
            tuple(File(**file) for file in found["add"]),
            tuple(found["remove"]),
            found["positions"],
            found["identity"],
            found["cluster"],
        )


class Log:
    """The entries of one archive, and what they come to: ``files`` by path, ``positions``.

    Several processes may write: whoever comes second with a number is refused, and looks again.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self._looked_at = time()
        self.version = -1
        self.identity = self.cluster = ""
        self.files: dict[str, File] = {}
        self.positions: dict[str, int] = {}

    def load(self) -> None:
        """Read all there is, and finish what was cut off."""
        for _ in range(_RACES):
            try:
                return self._load()
            except FileNotFoundError:
                # Another process has just removed old entries, which a snapshot holds by now.
                continue
        raise ArchiveFault(f"the log of {self.folder.root} has lost an entry")

    def refresh(self) -> None:
        """Read what others have added since."""
        if time() - self._looked_at > _HOUR_SECONDS:
            # Of long ago (a machine that slept), the next number may be one that was removed.
            self.load()
        self._looked_at = time()
        while (text := self._entry(self.version + 1)) is not None:
            entry = Entry.of(text)
            self._fold(entry)
            self.version += 1
            self._apply(entry)

    def commit(self, entry: Entry) -> bool:
        """Add an entry, and move its files; False where somebody else has added one meanwhile."""
        self.folder.settle(file.staged for file in entry.add)
        if not self.folder.create(_name(self.version + 1), entry.as_json()):
            return False
        self._fold(entry)
        self.version += 1
        self._apply(entry)
        if self.version and self.version % _ENTRIES_PER_SNAPSHOT == 0:
            self._shorten()
        return True

    def sweep(self) -> None:
        """Remove what was staged a day ago and never came to count."""
        for name, changed_at in self.folder.names(STAGING).items():
            if changed_at < time() - _DAY_SECONDS:
                self.folder.delete(f"{STAGING}/{name}")

    def _load(self) -> None:
        self._forget()
        present = self.folder.names(_LOG)
        snapshots = [int(name[1:-5]) for name in present if name[0] == "s"]
        if snapshots:
            self._fold(Entry.of(self.folder.read(_snapshot(max(snapshots)))))
            self.version = max(snapshots)
        elif not any(name[0].isdigit() for name in present):
            return
        # Whoever adds an entry has moved the files of all before: only the last may be cut off.
        last = self._entry(self.version) if self.version >= 0 else None
        if last is not None:
            self._apply(Entry.of(last))
        self.refresh()

    def _fold(self, entry: Entry) -> None:
        for path in entry.remove:
            self.files.pop(path, None)
        self.files.update((file.path, replace(file, staged="")) for file in entry.add)
        self.positions.update(entry.positions)
        self.identity = entry.identity or self.identity
        self.cluster = entry.cluster or self.cluster

    def _apply(self, entry: Entry) -> None:
        """Bring the files where an entry wants them. Once more does nothing."""
        # Out before in: whoever reads the folder itself may miss rows now, but gets none twice.
        for path in entry.remove:
            self.folder.delete(f"{DATA}/{path}")
        moved = []
        for file in entry.add:
            target = f"{DATA}/{file.path}"
            if self.folder.move(file.staged, target) or self.folder.exists(target):
                moved.append(target)
            else:
                self._missing(target)
        try:
            self.folder.settle(moved)
        except FileNotFoundError as error:
            self._missing(str(error.filename))

    def _missing(self, name: str) -> None:
        """Raise, unless another entry is there: who added it has seen to the files of this one."""
        if self._entry(self.version + 1) is None:
            raise ArchiveFault(f"{self.folder.address(name)} is missing")

    def _entry(self, version: int) -> str | None:
        name = _name(version)
        return self.folder.read(name) if self.folder.exists(name) else None

    def _shorten(self) -> None:
        """Write all of it as one, and remove what that holds: of yesterday, so nobody reads it."""
        whole = Entry(tuple(self.files.values()), (), self.positions, self.identity, self.cluster)
        self.folder.create(_snapshot(self.version), whole.as_json())
        before = time() - _DAY_SECONDS
        for name, changed_at in self.folder.names(_LOG).items():
            if int(name.lstrip("s")[:-5]) < self.version and changed_at < before:
                self.folder.delete(f"{_LOG}/{name}")


def written(paths: Iterable[str], rows: Iterable[Any]) -> tuple[File, ...]:
    """Make the entries of files just written; ``rows`` says what is in each."""
    unique = uuid4().hex[:8]
    return tuple(
        File.of(path, row, f"{unique}{number}")
        for number, (path, row) in enumerate(zip(paths, rows, strict=True))
    )


def _name(version: int) -> str:
    return f"{_LOG}/{version:020}.json"


def _snapshot(version: int) -> str:
    return f"{_LOG}/s{version:020}.json"
