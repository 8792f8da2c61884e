"""DSN: the address of the database, from the environment or a file, never from an option.

Options are pickled into plans and shown in Spark's web UI; the environment and files are not.
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
from time import monotonic, sleep
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

# Keep-alives detect a server that disappeared silently within a minute. Names are read as UTF-8:
# see connectable.
_DEFAULTS = {
    "application_name": "psqlmessages pipeline",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


def dsn(options: Mapping[str, str] | None = None, namespace: str = "default") -> str:
    """Return the address of a namespace's database, in libpq's form.

    The first of these wins: the file in the option ``dsnFile``, the variable PSQLMESSAGES_DSN, the
    file in PSQLMESSAGES_DSN_FILE. A namespace other than "default" has variables of its own,
    PSQLMESSAGES_DSN_<NAME> and PSQLMESSAGES_DSN_<NAME>_FILE. Each call reads them again, on the
    driver and on executors. Raises DsnMissing.
    """
    variable = variable_of(namespace)
    # Spark passes options in lower case or in a case-insensitive mapping.
    path = {name.lower(): value for name, value in (options or {}).items()}.get(OPTION.lower())
    if path is None and os.environ.get(variable):
        return _checked(os.environ[variable], variable)
    path = path or os.environ.get(f"{variable}_FILE")
    if not path:
        raise DsnMissing(
            f"no database address: set {variable}, or {variable}_FILE, or the option {OPTION},"
            " so that all processes of the pipeline can read it"
        )
    try:
        address = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DsnMissing(f"the file with the database address cannot be read: {error}") from None
    return _checked(address, f"the file {path}")


def connectable(address: str) -> str:
    """Add the pipeline's defaults to an address, unless it sets these options."""
    given = conninfo_to_dict(address)
    missing = {name: value for name, value in _DEFAULTS.items() if name not in given}
    return make_conninfo(address, client_encoding="UTF8", **missing)


def variable_of(namespace: str) -> str:
    """Return the name of the environment variable for the address of a namespace."""
    if namespace == "default":
        return VARIABLE
    return f"{VARIABLE}_{re.sub(r'[^A-Z0-9]', '_', namespace.upper())}"


def _checked(address: str, origin: str) -> str:
    try:
        conninfo_to_dict(address)
    except ProgrammingError:
        # The original message may contain the password.
        raise DsnMissing(f"{origin} does not contain a valid libpq address") from None
    if not address:
        raise DsnMissing(f"{origin} is empty")
    return address


# Retrying while a database is down: with backoff, log messages, and a timeout.

logger = logging.getLogger("psqlmessages.pipeline")

T = TypeVar("T")

# Enough for a restart, a failover or nightly maintenance; after that a supervisor should know.
OUTAGE_TIMEOUT: Final = timedelta(minutes=10)
NO_RETRY: Final = timedelta(0)

# Errors that may be gone a moment later. The last two have rolled back the transaction.
TRANSIENT: Final = (ConnectionLost, errors.DeadlockDetected, errors.SerializationFailure)

_LEAST, _MOST = timedelta(seconds=0.2), timedelta(seconds=5)


class OutageRetry:
    """Retries of one call. After ``timeout`` without a success it raises ServerUnreachable."""

    def __init__(self, timeout: timedelta = OUTAGE_TIMEOUT) -> None:
        self._timeout = timeout
        self._backoff = Backoff(_LEAST, _MOST)
        self._log = RateLimitedLogger(logger)
        self._since: float | None = None

    def call(self, attempt: Callable[[], T]) -> T:
        """Call until an attempt raises none of the errors in TRANSIENT; return its result."""
        while True:
            try:
                result = attempt()
            except TRANSIENT as error:
                self.after(error)
            else:
                self.over()
                return result

    def after(self, error: object) -> None:
        """Wait after a failure; raise ServerUnreachable if the timeout is over."""
        if isinstance(error, KeptConnectionLost):
            # The connection may have died long ago while the database is up: retry immediately.
            return
        now = monotonic()
        self._since = self._since or now
        text = (str(error).strip() or repr(error)).splitlines()[0]
        if now - self._since >= self._timeout.total_seconds():
            raise ServerUnreachable(f"the database is unreachable: {text}") from None
        self._log.warning("the database is unreachable, retrying: %s", text)
        sleep(self._backoff.failed(now))

    def over(self) -> None:
        """Reset the backoff after a success; log it if there was an outage."""
        if self._since is not None:
            logger.warning("the database is back after %.1f s", monotonic() - self._since)
        self._since = None
        self._backoff.succeeded()


# Connecting: classifies connection errors, and remembers which databases this machine has reached.
#
# Reads and writes wait for a database that was reached before. A database that was never reached is
# an error immediately: its address is likely wrong. Spark starts new processes while a query runs,
# so this is stored in files, not in memory.

# libpq gives no SQLSTATE for a failed connection. If the server's messages are in another language,
# none of these matches, and the connection is retried as if the server were down.
_REFUSALS: Final = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|is not permitted to log in"
    r'|(role|database) ".*" does not exist|permission denied for database'
    r"|certificate verify failed|server does not support SSL"
)
_ATTEMPT: Final = "connection to server"
# The parts of an address that identify a database; not the password.
_PARTS: Final = ("service", "host", "hostaddr", "port", "dbname", "user")


def not_connected(text: str) -> ConnectionLost | LoginRefused:
    """Make the error for a failed connection: LoginRefused if every server refused the login."""
    attempts = [line for line in text.splitlines() if _ATTEMPT in line] or [text]
    kind = LoginRefused if all(_REFUSALS.search(line) for line in attempts) else ConnectionLost
    return kind(f"cannot connect: {text.strip()}")


def note_reached(address: str) -> None:
    """Record that a database answered at this address, if a file can be written."""
    with suppress(OSError):
        _mark(address).touch(mode=0o600)


def _mark(address: str) -> Path:
    given = conninfo_to_dict(address)
    text = repr([given.get(part) for part in _PARTS])
    return shared_by_own_processes() / f"reached-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


# Database: single statements with psycopg, on a connection that is reopened after a restart.


class Database:
    """Runs statements one by one in autocommit mode; threads may share it.

    If the connection breaks, the statement is run again, so it may be executed twice. If the
    database is down, it retries for ``timeout``, but only if this machine has reached it before.
    """

    def __init__(self, address: Mapping[str, str], timeout: timedelta = OUTAGE_TIMEOUT) -> None:
        self._address = address
        self._timeout = timeout
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._closings = 0

    def ask(self, sql: str, parameters: Sequence[Any] = ()) -> dict[str, Any]:
        """Call a function that returns JSON; raise the error for its error number."""
        ((answer,),) = self.rows(sql, parameters)
        return calls.raise_for_error(json.loads(answer) if isinstance(answer, str) else answer)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""
        address = connectable(dsn(self._address))
        with self._lock:
            was_reached = False
            with suppress(OSError):
                was_reached = _mark(address).exists()
            retry = OutageRetry(self._timeout if was_reached else NO_RETRY)
            closings = self._closings

            def attempt() -> list[tuple[Any, ...]]:
                # Another thread has stopped the query: do not reconnect.
                if closings != self._closings:
                    raise ServerUnreachable("the connection was closed while it was in use")
                return self._run(sql, parameters)

            return retry.call(attempt)

    def close(self) -> None:
        """Close the connection; a later call reconnects."""
        self._closings += 1
        self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        is_kept = self._connection is not None
        if self._connection is None:
            address = connectable(dsn(self._address))
            try:
                self._connection = psycopg.connect(address, autocommit=True)
            except psycopg.OperationalError as error:
                raise not_connected(str(error)) from None
            note_reached(address)
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


# Keep-alive: repeats a call while Spark is busy with a batch.

_LONGEST_SECONDS: Final = 60.0


class KeepAliveThread:
    """Calls ``ping`` in its own thread, at least three times within ``seconds``.

    Database and permission errors are only logged: the stream's own next call raises them too.
    """

    def __init__(self, ping: Callable[[], None], seconds: float) -> None:
        self._ping = ping
        self._seconds = min(seconds / 3, _LONGEST_SECONDS)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread is None:
            # A daemon thread, because Spark ends its worker without warning.
            self._thread = threading.Thread(target=self._run, name="keep-alive", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, without waiting for a running ping."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._ping()
            except (MessagesError, psycopg.Error) as error:
                if self._ended.is_set():
                    return
                logger.warning("stream heartbeat failed: %s", error)
