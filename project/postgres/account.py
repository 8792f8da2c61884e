"""The account the server runs as: ours, or an ordinary one when root starts it."""

import os
import pwd
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.postgres.errors import ServerError

# PostgreSQL refuses to run as root; the first of these that exists runs it then.
ORDINARY_ACCOUNTS = ("postgres", "nobody")


@dataclass(frozen=True)
class Account:
    """An operating system's user that may own a cluster and run its server."""

    name: str
    uid: int
    gid: int

    @classmethod
    def own(cls) -> "Account":
        """Return the account this process runs as."""
        return cls(f"user {os.geteuid()}", os.geteuid(), os.getegid())

    @classmethod
    def for_root(cls, remembered: str | None) -> "Account":
        """Return the account that served a cluster of root's before, or the first ordinary one."""
        for name in (remembered,) if remembered else ORDINARY_ACCOUNTS:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return cls(name, entry.pw_uid, entry.pw_gid)
        raise ServerError(
            "PostgreSQL does not run as root, and none of these users exists to run it:"
            f" {remembered or ', '.join(ORDINARY_ACCOUNTS)}. Try again as an ordinary user."
        )

    @property
    def is_foreign(self) -> bool:
        """Whether it is another account than the one this process runs as."""
        return self.uid != os.geteuid()

    def run(self, *command: Path | str, output: int) -> int:
        """Run a command as this account, away from our terminal, and return its exit code."""
        identity: Mapping[str, Any] = (
            {"user": self.uid, "group": self.gid, "extra_groups": []} if self.is_foreign else {}
        )
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            cwd="/",
            # PGPORT, PGDATA and their like would change the server; English is what we read.
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            umask=0o077,
            start_new_session=True,
            **identity,
        ).returncode

    def can_reach(self, path: Path) -> bool:
        """Whether this account may enter the folder, or execute the program, at `path`."""
        if not self.is_foreign:
            return os.access(path, os.X_OK)
        return self.run("/usr/bin/test", "-x", path, output=subprocess.DEVNULL) == 0

    def make_folder(self, path: Path) -> None:
        """Make a folder that belongs to this account alone; it may be there already."""
        path.mkdir(mode=0o700, exist_ok=True)
        if self.is_foreign:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def write(self, path: Path, text: str) -> None:
        """Write a new file that this account alone can read."""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            if self.is_foreign:
                os.fchown(descriptor, self.uid, self.gid)
            file.write(text)
