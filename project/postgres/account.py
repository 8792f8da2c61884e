"""Operating-system account of the server: the user's own; for root, an ordinary account."""

import os
import pwd
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.postgres.errors import ServerError

# PostgreSQL refuses to run as root. Root runs it as the first existing account of these.
ORDINARY_ACCOUNTS = ("postgres", "nobody")


@dataclass(frozen=True)
class Account:
    """An operating-system user that owns a cluster and runs its server."""

    name: str
    uid: int
    gid: int

    @classmethod
    def own(cls) -> "Account":
        """Return the account of this process."""
        return cls(f"user {os.geteuid()}", os.geteuid(), os.getegid())

    @classmethod
    def for_root(cls, name: str | None) -> "Account":
        """Return the account with this name; for None, the first ordinary account that exists."""
        names = (name,) if name else ORDINARY_ACCOUNTS
        for each in names:
            try:
                entry = pwd.getpwnam(each)
            except KeyError:
                continue
            return cls(each, entry.pw_uid, entry.pw_gid)
        raise ServerError(
            "PostgreSQL does not run as root, and none of these users exists to run it:"
            f" {', '.join(names)}. Try again as an ordinary user."
        )

    @property
    def is_foreign(self) -> bool:
        """Whether this process runs as another account."""
        return self.uid != os.geteuid()

    def run(self, *command: Path | str, output: int) -> int:
        """Run a command as this account, without a terminal, and return its exit code."""
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
            # Omit PGPORT, PGDATA and similar variables. Server._launch parses English messages.
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            umask=0o077,
            start_new_session=True,
            **identity,
        ).returncode

    def can_reach(self, path: Path) -> bool:
        """Return whether this account may enter the folder, or execute the program, at `path`."""
        if not self.is_foreign:
            return os.access(path, os.X_OK)
        return self.run("/usr/bin/test", "-x", path, output=subprocess.DEVNULL) == 0

    def create_folder(self, path: Path) -> None:
        """Create a folder that only this account can read. An existing folder keeps its mode."""
        path.mkdir(mode=0o700, exist_ok=True)
        if self.is_foreign:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def write(self, path: Path, text: str) -> None:
        """Create a file that only this account can read; raise FileExistsError if it exists."""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            if self.is_foreign:
                os.fchown(descriptor, self.uid, self.gid)
            file.write(text)
