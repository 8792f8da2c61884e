"""Folder: an archive's files on any file system that Hadoop knows, through Spark's JVM."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import uuid4

from py4j.protocol import Py4JJavaError

from psqlmessages.pipeline.archive_layout import ArchiveFault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark would take them for patterns when it reads.
_PATTERNS: Final = frozenset("*?[]{},")


class Folder:
    """A folder by its path or address (/data/archive, hdfs://…, s3a://…); names below it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        if found := _PATTERNS & set(root):
            raise ArchiveFault(f"the path {root!r} cannot hold {' '.join(sorted(found))}")
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
