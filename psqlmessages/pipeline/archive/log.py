"""Archive log: numbered entries, each written completely or not at all.

An entry says which files come, which go, and how far each topic is archived then. It counts from
the moment it is there; only then are its files moved to where plain readers look, and by whoever
comes next where that was cut off. So there is nothing in between two entries.
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


# Layout: where an archive keeps a topic's messages, and what its files hold.

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


class ArchiveError(MessagesError):
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
class ArchiveFile:
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
    def of(cls, staged: str, row: Any, unique: str) -> ArchiveFile:
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


# Folder: an archive's files on any file system that Hadoop knows, through Spark's JVM.

# Spark would take them for patterns when it reads.
_PATTERNS: Final = frozenset("*?[]{},")


class ArchiveFolder:
    """A folder by its path or address (/data/archive, hdfs://…, s3a://…); names below it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        if found := _PATTERNS & set(root):
            raise ArchiveError(f"the path {root!r} cannot hold {' '.join(sorted(found))}")
        self._jvm = cast(Any, spark._jvm)
        configuration = spark._jsparkSession.sessionState().newHadoopConf()
        path = self._jvm.org.apache.hadoop.fs.Path(root)
        self._files = path.getFileSystem(configuration)
        self.root: str = self._files.makeQualified(path).toString().rstrip("/")
        self._is_local = self._files.getScheme() == "file"

    def address(self, name: str) -> str:
        """Return the full address of a name, as Spark takes it."""
        return f"{self.root}/{name}"

    def exists(self, name: str) -> bool:
        """Say whether there is something of this name."""
        return bool(self._files.exists(self._path(name)))

    def names(self, name: str) -> dict[str, float]:
        """Return what lies directly in a folder, and when each was changed (seconds since 1970)."""
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
        """Make a file at once and whole; False where there is one of this name already.

        Two that do it at the same time: one wins, on local disks and HDFS. S3 cannot promise it.
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
        # Hadoop's own rename looks first and then does it, which two processes could do at once.
        target = self._local(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(self._local(draft))
        except FileExistsError:
            return False
        self.settle([name])
        return True

    def move(self, source: str, target: str) -> bool:
        """Give a file its place; False where the source is not there (any more)."""
        path = self._path(target)
        self._files.mkdirs(path.getParent())
        try:
            return bool(self._files.rename(self._path(source), path))
        except Py4JJavaError as error:
            if _is_missing(error):
                return False
            raise

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing where it is not there."""
        self._files.delete(self._path(name), True)

    def settle(self, names: Iterable[str]) -> None:
        """Have files and the folders they lie in on the disk, as far as it is a disk of ours.

        PostgreSQL forgets what is archived, so a power failure must not take it.
        """
        if not self._is_local:
            return
        files = [self._local(name) for name in names]
        for path in [*files, *{parent for file in files for parent in self._parents(file)}]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _parents(self, file: Path) -> list[Path]:
        root = self._local("")
        return [parent for parent in file.parents if parent.is_relative_to(root)]

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
_HOUR_SECONDS: Final = 60 * 60
_RACES: Final = 10


@dataclass(frozen=True, slots=True)
class ArchiveLogEntry:
    """One change: files that come and go, and positions (topic → last archived id) that moved."""

    add: tuple[ArchiveFile, ...] = ()
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
    def of(cls, text: str) -> ArchiveLogEntry:
        """Read one."""
        found: dict[str, Any] = json.loads(text)
        return cls(
            tuple(ArchiveFile(**file) for file in found["add"]),
            tuple(found["remove"]),
            found["positions"],
            found["identity"],
            found["cluster"],
        )


class ArchiveLog:
    """The entries of one archive, and what they come to: ``files`` by path, ``positions``.

    Several processes may write: whoever comes second with a number is refused, and looks again.
    """

    def __init__(self, folder: ArchiveFolder) -> None:
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self._looked_at = time()
        self.version = -1
        self.identity = self.cluster = ""
        self.files: dict[str, ArchiveFile] = {}
        self.positions: dict[str, int] = {}

    def load(self) -> None:
        """Read all there is, and finish what was cut off."""
        for _ in range(_RACES):
            try:
                return self._load()
            except FileNotFoundError:
                # Another process has just removed old entries, which a snapshot holds by now.
                continue
        raise ArchiveError(f"the log of {self.folder.root} has lost an entry")

    def refresh(self) -> None:
        """Read what others have added since."""
        if time() - self._looked_at > _HOUR_SECONDS:
            # Of long ago (a machine that slept), the next number may be one that was removed.
            self.load()
        self._looked_at = time()
        while (text := self._entry(self.version + 1)) is not None:
            entry = ArchiveLogEntry.of(text)
            self._fold(entry)
            self.version += 1
            self._apply(entry)

    def commit(self, entry: ArchiveLogEntry) -> bool:
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
            self._fold(ArchiveLogEntry.of(self.folder.read(_snapshot(max(snapshots)))))
            self.version = max(snapshots)
        elif not any(name[0].isdigit() for name in present):
            return
        # Whoever adds an entry has moved the files of all before: only the last may be cut off.
        last = self._entry(self.version) if self.version >= 0 else None
        if last is not None:
            self._apply(ArchiveLogEntry.of(last))
        self.refresh()

    def _fold(self, entry: ArchiveLogEntry) -> None:
        for path in entry.remove:
            self.files.pop(path, None)
        self.files.update((file.path, replace(file, staged="")) for file in entry.add)
        self.positions.update(entry.positions)
        self.identity = entry.identity or self.identity
        self.cluster = entry.cluster or self.cluster

    def _apply(self, entry: ArchiveLogEntry) -> None:
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
            raise ArchiveError(f"{self.folder.address(name)} is missing")

    def _entry(self, version: int) -> str | None:
        name = _name(version)
        return self.folder.read(name) if self.folder.exists(name) else None

    def _shorten(self) -> None:
        """Write all of it as one, and remove what that holds: of yesterday, so nobody reads it."""
        whole = ArchiveLogEntry(
            tuple(self.files.values()), (), self.positions, self.identity, self.cluster
        )
        self.folder.create(_snapshot(self.version), whole.as_json())
        before = time() - _DAY_SECONDS
        for name, changed_at in self.folder.names(_LOG).items():
            if int(name.lstrip("s")[:-5]) < self.version and changed_at < before:
                self.folder.delete(f"{_LOG}/{name}")


def written(paths: Iterable[str], rows: Iterable[Any]) -> tuple[ArchiveFile, ...]:
    """Make the entries of files just written; ``rows`` says what is in each."""
    unique = uuid4().hex[:8]
    return tuple(
        ArchiveFile.of(path, row, f"{unique}{number}")
        for number, (path, row) in enumerate(zip(paths, rows, strict=True))
    )


def _name(version: int) -> str:
    return f"{_LOG}/{version:020}.json"


def _snapshot(version: int) -> str:
    return f"{_LOG}/s{version:020}.json"
