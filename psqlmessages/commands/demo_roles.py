"""What the demonstration needs in the database: two login roles and a few rules."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import make_conninfo

from psqlmessages.client.calls import error_of
from psqlmessages.client.options import conninfo
from psqlmessages.exceptions import MessagesError

ROLE1: Final = "psqlmessages_demo1"
ROLE2: Final = "psqlmessages_demo2"

Rule = tuple[str, str, str, str, str, int]
Admin = psycopg.Connection[tuple[object, ...]]

CONVERSATION_RULES: Final[tuple[Rule, ...]] = (
    (ROLE1, "DEMO1", "Topic", "DEMO.ORDERS", "W", 60),
    (ROLE2, "DEMO2", "Topic", "DEMO.ORDERS", "R", 60),
    (ROLE1, "DEMO1", "Rpc", "DEMO2", "W", 5),
)
TRAFFIC_RULES: Final[tuple[Rule, ...]] = (
    (ROLE1, "DEMO.SHOP", "Topic", "DEMO.ORDERS", "W", 60),
    (ROLE1, "DEMO.SHOP", "Rpc", "DEMO.WAREHOUSE", "W", 5),
    (ROLE1, "DEMO.TICKER", "Topic", "DEMO.PRICES", "W", 60),
    (ROLE2, "DEMO.WAREHOUSE", "Topic", "DEMO.ORDERS", "R", 60),
    (ROLE2, "DEMO.WAREHOUSE", "Topic", "DEMO.STOCK", "W", 60),
    (ROLE2, "DEMO.BOARD", "Topic", "DEMO.ORDERS", "R", 60),
    (ROLE2, "DEMO.BOARD", "Topic", "DEMO.PRICES", "R", 60),
    (ROLE2, "DEMO.BOARD", "Topic", "DEMO.STOCK", "R", 60),
)


class DemoRefused(MessagesError):
    """The role of the connection may not prepare the demonstration."""


def login(admin: Admin, dsn: str, role: str) -> str:
    """Make a login role, give it a new random password, and return its connection string."""
    password = secrets.token_urlsafe(24)
    # Only the hash travels and can show up in the server's log.
    encrypted = admin.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
    found = admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
    verb = "ALTER" if found is not None else "CREATE"
    command = sql.SQL("{} ROLE {} LOGIN PASSWORD {}").format(
        sql.SQL(verb), sql.Identifier(role), sql.Literal(encrypted.decode())
    )
    try:
        admin.execute(command)
    except errors.InsufficientPrivilege as error:
        raise DemoRefused(_refusal(admin, role, verb, error)) from error
    return make_conninfo(dsn, user=role, password=password)


def _refusal(admin: Admin, role: str, verb: str, error: errors.InsufficientPrivilege) -> str:
    user = admin.info.user
    mending = (
        f"ALTER ROLE {user} CREATEROLE;"
        if verb == "CREATE"
        else f"DROP ROLE {role};  (and {user} makes it anew)"
    )
    return (
        f"role {user} cannot prepare the login role {role} of the demonstration"
        f" ({error.diag.message_primary}); as a superuser: {mending}"
    )


@contextmanager
def tidy_rules(dsn: str) -> Iterator[None]:
    """Remove the demonstration's rules at the end, and first those of a run that was killed."""
    _remove_rules(dsn)
    try:
        yield
    finally:
        _remove_rules(dsn)


def insert_rules(rules: tuple[Rule, ...]) -> sql.Composed:
    """Write the statement that adds rules, as one would type it."""
    rows = [sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, rule))) for rule in rules]
    return sql.SQL(
        "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES\n  {}"
    ).format(sql.SQL(",\n  ").join(rows))


def _remove_rules(dsn: str) -> None:
    with psycopg.connect(conninfo(dsn, "demo"), autocommit=True) as admin:
        try:
            admin.execute("DELETE FROM messages.auth WHERE role IN (%s, %s)", (ROLE1, ROLE2))
        except errors.InsufficientPrivilege as error:
            raise DemoRefused(
                f"role {admin.info.user} cannot write rules ({error.diag.message_primary});"
                " connect as the owner of the tables"
            ) from error
        except psycopg.Error as error:
            raise error_of(error, is_broken=admin.closed) from error
