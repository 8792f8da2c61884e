"""The folder of one cluster: its data, socket, log, port and passwords."""

import hashlib
import os
import shutil
import stat
import tempfile
from functools import cached_property
from pathlib import Path

from project.postgres.account import Account
from project.postgres.errors import ServerError
from project.postgres.files import write_whole
from project.postgres.passwords import Passwords
from project.postgres.ports import free_port, is_free

REFUGES = Path("/var/tmp")  # noqa: S108 (what lies there is ours, or is refused)
MAX_BYTES_OF_SOCKET_PATH = 107
MAX_BYTES_OF_LOG = 10 * 1024 * 1024


class Home:
    """Where a cluster lies; nothing is made before `prepare`."""

    def __init__(self, folder: Path) -> None:
        self.asked_folder = folder.resolve()

    @cached_property
    def account(self) -> Account:
        """The account that owns the data and runs the server."""
        if os.geteuid() != 0:
            return Account.own()
        file = self.asked_folder / "account"
        return Account.for_root(file.read_text() if file.exists() else None)

    @cached_property
    def folder(self) -> Path:
        """The folder asked for, or one under `REFUGES` if the server's account cannot enter it."""
        asked = self.asked_folder
        nearest = next(path for path in (asked, *asked.parents) if path.exists())
        if not self.account.is_foreign or self.account.can_reach(nearest):
            return asked
        digest = hashlib.sha256(os.fsencode(asked.parent)).hexdigest()[:16]
        return REFUGES / f"psqlmessages-{digest}" / asked.name

    @property
    def data(self) -> Path:
        """The data folder (PGDATA)."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.folder / "server.log"

    @property
    def passwords(self) -> Passwords:
        """The passwords of the cluster's roles."""
        return Passwords(self.folder / "passwords")

    @property
    def port(self) -> int:
        """The port of 127.0.0.1 that the server was last given; 0 if it never ran."""
        file = self.folder / "port"
        return int(file.read_text()) if file.exists() else 0

    def prepare(self) -> None:
        """Make the folder; parents that are there already keep their permissions."""
        _make_folders(self.asked_folder, 0o711 if self.account.is_foreign else 0o700)
        if self.account.is_foreign and not (self.asked_folder / "account").exists():
            write_whole(self.asked_folder / "account", self.account.name)
        if self.folder != self.asked_folder:
            self._make_refuge(self.folder.parent)
            _make_folders(self.folder, 0o711)
            (self.asked_folder / "WHERE.txt").write_text(
                f"The user '{self.account.name}' runs the server and cannot enter this folder.\n"
                f"So the cluster lies in {self.folder}\n"
            )

    def _make_refuge(self, refuge: Path) -> None:
        # The refuge stays root's, and lets the account's group pass: a process of `nobody` could
        # otherwise lay a link where root then writes. Its name is known, so others may be there.
        refuge.mkdir(mode=0o700, exist_ok=True)
        found = refuge.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ServerError(f"{refuge} belongs to somebody else: remove it, then try again.")
        os.chown(refuge, os.geteuid(), self.account.gid, follow_symlinks=False)
        refuge.chmod(0o710)

    def claim_data(self) -> None:
        """Give data that are ours to the server's account: so it is where root copied a project."""
        if self.account.is_foreign and self.data.stat().st_uid == os.geteuid():
            for path in (self.data, *self.data.rglob("*")):
                os.chown(path, self.account.uid, self.account.gid, follow_symlinks=False)

    def choose_port(self) -> int:
        """Keep the port if it is free, else choose another; clients reconnect to the same one."""
        port = self.port if self.port and is_free(self.port) else free_port()
        write_whole(self.folder / "port", str(port))
        return port

    def socket_folder(self) -> Path:
        """Return the folder of the server's socket: ours, or a short one that ours leads to."""
        own = self.folder / "socket"
        if len(os.fsencode(own / ".s.PGSQL.65535")) <= MAX_BYTES_OF_SOCKET_PATH:
            self.account.make_folder(own)
            return own
        if not own.is_dir():
            own.unlink(missing_ok=True)
            own.symlink_to(tempfile.mkdtemp(prefix="psqlmessages-"))
        short = own.readlink()
        if short.lstat().st_uid not in (os.geteuid(), self.account.uid):
            raise ServerError(f"{short} belongs to somebody else: remove {own}, then try again.")
        self.account.make_folder(short)
        return short

    def bound_log(self) -> None:
        """Put the log aside where it has grown too long; a running server goes on writing it."""
        if self.log.exists() and self.log.stat().st_size > MAX_BYTES_OF_LOG:
            shutil.copyfile(self.log, self.log.with_name("server.log.1"))
            os.truncate(self.log, 0)

    def remove(self) -> None:
        """Delete all that lies in the folder; the server must have been stopped."""
        own, refuge = self.folder / "socket", self.folder.parent
        if own.is_symlink():
            shutil.rmtree(own.readlink(), ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder != self.asked_folder:
            shutil.rmtree(self.asked_folder, ignore_errors=True)
            if not any(refuge.glob("*/lock")):  # the copied programs served its clusters alone
                shutil.rmtree(refuge, ignore_errors=True)


def _make_folders(folder: Path, mode: int) -> None:
    # With the mode from the first moment: others may look at once whether they can enter.
    umask = os.umask(0)
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode, exist_ok=True)
    finally:
        os.umask(umask)
