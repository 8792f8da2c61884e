"""Embedded PostgreSQL server: creation of its cluster, start and stop."""

import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import psycopg
from psycopg import sql

from project.postgres.binaries import runnable_binaries
from project.postgres.errors import ServerError
from project.postgres.home import Home, new_password
from project.postgres.postmaster import Postmaster, stop_orphans

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "unix_socket_permissions": "0700",
    "log_line_prefix": "%m [%p] %u@%d ",
}
INITDB = ("--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8")
TIMEOUT_SECONDS = 60
SHOWN_LOG_LINES = 15

# Log messages after which another attempt to start may succeed.
TEMPORARY_FAILURES = (
    "could not create any TCP/IP sockets",  # another process has just taken the port
    "pre-existing shared memory block",  # a backend of a killed postmaster is still running
)


class Server:
    """A cluster in `folder` and its server. Several processes may use a cluster concurrently.

    A started server runs until `stop`, even after this process ends. Its superuser is `postgres`.
    The role `psqlmessages` owns the database `psqlmessages`, and may create databases and roles.
    """

    superuser = "postgres"
    owner = "psqlmessages"

    def __init__(
        self, folder: Path, binaries: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self.home = Home(folder)
        self.binaries = binaries
        self.settings = {**SETTINGS, **(settings or {})}

    @property
    def psql(self) -> Path:
        """The program psql of the server's version."""
        return self.binaries / "psql"

    @property
    def is_running(self) -> bool:
        """Whether the postmaster runs and accepts connections."""
        return self.postmaster is not None and self._is_answering()

    @property
    def postmaster(self) -> Postmaster | None:
        """The running postmaster of this cluster; None if there is none."""
        postmaster = Postmaster.read(self.home.data)
        return postmaster if postmaster is not None and postmaster.is_alive else None

    def url(self, database: str = owner, user: str = owner, password: str | None = None) -> str:
        """Return the URL of a database for a role, by default with the role's stored password."""
        password = password or self.home.passwords.get(user)
        if not self.home.port or password is None:
            raise ServerError(f"No password of {user!r} is stored: start the server first.")
        credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"postgresql://{credentials}@127.0.0.1:{self.home.port}/{quote(database, safe='')}"

    def superuser_url(self, database: str = "postgres") -> str:
        """Return the URL of a database for the superuser."""
        return self.url(database, self.superuser)

    def start(self) -> "Server":
        """Create the cluster if it is missing; start the server unless it is running."""
        with self._lock():
            self.home.rotate_log()
            if not self.home.data.exists():
                self._create_cluster()
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not self.is_running:
                if self.postmaster is None:
                    self._launch(deadline)
                elif time.monotonic() > deadline:
                    raise self._failure("The server did not answer")
                else:
                    time.sleep(0.05)
            if self.home.passwords.get(self.owner) is None:
                self._create_owner()
        return self

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> bool:
        """Stop the server; return False if it was not running."""
        if not self.home.folder.exists():
            return False
        with self._lock():
            if self.postmaster is None:
                return False
            if self._pg_ctl("stop", "-m", mode) != 0:
                raise self._failure("The server did not stop")
        return True

    def _is_answering(self) -> bool:
        port = str(self.home.port)
        return self._run_program("pg_isready", "-q", "-h", "127.0.0.1", "-p", port, "-t", "5") == 0

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            self.home.prepare()
            descriptor = os.open(self.home.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except PermissionError as error:
            raise ServerError(
                f"{error.filename} belongs to another user: work as that user, or ask them to"
                " run `make clean`, or set DATABASE_URL to a database of yours."
            ) from error
        try:
            # If this process is killed, the kernel unlocks: the server does not inherit the lock.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @cached_property
    def _runnable_binaries(self) -> Path:
        return runnable_binaries(self.binaries, self.home.account, self.home.folder.parent)

    def _run_program(self, name: str, *arguments: str) -> int:
        """Run a PostgreSQL program as the server's account, with a log; return the exit code."""
        log = os.open(self.home.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            return self.home.account.run(self._runnable_binaries / name, *arguments, output=log)
        finally:
            os.close(log)

    def _pg_ctl(self, *arguments: str) -> int:
        timeout, data = str(TIMEOUT_SECONDS), str(self.home.data)
        return self._run_program("pg_ctl", *arguments, "-D", data, "-s", "-w", "-t", timeout)

    def _create_cluster(self) -> None:
        """Run initdb in a temporary folder and rename it, so that `data` is always complete."""
        home, password = self.home, new_password()
        draft, password_file = home.folder / "data.new", home.folder / "data.password"
        shutil.rmtree(draft, ignore_errors=True)
        password_file.unlink(missing_ok=True)
        home.account.create_folder(draft)
        try:
            home.account.write(password_file, password)
            options = (*INITDB, f"--pwfile={password_file}", f"--pgdata={draft}")
            if self._run_program("initdb", *options) != 0:
                raise self._failure("The cluster could not be created")
        finally:
            password_file.unlink(missing_ok=True)
        home.passwords.store(self.superuser, password)
        draft.rename(home.data)

    def _launch(self, deadline: float) -> None:
        """Start the postmaster and wait until it is ready; retry after temporary failures."""
        while True:
            self.home.claim_data()
            self._remove_stale_files()
            addresses = {
                "port": str(self.home.choose_port()),
                "unix_socket_directories": str(self.home.socket_folder()),
            }
            options = shlex.join(f"-c{k}={v}" for k, v in {**self.settings, **addresses}.items())
            start = self.home.log.stat().st_size if self.home.log.exists() else 0
            if self._pg_ctl("start", "-o", options) == 0:
                return
            output = self.home.log.read_bytes()[start:].decode(errors="replace")
            is_temporary = any(message in output for message in TEMPORARY_FAILURES)
            if not is_temporary or time.monotonic() > deadline:
                raise self._failure("The server did not start")
            time.sleep(0.2)

    def _remove_stale_files(self) -> None:
        """Remove files of a crashed server that would prevent a start.

        PostgreSQL itself removes files whose pid does not exist. If a zombie or another program has
        the pid, PostgreSQL assumes that the old server is running. Removing the files is safe:
        PostgreSQL also refuses to start while old backends use the data.
        """
        stop_orphans(self.home.data)
        crashed = Postmaster.read(self.home.data)
        if crashed is not None and crashed.pid_exists:
            (self.home.data / "postmaster.pid").unlink()
        for path in self.home.socket_folder().glob(".s.PGSQL.*"):
            path.unlink()

    def _create_owner(self) -> None:
        """Create the ordinary role and its database if missing; set and store a new password."""
        role, password = sql.Identifier(self.owner), new_password()
        with psycopg.connect(self.superuser_url(), autocommit=True) as connection:
            row = connection.execute(
                "SELECT to_regrole(%(name)s) IS NOT NULL,"
                " EXISTS (SELECT FROM pg_database WHERE datname = %(name)s)",
                {"name": self.owner},
            ).fetchone()
            has_role, has_database = row or (False, False)
            verb = sql.SQL("ALTER" if has_role else "CREATE")
            connection.execute(
                sql.SQL("{} ROLE {} LOGIN CREATEDB CREATEROLE PASSWORD {}").format(
                    verb, role, sql.Literal(password)
                )
            )
            if not has_database:
                connection.execute(sql.SQL("CREATE DATABASE {0} OWNER {0}").format(role))
        self.home.passwords.store(self.owner, password)

    def _failure(self, sentence: str) -> ServerError:
        lines = self.home.log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
        return ServerError("\n".join((f"{sentence}. The end of {self.home.log}:", *lines)))
