"""Database of the pipeline: its address, retries during outages, and statements run one by one.

The address comes from the environment or a file, never from an option: Spark pickles options into
plans and shows them in its web UI.
"""

from __future__ import annotations

import hashlib
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
from psqlmessages.client.refused_calls import caller_of
from psqlmessages.exceptions import Caller, ConnectionLost, MessagesError, ServerUnreachable
from psqlmessages.pipeline.errors import LoginRefused, NoValidDsn, ReusedConnectionLost
from psqlmessages.pipeline.private_folder import user_folder
from psqlmessages.retry import Backoff, RateLimitedLogger

DSN_VARIABLE = "PSQLMESSAGES_DSN"
DSN_OPTION = "dsnFile"

# TCP keep-alives detect within a minute that a server has disappeared. Times are in seconds, except
# tcp_user_timeout, which is in milliseconds.
_CONNECTION_DEFAULTS = {
    "application_name": "psqlmessages pipeline",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


def dsn(options: Mapping[str, str] | None = None, namespace: str = "default") -> str:
    """Read the address of a namespace's database, in libpq's form; raises NoValidDsn.

    The first of these that is set wins: the file in the option ``dsnFile``, the variable
    PSQLMESSAGES_DSN, the file in PSQLMESSAGES_DSN_FILE. For a namespace other than "default", the
    variables are PSQLMESSAGES_DSN_<NAME> and PSQLMESSAGES_DSN_<NAME>_FILE.
    """
    variable = dsn_variable(namespace)
    # Spark passes options in lower case or in a case-insensitive mapping.
    lowered = {name.lower(): value for name, value in (options or {}).items()}
    path = lowered.get(DSN_OPTION.lower())
    if path is None and os.environ.get(variable):
        return _validate(os.environ[variable], variable)
    path = path or os.environ.get(f"{variable}_FILE")
    if not path:
        raise NoValidDsn(
            f"no database address: set {variable}, or {variable}_FILE, or the option {DSN_OPTION},"
            " so that all processes of the pipeline can read it"
        )
    try:
        address = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NoValidDsn(f"the file with the database address cannot be read: {error}") from None
    return _validate(address, f"the file {path}")


def add_defaults(address: str) -> str:
    """Add the pipeline's defaults for parameters that an address lacks; set UTF-8 as encoding."""
    parameters: dict[str, Any] = _CONNECTION_DEFAULTS | conninfo_to_dict(address)
    return make_conninfo(**(parameters | {"client_encoding": "UTF8"}))


def dsn_variable(namespace: str) -> str:
    """Return the name of the environment variable for the address of a namespace."""
    if namespace == "default":
        return DSN_VARIABLE
    return f"{DSN_VARIABLE}_{re.sub(r'[^A-Z0-9]', '_', namespace.upper())}"


def _validate(address: str, origin: str) -> str:
    try:
        conninfo_to_dict(address)
    except ProgrammingError:
        # The original message may contain the password.
        raise NoValidDsn(f"{origin} does not contain a valid libpq address") from None
    if not address:
        raise NoValidDsn(f"{origin} is empty")
    return address


logger = logging.getLogger("psqlmessages.pipeline")

T = TypeVar("T")

# After an outage of this length, a job fails. Most restarts, failovers and maintenance are shorter.
OUTAGE_TIMEOUT: Final = timedelta(minutes=10)
NO_RETRY: Final = timedelta(0)

# Errors with which PostgreSQL rolls back a transaction because of a concurrent transaction.
CONFLICTS: Final = (errors.DeadlockDetected, errors.SerializationFailure)
# Errors after which a retry may succeed.
TRANSIENT: Final = (ConnectionLost, *CONFLICTS)

_MIN_BACKOFF, _MAX_BACKOFF = timedelta(seconds=0.2), timedelta(seconds=5)


class OutageRetry:
    """Retries after errors of TRANSIENT, with backoff.

    If the errors last longer than ``timeout``, raises ServerUnreachable, or the error itself if it
    is one of CONFLICTS.
    """

    def __init__(self, timeout: timedelta = OUTAGE_TIMEOUT) -> None:
        self._timeout = timeout
        self._backoff = Backoff(_MIN_BACKOFF, _MAX_BACKOFF)
        self._log = RateLimitedLogger(logger)
        self._failing_since: float | None = None
        self._down_since: float | None = None

    def call(self, attempt: Callable[[], T]) -> T:
        """Call until no error of TRANSIENT is raised; return the result."""
        while True:
            try:
                result = attempt()
            except TRANSIENT as error:
                self.wait_after(error)
            else:
                self.reset()
                return result

    def wait_after(self, error: object) -> None:
        """Wait before the next attempt; after the timeout, raise ServerUnreachable or ``error``."""
        if isinstance(error, ReusedConnectionLost):
            # Do not wait: the connection may have been lost long ago, and the database may be up.
            return
        now = monotonic()
        self._failing_since = self._failing_since or now
        has_timed_out = now - self._failing_since >= self._timeout.total_seconds()
        text = (str(error).strip() or repr(error)).splitlines()[0]
        if isinstance(error, CONFLICTS):
            if has_timed_out:
                raise error
            self._log.warning("PostgreSQL rolled back a transaction, retrying: %s", text)
        else:
            if has_timed_out:
                raise ServerUnreachable(f"the database is unreachable: {text}") from None
            self._down_since = self._down_since or now
            self._log.warning("the database is unreachable, retrying: %s", text)
        sleep(self._backoff.record_failure(now))

    def reset(self) -> None:
        """Reset the backoff after a success; log the end of an outage, if there was one."""
        if self._down_since is not None:
            logger.warning("the database is back after %.1f s", monotonic() - self._down_since)
        self._failing_since = self._down_since = None
        self._backoff.reset()


# libpq gives no SQLSTATE for a failed connection. Messages in another language do not match: then
# the connection is retried as if the server were down.
_LOGIN_REFUSED: Final = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|is not permitted to log in"
    r'|(role|database) ".*" does not exist|permission denied for database'
    r"|certificate verify failed|server does not support SSL"
)
# libpq tries each host of an address. Its error has a line with this text for each attempt.
_ATTEMPT_TEXT: Final = "connection to server"
_IDENTITY_PARAMETERS: Final = ("service", "host", "hostaddr", "port", "dbname", "user")


def connection_error(text: str) -> ConnectionLost | LoginRefused:
    """Return the error for a failed connection: LoginRefused if every host refused the login."""
    attempts = [line for line in text.splitlines() if _ATTEMPT_TEXT in line] or [text]
    is_refused = all(_LOGIN_REFUSED.search(line) for line in attempts)
    error_class = LoginRefused if is_refused else ConnectionLost
    return error_class(f"cannot connect: {text.strip()}")


def record_reached_address(address: str) -> None:
    """Record in a file that a database has accepted a connection at this address.

    If the database is down, `Database` retries only if this file exists: an address that was never
    reached is probably wrong. All processes of this user on this machine share the file.
    """
    with suppress(OSError):
        _reached_file(address).touch(mode=0o600)


def _reached_file(address: str) -> Path:
    parameters = conninfo_to_dict(address)
    text = repr([parameters.get(name) for name in _IDENTITY_PARAMETERS])
    return user_folder() / f"reached-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class Database:
    """Runs statements one by one in autocommit mode; threads may share an instance.

    After an error of TRANSIENT, calls repeat the statement for up to ``timeout``. If the address
    was never reached, they fail immediately: see `record_reached_address`. If the connection
    breaks, the statement may be executed twice. ``options`` are those of `dsn`.
    """

    def __init__(self, options: Mapping[str, str], timeout: timedelta = OUTAGE_TIMEOUT) -> None:
        self._options = options
        self._timeout = timeout
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._close_count = 0
        self._role = Caller().role

    def call(self, sql: str, parameters: Sequence[Any] = ()) -> dict[str, Any]:
        """Call a function that returns JSON; raise MessagesError if the result has an error."""
        return self.run_call(calls.Call(sql, tuple(parameters), calls.raise_for_error))

    def run_call(self, call: calls.Call[T]) -> T:
        """Run a call; return its result, or raise its error with the caller, for its text."""
        rows = self.fetch_rows(call.sql, call.params)
        try:
            return call.read(rows[0][0] if rows else None)
        except MessagesError as error:
            error.caller = caller_of(self._role, call.sql, call.params)
            raise

    def fetch_rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""
        address = add_defaults(dsn(self._options))
        with self._lock:
            was_reached = False
            with suppress(OSError):
                was_reached = _reached_file(address).exists()
            retry = OutageRetry(self._timeout if was_reached else NO_RETRY)
            close_count = self._close_count

            def attempt() -> list[tuple[Any, ...]]:
                # If another thread has called `close`, do not reconnect.
                if close_count != self._close_count:
                    raise ServerUnreachable("the connection was closed while it was in use")
                return self._run(sql, parameters)

            return retry.call(attempt)

    def close(self) -> None:
        """Close the connection: a running call fails, and a later call reconnects."""
        self._close_count += 1
        self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _run(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        is_reused = self._connection is not None
        if self._connection is None:
            address = add_defaults(dsn(self._options))
            try:
                self._connection = psycopg.connect(address, autocommit=True)
            except psycopg.OperationalError as error:
                raise connection_error(str(error)) from None
            record_reached_address(address)
            self._role = self._connection.info.user
        connection = self._connection
        try:
            return connection.execute(sql.encode(), parameters or None).fetchall()
        except psycopg.Error as error:
            if is_lost := is_broken(connection, error):
                self._drop()
                if is_reused:
                    raise ReusedConnectionLost(str(error).strip()) from None
            translated = calls.translate_error(error, is_broken=is_lost)
            if isinstance(translated, MessagesError):
                translated.caller = caller_of(self._role, sql, parameters)
            raise translated from error


_MAX_INTERVAL_SECONDS: Final = 60.0


class RenewalThread:
    """Calls ``renew`` at least three times in ``seconds``, also while Spark runs a batch.

    Logs errors of ``renew`` and continues: if an error persists, the stream's next call raises it.
    """

    def __init__(self, renew: Callable[[], None], seconds: float) -> None:
        self._renew = renew
        self._seconds = min(seconds / 3, _MAX_INTERVAL_SECONDS)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread is None:
            # A daemon thread lets Spark's worker exit even if Spark does not call `stop`.
            self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, without waiting for a running ``renew``."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._renew()
            except (MessagesError, psycopg.Error) as error:
                if self._stopped.is_set():
                    return
                logger.warning("stream heartbeat failed: %s", error)
