"""DSN: where the database is, read from the environment or a file, and never from an option.

Options are pickled into plans and shown in Spark's pages; the environment and files are not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import psycopg
from psycopg import ProgrammingError, errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from psqlmessages.client import calls
from psqlmessages.client.connection import is_broken
from psqlmessages.exceptions import ConnectionLost, MessagesError, ServerUnreachable
from psqlmessages.pipeline.errors import DsnMissing, KeptConnectionLost, LoginRefused
from psqlmessages.pipeline.private_folder import shared_by_own_processes
from psqlmessages.retry import Backoff, RateLimitedLogger

VARIABLE = "PSQLMESSAGES_DSN"
OPTION = "dsnFile"

# Names are read as UTF-8, and a server that is gone without a word is found out within a minute.
_DEFAULTS = {
    "application_name": "psqlmessages pipeline",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


def dsn(options: Mapping[str, str] | None = None, namespace: str = "default") -> str:
    """Return the address of a namespace's database, as libpq takes it.

    The file of the option ``dsnFile`` counts most, then the variable PSQLMESSAGES_DSN, then the
    file that PSQLMESSAGES_DSN_FILE names; another namespace than "default" has variables of its
    own: PSQLMESSAGES_DSN_<NAME> and PSQLMESSAGES_DSN_<NAME>_FILE. Read anew at each call, on the
    driver and on executors. Raises DsnMissing.
    """
    variable = variable_of(namespace)
    path = _option(options)
    if path is None and os.environ.get(variable):
        return _checked(os.environ[variable], variable)
    path = path or os.environ.get(f"{variable}_FILE")
    if not path:
        raise DsnMissing(
            f"no database is named: set {variable}, or {variable}_FILE, or the option {OPTION},"
            " where the pipeline's processes can read it"
        )
    return _checked(_read(path), f"the file {path}")


def connectable(address: str) -> str:
    """Complete an address with what the pipeline needs, where the address does not say it."""
    given = conninfo_to_dict(address)
    missing = {name: value for name, value in _DEFAULTS.items() if name not in given}
    return make_conninfo(address, client_encoding="UTF8", **missing)


def variable_of(namespace: str) -> str:
    """Return the name of the variable with a namespace's address."""
    if namespace == "default":
        return VARIABLE
    return f"{VARIABLE}_{re.sub(r'[^A-Z0-9]', '_', namespace.upper())}"


def _option(options: Mapping[str, str] | None) -> str | None:
    # Spark hands options on in lower case, or in a mapping that does not care.
    given = {name.lower(): value for name, value in (options or {}).items()}
    return given.get(OPTION.lower())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DsnMissing(f"the file with the database's address cannot be read: {error}") from None


def _checked(address: str, origin: str) -> str:
    try:
        conninfo_to_dict(address)
    except ProgrammingError:
        # Its text may hold the password.
        raise DsnMissing(f"{origin} holds no address that libpq understands") from None
    if not address:
        raise DsnMissing(f"{origin} is empty")
    return address


# Waiting for a database that is away: with backoff, a line in the log, and a time limit.

logger = logging.getLogger("psqlmessages.pipeline")

T = TypeVar("T")

# A restart, a failover or a night's maintenance; after that a supervisor is to know.
PATIENCE: Final = timedelta(minutes=10)
NO_PATIENCE: Final = timedelta(0)

# Errors that may not occur again a moment later. After the last two all is rolled back.
PASSING: Final = (ConnectionLost, errors.DeadlockDetected, errors.SerializationFailure)

_LEAST, _MOST = timedelta(seconds=0.2), timedelta(seconds=5)


class OutageRetry:
    """The waits of one call. After ``patience`` without a success the error is raised."""

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self._wait_timeout = patience
        self._backoff = Backoff(_LEAST, _MOST)
        self._log = RateLimitedLogger(logger)
        self._ended = threading.Event()
        self._since: float | None = None

    def call(self, attempt: Callable[[], T]) -> T:
        """Call until an attempt ends without an error of PASSING; return its result."""
        while True:
            try:
                result = attempt()
            except PASSING as error:
                self.after(error)
            else:
                self.over()
                return result

    def after(self, error: object) -> None:
        """Wait a while after a failure; raise ServerUnreachable if the patience is over."""
        if isinstance(error, KeptConnectionLost):
            # It may have been dead for long, so the database may be there: try again immediately.
            return
        now = monotonic()
        self._since = self._since or now
        text = _first_line(error)
        if now - self._since >= self._wait_timeout.total_seconds():
            raise ServerUnreachable(f"the database is away: {text}") from None
        self._log.warning("the database is away, trying again: %s", text)
        self._ended.wait(self._backoff.failed(now))

    def over(self) -> None:
        """Note a success, and log it if there was a wait."""
        if self._since is not None:
            logger.warning("the database is back after %.1f s", monotonic() - self._since)
        self._since = None
        self._backoff.succeeded()


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)


# Connecting: what a failed connection means, and which databases this machine has reached before.
#
# Reads and writes wait for a database that was reached before. A database that was never reached is
# an error immediately: its address is likely wrong. Spark starts new processes while a query runs,
# so this is stored in files, not in memory.

# libpq gives no SQLSTATE for a failed connection. If the server's messages are in another language,
# none of these matches, and the connection is retried as if the server were away.
_REFUSALS: Final = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|is not permitted to log in"
    r'|(role|database) ".*" does not exist|permission denied for database'
    r"|certificate verify failed|server does not support SSL"
)
_ATTEMPT: Final = "connection to server"
# The parts of an address that identify a database; not the password.
_PARTS: Final = ("service", "host", "hostaddr", "port", "dbname", "user")


def connected(address: str) -> psycopg.Connection[tuple[object, ...]]:
    """Connect with psycopg, in autocommit; raise ConnectionLost or LoginRefused."""
    try:
        connection = psycopg.connect(address, autocommit=True)
    except psycopg.OperationalError as error:
        raise not_connected(str(error)) from None
    note_reached(address)
    return connection


def not_connected(text: str) -> ConnectionLost | LoginRefused:
    """Make the error of a failed connection: LoginRefused if every server refused the login."""
    attempts = [line for line in text.splitlines() if _ATTEMPT in line] or [text]
    kind = LoginRefused if all(_REFUSALS.search(line) for line in attempts) else ConnectionLost
    return kind(f"cannot connect: {text.strip()}")


def outage_timeout(address: str) -> timedelta:
    """Return how long to wait for a database: not at all if it was never reached."""
    with suppress(OSError):
        if _mark(address).exists():
            return PATIENCE
    return NO_PATIENCE


def note_reached(address: str) -> None:
    """Store that a database answered at this address, if a file can be written."""
    with suppress(OSError):
        _mark(address).touch(mode=0o600)


def _mark(address: str) -> Path:
    given = conninfo_to_dict(address)
    text = repr([given.get(part) for part in _PARTS])
    return shared_by_own_processes() / f"reached-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


# Database: single statements by psycopg, on a connection that comes back after a restart.

Parameters = Sequence[Any]


class Database:
    """Runs statements one by one, in autocommit; threads may share it.

    A statement whose connection breaks is run again, so it may be executed twice. A database that
    this machine never reached is an error immediately; for another one it waits ``patience``.
    """

    def __init__(self, address: Mapping[str, str], patience: timedelta = PATIENCE) -> None:
        self._address = address
        self._wait_timeout = patience
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._closings = 0

    def ask(self, sql: str, parameters: Parameters = ()) -> dict[str, Any]:
        """Call a function that answers JSON; raises the error of its number."""
        ((answer,),) = self.rows(sql, parameters)
        return calls.raise_for_error(json.loads(answer) if isinstance(answer, str) else answer)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """Run a query; its rows."""
        address = connectable(dsn(self._address))
        with self._lock:
            waiting = OutageRetry(min(self._wait_timeout, outage_timeout(address)))
            closings = self._closings

            def attempt() -> list[tuple[Any, ...]]:
                # Another thread has ended the query: this thread must not connect again.
                if closings != self._closings:
                    raise ServerUnreachable("the connection was closed while it was in use")
                return self._run(sql, parameters)

            return waiting.call(attempt)

    def note_reached(self) -> None:
        """Store again that this database was reached: old temporary files may be cleaned up."""
        note_reached(connectable(dsn(self._address)))

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        self._closings += 1
        self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self, sql: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        is_kept = self._connection is not None
        if self._connection is None:
            self._connection = connected(connectable(dsn(self._address)))
        connection = self._connection
        try:
            return connection.execute(sql.encode(), parameters or None).fetchall()
        except psycopg.Error as error:
            is_lost = is_broken(connection, error)
            if is_lost:
                self._drop()
            if is_lost and is_kept:
                raise KeptConnectionLost(str(error).strip()) from None
            raise calls.translate_error(error, is_broken=is_lost) from error


# Pinging: something done again and again beside a stream, while Spark is busy with a batch.

_LONGEST_SECONDS: Final = 60.0


class KeepAliveThread:
    """Calls ``ping`` in a thread of its own, three times within ``seconds`` at least.

    An error of the database or of a right is logged: the stream's own next call meets it too.
    """

    def __init__(self, ping: Callable[[], None], seconds: float) -> None:
        self._ping = ping
        self._seconds = min(seconds / 3, _LONGEST_SECONDS)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, where it has not begun."""
        if self._thread is None:
            # A daemon: Spark ends its worker without a word.
            self._thread = threading.Thread(target=self._run, name="pinging", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it; a ping under way is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._ping()
            except (MessagesError, psycopg.Error) as error:
                if self._ended.is_set():
                    return
                logger.warning("a stream could not tell that it is alive: %s", error)
