"""Folder of a cluster: its data, socket, log, port and passwords."""

import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from datetime import datetime
from functools import cached_property
from pathlib import Path

from project.postgres.account import Account
from project.postgres.errors import ServerError
from project.postgres.ports import free_port, is_free

# The parent of a cluster's folder if the server's account cannot enter the requested folder.
FALLBACK_PARENT = Path("/var/tmp")  # noqa: S108 - folders of other users are refused
MAX_SOCKET_PATH_BYTES = 107
MAX_LOG_BYTES = 10 * 1024 * 1024
PASSWORD_BYTES = 24


def write_atomically(path: Path, text: str) -> None:
    """Create or replace, in one step, a file that only its owner can read."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(draft).replace(path)


def new_password() -> str:
    """Return a random password of letters, digits, '-' and '_', which needs no quoting."""
    return secrets.token_urlsafe(PASSWORD_BYTES)


class Passwords:
    """Passwords of roles in a file that only its owner can read; psql can use it as PGPASSFILE."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, role: str) -> str | None:
        """Return the stored password of a role; None if there is none."""
        return self._read().get(role)

    def store(self, role: str, password: str) -> None:
        """Store a role's password; replace the file atomically."""
        passwords = {**self._read(), role: password}
        write_atomically(self.path, "".join(f"*:*:*:{r}:{p}\n" for r, p in passwords.items()))

    def _read(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        lines = self.path.read_text().splitlines()
        return {role: password for *_, role, password in (line.split(":") for line in lines)}


class Home:
    """The files of a cluster; `prepare` creates their folder."""

    def __init__(self, folder: Path) -> None:
        self.requested_folder = folder.resolve()

    @cached_property
    def account(self) -> Account:
        """The account that owns the data and runs the server."""
        if os.geteuid() != 0:
            return Account.own()
        file = self.requested_folder / "account"
        return Account.for_root(file.read_text() if file.exists() else None)

    @cached_property
    def folder(self) -> Path:
        """The requested folder; if the account cannot enter that one, a fallback folder."""
        requested = self.requested_folder
        nearest = next(path for path in (requested, *requested.parents) if path.exists())
        if not self.account.is_foreign or self.account.can_reach(nearest):
            return requested
        digest = hashlib.sha256(os.fsencode(requested.parent)).hexdigest()[:16]
        return FALLBACK_PARENT / f"psqlmessages-{digest}" / requested.name

    @property
    def data(self) -> Path:
        """The data folder (PGDATA)."""
        return self.folder / "data"

    @property
    def created_at(self) -> datetime:
        """When the cluster was created: initdb writes this file, and nothing changes it later."""
        return datetime.fromtimestamp((self.data / "PG_VERSION").stat().st_mtime).astimezone()

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
        """The last port of the server on 127.0.0.1; 0 if the server was never started."""
        file = self.folder / "port"
        return int(file.read_text()) if file.exists() else 0

    def prepare(self) -> None:
        """Create the folder and its missing parents. Existing folders keep their permissions."""
        _create_folders(self.requested_folder, 0o711 if self.account.is_foreign else 0o700)
        if self.account.is_foreign and not (self.requested_folder / "account").exists():
            write_atomically(self.requested_folder / "account", self.account.name)
        if self.folder != self.requested_folder:
            self._create_fallback(self.folder.parent)
            _create_folders(self.folder, 0o711)
            (self.requested_folder / "WHERE.txt").write_text(
                f"The user '{self.account.name}' runs the server and cannot enter this folder.\n"
                f"So the cluster is in {self.folder}\n"
            )

    def _create_fallback(self, fallback: Path) -> None:
        # Root owns the folder, and the account's group may only enter it. Otherwise any process of
        # `nobody` could create links there, through which root would write. The name is
        # predictable, so another user may have created the folder.
        fallback.mkdir(mode=0o700, exist_ok=True)
        status = fallback.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ServerError(f"{fallback} belongs to another user: remove it, then try again.")
        os.chown(fallback, os.geteuid(), self.account.gid, follow_symlinks=False)
        fallback.chmod(0o710)

    def claim_data(self) -> None:
        """If root owns the data, as after copying a project, give the data to the account."""
        if self.account.is_foreign and self.data.stat().st_uid == os.geteuid():
            for path in (self.data, *self.data.rglob("*")):
                os.chown(path, self.account.uid, self.account.gid, follow_symlinks=False)

    def choose_port(self) -> int:
        """Choose and store a port: the last one if it is free, because clients reconnect to it."""
        port = self.port if self.port and is_free(self.port) else free_port()
        write_atomically(self.folder / "port", str(port))
        return port

    def socket_folder(self) -> Path:
        """Create and return the folder of the server's socket.

        If the path of the cluster is too long for a socket, ``socket`` is a link to a short folder.
        """
        own = self.folder / "socket"
        if len(os.fsencode(own / ".s.PGSQL.65535")) <= MAX_SOCKET_PATH_BYTES:
            self.account.create_folder(own)
            return own
        if not own.is_dir():
            own.unlink(missing_ok=True)
            own.symlink_to(tempfile.mkdtemp(prefix="psqlmessages-"))
        short = own.readlink()
        if short.lstat().st_uid not in (os.geteuid(), self.account.uid):
            raise ServerError(f"{short} belongs to another user: remove {own}, then try again.")
        self.account.create_folder(short)
        return short

    def rotate_log(self) -> None:
        """Move a large log to server.log.1; a running server continues to write to server.log."""
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_name("server.log.1"))
            os.truncate(self.log, 0)

    def remove(self) -> None:
        """Delete all files of the cluster. Its server must be stopped."""
        own, fallback = self.folder / "socket", self.folder.parent
        if own.is_symlink():
            shutil.rmtree(own.readlink(), ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder != self.requested_folder:
            shutil.rmtree(self.requested_folder, ignore_errors=True)
            if not any(fallback.glob("*/lock")):  # only copies of programs are left
                shutil.rmtree(fallback, ignore_errors=True)


def _create_folders(folder: Path, mode: int) -> None:
    # Create each folder with its final mode, because another process may be checking the access.
    umask = os.umask(0)
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode, exist_ok=True)
    finally:
        os.umask(umask)
