"""Archive log: numbered entries, each written completely or not at all. Names of data files.

An entry lists the files that it adds and removes, and the archived positions of topics. The entry
takes effect when its own file exists. Then its data files are moved to the folder DATA, for
programs that do not read the log. After a crash, `ArchiveLog.load` moves the remaining files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import uuid4

from py4j.protocol import Py4JJavaError

from psqlmessages.exceptions import MessagesError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Topics that can be folder names: safe characters, no hash at the end, no name that Hive reserves.
_SAFE_NAME: Final = re.compile(r"(?!.*-[0-9a-f]{16}$)(?!__HIVE)[A-Za-z0-9._-]{1,60}")
_UNSAFE_CHARACTER: Final = re.compile(r"[^A-Za-z0-9._-]")


class ArchiveError(MessagesError):
    """An archive is damaged or missing, belongs to another database, or lacks requested data."""


def topic_hash(topic: str) -> str:
    """Return 16 hexadecimal characters that identify a topic, safe in any path."""
    return sha256(topic.encode()).hexdigest()[:16]


def topic_folder(topic: str) -> str:
    """Return a topic's folder: ``stream=`` and the topic, or else a similar name with a hash.

    On file systems that ignore case, two topics may share a folder, but never a file.
    """
    if _SAFE_NAME.fullmatch(topic):
        return f"stream={topic}"
    return f"stream={_UNSAFE_CHARACTER.sub('_', topic)[:60]}-{topic_hash(topic)}"


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One data file: rows of one topic and one day, with ids from ``first`` to ``last``.

    ``staged`` is its location until it is moved to ``path`` in the data folder.
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
    def from_statistics(cls, staged: str, row: Any, unique: str) -> ArchiveFile:
        """Describe a new file by the statistics in ``row``; ``unique`` makes its name unique."""
        date = staged.rpartition("/date=")[2].partition("/")[0]
        name = f"{row['first']}-{row['last']}-{topic_hash(row['topic'])}-{unique}.parquet"
        path = f"{topic_folder(row['topic'])}/date={date}/{name}"
        statistics = row["rows"], row["first"], row["last"], row["bytes"]
        return cls(path, row["topic"], date, *statistics, staged)


# Spark treats paths with these characters as patterns.
_GLOB_CHARACTERS: Final = frozenset("*?[]{},")


class ArchiveFolder:
    """The files of an archive at a path or URI (/data, hdfs://…, s3a://…), through Spark's JVM.

    The names of files are relative to ``root``.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        if invalid := _GLOB_CHARACTERS & set(root):
            raise ArchiveError(f"the path {root!r} must not contain {' '.join(sorted(invalid))}")
        self._jvm = cast(Any, spark._jvm)
        configuration = spark._jsparkSession.sessionState().newHadoopConf()
        path = self._jvm.org.apache.hadoop.fs.Path(root)
        self._files = path.getFileSystem(configuration)
        self.root: str = self._files.makeQualified(path).toString().rstrip("/")
        self._is_local = self._files.getScheme() == "file"

    def address(self, name: str) -> str:
        """Return the full URI of a name, as Spark expects it."""
        return f"{self.root}/{name}"

    def exists(self, name: str) -> bool:
        """Return whether a file or folder of this name exists."""
        return bool(self._files.exists(self._path(name)))

    def list_entries(self, name: str) -> dict[str, float]:
        """Return the direct entries of a folder: name → modification time (Unix time)."""
        if not self.exists(name):
            return {}
        entries = self._files.listStatus(self._path(name))
        return {each.getPath().getName(): each.getModificationTime() / 1000 for each in entries}

    def read(self, name: str) -> str:
        """Read a file's text; raises FileNotFoundError."""
        try:
            stream = self._files.open(self._path(name))
        except Py4JJavaError as error:
            if _is_missing(error):
                raise FileNotFoundError(self.address(name)) from None
            raise
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()

    def create(self, name: str, text: str) -> bool:
        """Create a file atomically; return False if the name exists already.

        On S3, two processes that create the same name at the same time may both succeed.
        """
        draft = f"{STAGING}/{uuid4().hex}"
        stream = self._files.create(self._path(draft), True)
        try:
            stream.write(bytearray(text.encode()))
            stream.hsync()
        finally:
            stream.close()
        try:
            return self._rename_if_new(draft, name)
        finally:
            self.delete(draft)

    def _rename_if_new(self, draft: str, name: str) -> bool:
        if not self._is_local:
            self._files.mkdirs(self._path(name).getParent())
            return not self.exists(name) and bool(
                self._files.rename(self._path(draft), self._path(name))
            )
        # A hard link fails if the name exists. If each checked the name and then renamed its file,
        # two processes could both succeed.
        target = self._local(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(self._local(draft))
        except FileExistsError:
            return False
        self.sync_to_disk([name])
        return True

    def move(self, source: str, target: str) -> bool:
        """Move a file; return False if it was not moved, for instance if it does not exist."""
        path = self._path(target)
        self._files.mkdirs(path.getParent())
        try:
            return bool(self._files.rename(self._path(source), path))
        except Py4JJavaError as error:
            if _is_missing(error):
                return False
            raise

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its contents; do nothing if it does not exist."""
        self._files.delete(self._path(name), True)

    def sync_to_disk(self, names: Iterable[str]) -> None:
        """Sync files and their parent folders to disk, on a local file system only.

        PostgreSQL deletes archived messages, so the archive must survive a power failure.
        """
        if not self._is_local:
            return
        root = self._local("")
        files = [self._local(name) for name in names]
        parents = {path for file in files for path in file.parents if path.is_relative_to(root)}
        for path in [*files, *parents]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.address(name))

    def _local(self, name: str) -> Path:
        return Path("/" + self.root.removeprefix("file:").lstrip("/")) / name


def _is_missing(error: Py4JJavaError) -> bool:
    return "FileNotFoundException" in str(error.java_exception.getClass().getName())


DATA: Final = "data"
STAGING: Final = "_staging"

_LOG: Final = "_log"
_ENTRIES_PER_SNAPSHOT: Final = 100
_DAY_SECONDS: Final = 24 * 60 * 60
_LOAD_ATTEMPTS: Final = 10


@dataclass(frozen=True, slots=True)
class ArchiveLogEntry:
    """One change: added files, removed paths, changed positions (topic → last archived id)."""

    add: tuple[ArchiveFile, ...] = ()
    remove: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""  # Of the archive; empty: unchanged.
    cluster: str = ""  # Of the database; empty: unchanged.

    def as_json(self) -> str:
        """Return the entry as JSON. The timestamp ``at`` is only for people."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return json.dumps({"at": at, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def of(cls, text: str) -> ArchiveLogEntry:
        """Parse an entry."""
        fields: dict[str, Any] = json.loads(text)
        del fields["at"]
        add = tuple(ArchiveFile(**file) for file in fields.pop("add"))
        return cls(add, tuple(fields.pop("remove")), **fields)


class ArchiveLog:
    """The log of one archive, and the archive's state after the entry ``version`` (-1: none)."""

    def __init__(self, folder: ArchiveFolder) -> None:
        self.folder = folder
        self._reset()

    def _reset(self) -> None:
        self._refreshed_at = time()
        self.version = -1
        self.identity = self.cluster = ""
        self.files: dict[str, ArchiveFile] = {}
        self.positions: dict[str, int] = {}

    def load(self) -> None:
        """Read the last snapshot and later entries; complete moves that were interrupted."""
        for _ in range(_LOAD_ATTEMPTS):
            # If another process writes a snapshot and deletes old entries, start again.
            with suppress(FileNotFoundError):
                return self._load()
        raise ArchiveError(f"an entry is missing in the log of {self.folder.root}")

    def refresh(self) -> None:
        """Read the entries that other processes have added, and complete their moves."""
        if time() - self._refreshed_at > 60 * 60:
            # After a long pause (the machine slept), the next entries may have been deleted.
            self.load()
        self._refreshed_at = time()
        while (entry := self._read_entry(self.version + 1)) is not None:
            self._append(entry)

    def commit(self, entry: ArchiveLogEntry) -> bool:
        """Add an entry and move its files; return False if another process added an entry first."""
        self.folder.sync_to_disk(file.staged for file in entry.add)
        if not self.folder.create(_entry_name(self.version + 1), entry.as_json()):
            return False
        self._append(entry)
        if self.version and self.version % _ENTRIES_PER_SNAPSHOT == 0:
            self._write_snapshot()
        return True

    def delete_stale_staging(self) -> None:
        """Delete staged files older than a day: killed processes have left them."""
        for name, changed_at in self.folder.list_entries(STAGING).items():
            if changed_at < time() - _DAY_SECONDS:
                self.folder.delete(f"{STAGING}/{name}")

    def _load(self) -> None:
        self._reset()
        present = self.folder.list_entries(_LOG)
        # Names: s<version>.json is a snapshot, <version>.json an entry.
        snapshots = [int(name[1:-5]) for name in present if name[0] == "s"]
        if snapshots:
            snapshot = self.folder.read(_entry_name(max(snapshots), "s"))
            self._update_state(ArchiveLogEntry.of(snapshot))
            self.version = max(snapshots)
        elif not any(name[0].isdigit() for name in present):
            return
        # A process completes all moves before it adds an entry, so only the last entry's moves can
        # be incomplete.
        if self.version >= 0 and (last := self._read_entry(self.version)) is not None:
            self._move_files(last)
        self.refresh()

    def _append(self, entry: ArchiveLogEntry) -> None:
        self._update_state(entry)
        self.version += 1
        self._move_files(entry)

    def _update_state(self, entry: ArchiveLogEntry) -> None:
        for path in entry.remove:
            self.files.pop(path, None)
        self.files.update((file.path, replace(file, staged="")) for file in entry.add)
        self.positions.update(entry.positions)
        self.identity = entry.identity or self.identity
        self.cluster = entry.cluster or self.cluster

    def _move_files(self, entry: ArchiveLogEntry) -> None:
        """Delete and move the files of an entry, unless that was done before."""
        # Delete first: a program that reads only the folder may miss rows, but reads none twice.
        for path in entry.remove:
            self.folder.delete(f"{DATA}/{path}")
        moved = []
        for file in entry.add:
            target = f"{DATA}/{file.path}"
            if self.folder.move(file.staged, target) or self.folder.exists(target):
                moved.append(target)
            else:
                self._check_superseded(target)
        try:
            self.folder.sync_to_disk(moved)
        except FileNotFoundError as error:
            self._check_superseded(str(error.filename))

    def _check_superseded(self, name: str) -> None:
        """Raise ArchiveError unless there is a newer entry, which may have removed the file."""
        if self._read_entry(self.version + 1) is None:
            raise ArchiveError(f"{self.folder.address(name)} is missing")

    def _read_entry(self, version: int) -> ArchiveLogEntry | None:
        name = _entry_name(version)
        return ArchiveLogEntry.of(self.folder.read(name)) if self.folder.exists(name) else None

    def _write_snapshot(self) -> None:
        """Write a snapshot; delete earlier entries and snapshots that are older than a day.

        Other processes may still read newer ones.
        """
        snapshot = ArchiveLogEntry(
            tuple(self.files.values()), (), self.positions, self.identity, self.cluster
        )
        self.folder.create(_entry_name(self.version, "s"), snapshot.as_json())
        cutoff = time() - _DAY_SECONDS
        for name, changed_at in self.folder.list_entries(_LOG).items():
            if int(name.lstrip("s")[:-5]) < self.version and changed_at < cutoff:
                self.folder.delete(f"{_LOG}/{name}")


def _entry_name(version: int, prefix: str = "") -> str:
    return f"{_LOG}/{prefix}{version:020}.json"
