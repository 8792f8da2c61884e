"""A database for each side of a benchmark: a notification wakes all listeners of a database."""

from __future__ import annotations

from collections.abc import Iterable

import psycopg
from psycopg import sql

from project.postgres import Server

Rule = tuple[str, str, str, str]
INSERT = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES (current_user, %s, %s, %s, %s, 60)
"""


def create_database(server: Server, name: str, rules: Iterable[Rule] = ()) -> str:
    """Copy the migrated database, and add rules (ident, type, dest, mode); return its address."""
    with psycopg.connect(server.superuser_url(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(
                *map(sql.Identifier, (name, server.owner, server.owner))
            )
        )
    with psycopg.connect(server.url(name), autocommit=True) as connection:
        for rule in rules:
            connection.execute(INSERT, rule)
    return server.url(name)
