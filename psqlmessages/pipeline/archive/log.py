"""Archive log: numbered entries, each written completely or not at all.

An entry lists the files that it adds and removes, and the archived position of each topic. It takes
effect when its file exists. Only then are its data files moved to the folder that plain readers
use. If that is interrupted, the next process to open the log finishes it, so readers of the log
see no state between two entries.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
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


# Layout: folders and columns of an archive's files.

# The columns of each file. They include the topic, since the name of its folder may differ.
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

# Topics whose name is used for the folder unchanged: safe characters only, and no ending that looks
# like the hash of a changed name.
_PLAIN: Final = re.compile(r"(?!.*-[0-9a-f]{16}$)(?!__HIVE)[A-Za-z0-9._-]{1,60}")
_OTHER: Final = re.compile(r"[^A-Za-z0-9._-]")


class ArchiveError(MessagesError):
    """An archive is damaged, missing, or belongs to another database."""


def key(topic: str) -> str:
    """Return 16 hexadecimal characters that identify a topic, safe in any path."""
    return sha256(topic.encode()).hexdigest()[:16]


def folder(topic: str) -> str:
    """Return the name of a topic's folder: the topic itself if it is safe in any path.

    Otherwise replace unsafe characters, truncate, and append a hash. On file systems that ignore
    case, two topics may share a folder; the names of their files still differ.
    """
    if _PLAIN.fullmatch(topic):
        return f"stream={topic}"
    return f"stream={_OTHER.sub('_', topic)[:60]}-{key(topic)}"


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One file of an archive, relative to the data folder: rows of one topic and one day, by id.

    ``first`` and ``last`` are ids. ``staged`` is its location until it is moved to ``path``.
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
    def of(cls, staged: str, row: Any, unique: str) -> ArchiveFile:
        """Make the entry of a newly written file from the statistics in ``row``."""
        date = staged.rpartition("/date=")[2].partition("/")[0]
        name = f"{row['first']}-{row['last']}-{key(row['topic'])}-{unique}.parquet"
        path = f"{folder(row['topic'])}/date={date}/{name}"
        size = row["rows"], row["first"], row["last"], row["bytes"]
        return cls(path, row["topic"], date, *size, staged)


# Folder: the files of an archive on any file system that Hadoop supports, through Spark's JVM.

# When reading, Spark treats these as glob patterns.
_PATTERNS: Final = frozenset("*?[]{},")


class ArchiveFolder:
    """A folder by path or URI (/data/archive, hdfs://…, s3a://…), with names relative to it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        if found := _PATTERNS & set(root):
            raise ArchiveError(f"the path {root!r} must not contain {' '.join(sorted(found))}")
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

    def names(self, name: str) -> dict[str, float]:
        """Return the direct entries of a folder with their modification times (Unix time)."""
        if not self.exists(name):
            return {}
        found = self._files.listStatus(self._path(name))
        return {each.getPath().getName(): each.getModificationTime() / 1000 for each in found}

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

        If two processes create the same name, one wins on local disks and HDFS. S3 does not
        guarantee this.
        """
        draft = f"_staging/{uuid4().hex}"
        stream = self._files.create(self._path(draft), True)
        try:
            stream.write(bytearray(text.encode()))
            stream.hsync()
        finally:
            stream.close()
        try:
            return self._claim(draft, name)
        finally:
            self.delete(draft)

    def _claim(self, draft: str, name: str) -> bool:
        if not self._is_local:
            self._files.mkdirs(self._path(name).getParent())
            return not self.exists(name) and bool(
                self._files.rename(self._path(draft), self._path(name))
            )
        # Hadoop's rename checks and then renames, so two processes could both succeed.
        target = self._local(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(self._local(draft))
        except FileExistsError:
            return False
        self.settle([name])
        return True

    def move(self, source: str, target: str) -> bool:
        """Move a file; return False if the source does not exist."""
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

    def settle(self, names: Iterable[str]) -> None:
        """Sync files and their parent folders to disk, on a local file system only.

        PostgreSQL deletes archived messages, so the archive must survive a power failure.
        """
        if not self._is_local:
            return
        files, root = [self._local(name) for name in names], self._local("")
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
_RACES: Final = 10


@dataclass(frozen=True, slots=True)
class ArchiveLogEntry:
    """One change: files added and removed, and changed positions (topic → last archived id)."""

    add: tuple[ArchiveFile, ...] = ()
    remove: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""
    cluster: str = ""

    def as_json(self) -> str:
        """Return the entry as JSON text. The timestamp is for people only."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return json.dumps({"at": at, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def of(cls, text: str) -> ArchiveLogEntry:
        """Parse an entry."""
        found: dict[str, Any] = json.loads(text)
        return cls(
            tuple(ArchiveFile(**file) for file in found["add"]),
            tuple(found["remove"]),
            found["positions"],
            found["identity"],
            found["cluster"],
        )


class ArchiveLog:
    """The log of one archive, and the state it describes: ``files`` by path, and ``positions``.

    Several processes may write. If two add an entry with the same number, the second fails, reads
    the new entries and tries again.
    """

    def __init__(self, folder: ArchiveFolder) -> None:
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self._refreshed_at = time()
        self.version = -1
        self.identity = self.cluster = ""
        self.files: dict[str, ArchiveFile] = {}
        self.positions: dict[str, int] = {}

    def load(self) -> None:
        """Read the whole log, and finish an interrupted entry."""
        for _ in range(_RACES):
            try:
                return self._load()
            except FileNotFoundError:
                # Another process has just deleted old entries that are in its new snapshot.
                continue
        raise ArchiveError(f"an entry is missing in the log of {self.folder.root}")

    def refresh(self) -> None:
        """Read the entries that other processes have added."""
        if time() - self._refreshed_at > 60 * 60:
            # After a long pause (the machine slept), the next entry may have been deleted already.
            self.load()
        self._refreshed_at = time()
        while (entry := self._entry(self.version + 1)) is not None:
            self._advance(entry)

    def commit(self, entry: ArchiveLogEntry) -> bool:
        """Add an entry and move its files; return False if another process added an entry first."""
        self.folder.settle(file.staged for file in entry.add)
        if not self.folder.create(_name(self.version + 1), entry.as_json()):
            return False
        self._advance(entry)
        if self.version and self.version % _ENTRIES_PER_SNAPSHOT == 0:
            self._shorten()
        return True

    def sweep(self) -> None:
        """Delete staged files older than a day, which no entry has added."""
        for name, changed_at in self.folder.names(STAGING).items():
            if changed_at < time() - _DAY_SECONDS:
                self.folder.delete(f"{STAGING}/{name}")

    def _load(self) -> None:
        self._forget()
        present = self.folder.names(_LOG)
        snapshots = [int(name[1:-5]) for name in present if name[0] == "s"]
        if snapshots:
            self._fold(ArchiveLogEntry.of(self.folder.read(_name(max(snapshots), "s"))))
            self.version = max(snapshots)
        elif not any(name[0].isdigit() for name in present):
            return
        # Before a process adds an entry, it finishes the others: only the last can be incomplete.
        last = self._entry(self.version) if self.version >= 0 else None
        if last is not None:
            self._apply(last)
        self.refresh()

    def _advance(self, entry: ArchiveLogEntry) -> None:
        self._fold(entry)
        self.version += 1
        self._apply(entry)

    def _fold(self, entry: ArchiveLogEntry) -> None:
        for path in entry.remove:
            self.files.pop(path, None)
        self.files.update((file.path, replace(file, staged="")) for file in entry.add)
        self.positions.update(entry.positions)
        self.identity = entry.identity or self.identity
        self.cluster = entry.cluster or self.cluster

    def _apply(self, entry: ArchiveLogEntry) -> None:
        """Move and delete the files of an entry. Repeating it has no effect."""
        # Delete first: a plain reader of the folder may miss rows now, but reads none twice.
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
        """Raise ArchiveError, unless a newer entry exists: its writer has finished this one."""
        if self._entry(self.version + 1) is None:
            raise ArchiveError(f"{self.folder.address(name)} is missing")

    def _entry(self, version: int) -> ArchiveLogEntry | None:
        name = _name(version)
        exists = self.folder.exists(name)
        return ArchiveLogEntry.of(self.folder.read(name)) if exists else None

    def _shorten(self) -> None:
        """Write a snapshot, and delete the entries in it that are over a day old.

        Other processes may still be reading newer ones.
        """
        whole = ArchiveLogEntry(
            tuple(self.files.values()), (), self.positions, self.identity, self.cluster
        )
        self.folder.create(_name(self.version, "s"), whole.as_json())
        before = time() - _DAY_SECONDS
        for name, changed_at in self.folder.names(_LOG).items():
            if int(name.lstrip("s")[:-5]) < self.version and changed_at < before:
                self.folder.delete(f"{_LOG}/{name}")


def _name(version: int, prefix: str = "") -> str:
    return f"{_LOG}/{prefix}{version:020}.json"
