"""Copies of the migrated database, for each of those that are measured beside others.

A notification wakes all who listen in its database.
"""

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


def copy(server: Server, name: str, rules: Iterable[Rule] = ()) -> str:
    """Make one, with rules (ident, type, dest, mode) for its owner: its address."""
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
