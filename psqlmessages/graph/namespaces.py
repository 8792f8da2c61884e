"""Namespaces: the aliases of DATABASES whose databases hold queues."""

from __future__ import annotations

from django.db import connections, router


def namespaces() -> list[str]:
    """List the namespaces, in the order of DATABASES."""
    return [alias for alias in connections if not fault_of(alias)]


def fault_of(namespace: str) -> str:
    """Return why no queue can be in this namespace, as a sentence; "" where one can."""
    if namespace not in connections.settings:
        return f"There is no namespace {namespace!r:.100}: those of DATABASES are {_listed()}."
    connection = connections[namespace]
    if connection.vendor != "postgresql":
        return f"Database {namespace!r} is {connection.display_name}, and queues need PostgreSQL."
    if not router.allow_migrate(namespace, "psqlmessages"):
        return f"A router keeps psqlmessages out of database {namespace!r}."
    return ""


def _listed() -> str:
    return ", ".join(alias for alias in connections)
