"""Private folders: the user's own, and temporary files of a driver."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

LOCK, DRIVER = "lock", "driver-"


class FolderUnsafe(OSError):
    """Other users can write to a folder, so its contents cannot be trusted."""


def private_folder(folder: Path) -> Path:
    """Create a folder if missing; raise :class:`FolderUnsafe` if other users can change it.

    Refuses a link to a folder too: its owner could change the target.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise FolderUnsafe(f"{folder} is not a folder owned by user {os.getuid()}: remove it")
    if found.st_mode & 0o022:
        raise FolderUnsafe(f"other users can write to {folder}. Run: chmod 700 {folder}")
    return folder


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file atomically: a reader gets the old text or the new one."""
    descriptor, new = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(new).chmod(mode)
    Path(new).replace(path)


def shared_by_own_processes() -> Path:
    """Return this user's own folder in the directory for temporary files."""
    # Keep it short: a Unix socket in a driver's folder must stay under 104 bytes.
    return private_folder(Path(tempfile.gettempdir()) / f"psqlmessages-{os.getuid()}")


@cache
def driver_folder() -> Path:
    """Return this process's folder for Spark's files, and delete those of dead processes.

    A process holds the lock of its folder until it dies, even if it is killed.
    """
    parent = shared_by_own_processes()
    lock = _lock(parent / LOCK)
    try:
        for other in parent.glob(f"{DRIVER}*"):
            if _is_dead(other):
                # A Java process that is just exiting may delete files at the same time: no error.
                shutil.rmtree(other, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=DRIVER, dir=parent))
        _lock(folder / LOCK)
    finally:
        os.close(lock)
    return folder


def _lock(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _is_dead(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
