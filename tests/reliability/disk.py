"""A disk that can be full: a small tmpfs, and a file that takes what is left of it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.conftest import TestedServer


class Disk:
    """A file system in memory, of so many megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, spare: int = 0) -> int:
        """Take all that is left, once more too, but for some bytes; return how many that were."""
        taken = 0
        with self._ballast.open("ab", buffering=0) as file:
            before = file.tell()
            for chunk in (b"\0" * 16384, b"\0" * 4096):
                while (written := _written(file.fileno(), chunk)) == len(chunk):
                    taken += written
            taken = max(0, taken - spare)
            file.truncate(before + taken)
        return taken

    def give(self, size: int) -> None:
        os.truncate(self._ballast, self._ballast.stat().st_size - size)

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


def _written(descriptor: int, chunk: bytes) -> int:
    try:
        return os.write(descriptor, chunk)
    except OSError:
        return 0


@contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Mount one; the test is skipped where that is not permitted."""
    folder.mkdir()
    how = ("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    try:
        subprocess.run(["mount", *how], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", error)
        pytest.skip(f"a disk that can be full is mounted by root: {why}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def move_tables(own: TestedServer, disk: Disk) -> None:
    """Move the database onto the disk; the log of changes and the rest stay where they are."""
    place, owner = disk.folder / "tables", own.server.home.data.stat()
    place.mkdir(mode=0o700)
    os.chown(place, owner.st_uid, owner.st_gid)
    with psycopg.connect(own.server.superuser_url(), autocommit=True) as superuser:
        superuser.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        superuser.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s",
            (own.database,),
        )
        superuser.execute(f"ALTER DATABASE {own.database} SET TABLESPACE small")


def move_log(own: TestedServer, disk: Disk) -> None:
    """Move the log of changes (WAL) onto the disk."""
    own.server.stop()
    there, here = disk.folder / "wal", own.server.home.data / "pg_wal"
    subprocess.run(["cp", "-a", str(here), str(there)], check=True)
    shutil.rmtree(here)
    here.symlink_to(there)
    own.server.start()


def move_log_back(own: TestedServer, disk: Disk) -> None:
    own.server.stop()
    there, here = disk.folder / "wal", own.server.home.data / "pg_wal"
    here.unlink()
    subprocess.run(["cp", "-a", str(there), str(here)], check=True)
    own.server.start()
