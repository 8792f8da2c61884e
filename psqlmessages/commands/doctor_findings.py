"""What the doctor finds, and what it examines with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import psycopg

from psqlmessages.client.connections import Connection

MIGRATE = "python manage.py migrate psqlmessages"
INSTALL = "python manage.py psqlmessages install"


class State(Enum):
    """How it stands with one thing."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing: what was found and, unless all is well, why it matters and what mends it."""

    check: str
    state: State
    found: str
    why: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """The database under examination: its address and a connection to it."""

    dsn: str
    connection: Connection

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a query in a transaction of its own."""
        return self.connection.execute(query, values or None).fetchall()

    def value(self, query: str, *values: Any) -> Any:
        """Return the first column of the first row; None where there is none."""
        rows = self.rows(query, *values)
        return rows[0][0] if rows else None

    @property
    def role(self) -> str:
        """Who is logged in."""
        return self.connection.info.user


_NOT_INSTALLED = (
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
)

Check = Callable[[Patient], Iterator[Finding]]


def examine(check: Check, patient: Patient) -> Iterator[Finding]:
    """Run a check; what the role may not see, or what is not installed, is unknown."""
    name = check.__name__.replace("_", " ")
    try:
        yield from check(patient)
    except psycopg.errors.InsufficientPrivilege:
        yield Finding(
            name,
            State.UNKNOWN,
            f"role {patient.role} may not see it",
            "only the owner of the tables can look at this",
            "run the doctor as the owner of the tables",
        )
    except _NOT_INSTALLED:
        yield Finding(
            name,
            State.UNKNOWN,
            "not installed",
            "it can be looked at once the functions and tables are there",
            MIGRATE,
        )
