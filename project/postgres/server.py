"""One PostgreSQL server of our own: made, started and stopped, whoever else tries the same."""

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
from project.postgres.home import Home
from project.postgres.passwords import new_password
from project.postgres.postmaster import Postmaster, end_orphans

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "unix_socket_permissions": "0700",
    "log_line_prefix": "%m [%p] %u@%d ",
}
INITDB = ("--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8")
PATIENCE_SECONDS = 60
LINES_SHOWN = 15

# The log's words for what goes away by itself: another took the port in that very moment; the
# backends of a killed postmaster have not all left.
PASSING_TROUBLES = (
    "could not create any TCP/IP sockets",
    "pre-existing shared memory block",
)


class Server:
    """A cluster in `folder` and the server that serves it; all methods may run concurrently.

    Once started it goes on without us, until `stop`. Its superuser is `postgres`; the ordinary role
    `psqlmessages` owns the database of that name and may create databases and roles.
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
        """The program psql of the same version."""
        return self.binaries / "psql"

    @property
    def is_running(self) -> bool:
        """Whether the server is there and takes connections."""
        return self.postmaster is not None and self._answers()

    @property
    def postmaster(self) -> Postmaster | None:
        """The living process that serves this cluster; None if there is none."""
        found = Postmaster.named_in(self.home.data)
        return found if found is not None and found.is_alive else None

    def url(self, database: str = owner, user: str = owner, password: str | None = None) -> str:
        """Return the address of a database for a role; roles of the starter need no password."""
        password = password or self.home.passwords.get(user)
        if not self.home.port or password is None:
            raise ServerError(f"The server in {self.home.folder} has no address for {user!r} yet.")
        credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"postgresql://{credentials}@127.0.0.1:{self.home.port}/{quote(database, safe='')}"

    def superuser_url(self, database: str = "postgres") -> str:
        """Return the address of a database for the superuser."""
        return self.url(database, self.superuser)

    def start(self) -> "Server":
        """Make the cluster where there is none, and start the server unless it runs."""
        with self._lock():
            self.home.bound_log()
            if not self.home.data.exists():
                self._make_cluster()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not self.is_running:
                if self.postmaster is None:
                    self._launch(deadline)
                elif time.monotonic() > deadline:
                    raise self._failure("The server does not answer")
                else:
                    time.sleep(0.05)
            if self.home.passwords.get(self.owner) is None:
                self._make_owner()
        return self

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> bool:
        """Stop the server; False if it did not run."""
        if not self.home.folder.exists():
            return False
        with self._lock():
            if self.postmaster is None:
                return False
            if self._pg_ctl("stop", "-m", mode) != 0:
                raise self._failure("The server does not stop")
        return True

    def _answers(self) -> bool:
        port = str(self.home.port)
        return self._program("pg_isready", "-q", "-h", "127.0.0.1", "-p", port, "-t", "5") == 0

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            self.home.prepare()
            descriptor = os.open(self.home.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except PermissionError as error:
            raise ServerError(
                f"{error.filename} belongs to another user: work as that user, or let them run"
                " `make clean`, or set DATABASE_URL to a database of yours."
            ) from error
        try:
            # Whoever holds it and dies lets it go; the server does not inherit it.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @cached_property
    def _runnable_binaries(self) -> Path:
        return runnable_binaries(self.binaries, self.home.account, self.home.folder.parent)

    def _program(self, name: str, *arguments: str) -> int:
        """Run one of PostgreSQL's programs as the server's account; what it prints is logged."""
        log = os.open(self.home.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            return self.home.account.run(self._runnable_binaries / name, *arguments, output=log)
        finally:
            os.close(log)

    def _pg_ctl(self, *arguments: str) -> int:
        patience = str(PATIENCE_SECONDS)
        data = str(self.home.data)
        return self._program("pg_ctl", *arguments, "-D", data, "-s", "-w", "-t", patience)

    def _make_cluster(self) -> None:
        """Run initdb beside the place of the data, which then appears there whole."""
        home, password = self.home, new_password()
        draft, password_file = home.folder / "data.new", home.folder / "data.password"
        shutil.rmtree(draft, ignore_errors=True)
        password_file.unlink(missing_ok=True)
        home.account.make_folder(draft)
        try:
            home.account.write(password_file, password)
            how = (*INITDB, f"--pwfile={password_file}", f"--pgdata={draft}")
            if self._program("initdb", *how) != 0:
                raise self._failure("The cluster could not be made")
        finally:
            password_file.unlink(missing_ok=True)
        home.passwords.keep(self.superuser, password)
        draft.rename(home.data)

    def _launch(self, deadline: float) -> None:
        """Start the postmaster and wait for it; again, where the trouble passes by itself."""
        while True:
            self.home.claim_data()
            self._remove_traces()
            mine = {
                "port": str(self.home.choose_port()),
                "unix_socket_directories": str(self.home.socket_folder()),
            }
            options = shlex.join(f"-c{k}={v}" for k, v in {**self.settings, **mine}.items())
            start = self.home.log.stat().st_size if self.home.log.exists() else 0
            if self._pg_ctl("start", "-o", options) == 0:
                return
            news = self.home.log.read_bytes()[start:].decode(errors="replace")
            passes = any(trouble in news for trouble in PASSING_TROUBLES)
            if not passes or time.monotonic() > deadline:
                raise self._failure("The server does not start")
            time.sleep(0.2)

    def _remove_traces(self) -> None:
        """Remove what a crashed server left, where PostgreSQL would take it for a living one.

        It looks after traces of pids that are gone. A zombie's, or one that another process got,
        looks alive to it. The data stays safe: it also refuses data that old backends still use.
        """
        end_orphans(self.home.data)
        trace = Postmaster.named_in(self.home.data)
        if trace is not None and trace.pid_exists:
            (self.home.data / "postmaster.pid").unlink()
        for path in self.home.socket_folder().glob(".s.PGSQL.*"):
            path.unlink()

    def _make_owner(self) -> None:
        """Make the ordinary role and its database; what is there already is kept."""
        role, password = sql.Identifier(self.owner), new_password()
        with psycopg.connect(self.superuser_url(), autocommit=True) as connection:
            found = connection.execute(
                "SELECT to_regrole(%(name)s) IS NOT NULL,"
                " EXISTS (SELECT FROM pg_database WHERE datname = %(name)s)",
                {"name": self.owner},
            ).fetchone()
            has_role, has_database = found or (False, False)
            verb = sql.SQL("ALTER" if has_role else "CREATE")
            connection.execute(
                sql.SQL("{} ROLE {} LOGIN CREATEDB CREATEROLE PASSWORD {}").format(
                    verb, role, sql.Literal(password)
                )
            )
            if not has_database:
                connection.execute(sql.SQL("CREATE DATABASE {0} OWNER {0}").format(role))
        self.home.passwords.keep(self.owner, password)

    def _failure(self, sentence: str) -> ServerError:
        lines = self.home.log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
        return ServerError("\n".join((f"{sentence}. The end of {self.home.log}:", *lines)))
