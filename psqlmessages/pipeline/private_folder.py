"""Private folders for temporary files: one per user, and one per Spark driver."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_LOCK_FILE = "lock"
_DRIVER_PREFIX = "driver-"


class FolderUnsafe(OSError):
    """A path is a link or not a folder, or another user owns the folder or can write to it."""


def private_folder(folder: Path) -> Path:
    """Create a folder if missing; raise FolderUnsafe unless only this user can write to the folder.

    Also raises FolderUnsafe for a link, because the owner of a link can change its target.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise FolderUnsafe(f"{folder} is not a folder owned by user {os.getuid()}: remove it")
    if status.st_mode & 0o022:
        raise FolderUnsafe(f"other users can write to {folder}. Run: chmod 700 {folder}")
    return folder


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file atomically: readers get either the old or the new text."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(draft).chmod(mode)
    Path(draft).replace(path)


def user_folder() -> Path:
    """Return this user's own folder in the directory for temporary files."""
    # Keep the path short: paths of Unix sockets in a driver's folder must be under 104 bytes.
    return private_folder(Path(tempfile.gettempdir()) / f"psqlmessages-{os.getuid()}")


@cache
def driver_folder() -> Path:
    """Return this process's folder for Spark's files, and delete the folders of dead processes.

    Each process locks its folder. When the process ends or is killed, the kernel unlocks it.
    """
    parent = user_folder()
    lock = _acquire_lock(parent / _LOCK_FILE)
    try:
        for existing in parent.glob(f"{_DRIVER_PREFIX}*"):
            if _is_unlocked(existing):
                # A Java process that is exiting may delete files at the same time.
                shutil.rmtree(existing, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_DRIVER_PREFIX, dir=parent))
        _acquire_lock(folder / _LOCK_FILE)
    finally:
        os.close(lock)
    return folder


def _acquire_lock(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _is_unlocked(folder: Path) -> bool:
    try:
        with suppress(FileNotFoundError), (folder / _LOCK_FILE).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
