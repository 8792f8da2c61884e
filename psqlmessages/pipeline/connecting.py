"""Connecting: what a failed connection means, and which databases this machine has reached before.

Reads and writes wait for a database that was reached before. A database that was never reached is
an error immediately: its address is likely wrong. Spark starts new processes while a query runs,
so this is stored in files, not in memory.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from psqlmessages.exceptions import ConnectionLost
from psqlmessages.pipeline.errors import LoginRefused
from psqlmessages.pipeline.private import shared_by_own_processes
from psqlmessages.pipeline.waiting import NO_PATIENCE, PATIENCE

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


def patience_with(address: str) -> timedelta:
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
