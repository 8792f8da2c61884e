"""Connections that tests reuse: a new backend would compile all functions again."""

from collections import defaultdict

import psycopg
from psycopg.rows import tuple_row

# Keeps the compiled functions, unlike DISCARD ALL.
RESET = """
    ROLLBACK; RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; UNLISTEN *; CLOSE ALL;
    SELECT pg_advisory_unlock_all(); DISCARD TEMP; DISCARD SEQUENCES
"""


class ConnectionPool:
    """Idle connections by address; the settings of their sessions have been reset."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[psycopg.Connection]] = defaultdict(list)

    def take(self, url: str) -> psycopg.Connection:
        while self._idle[url]:
            connection = self._idle[url].pop()
            try:
                connection.execute("SELECT")
            except psycopg.OperationalError:
                connection.close()  # a test has ended its backend
            else:
                return connection
        return psycopg.connect(url, autocommit=True)

    def give_back(self, url: str, connection: psycopg.Connection) -> None:
        """Reset a connection for another test."""
        if connection.closed:
            return
        try:
            connection.rollback()
            connection.autocommit, connection.isolation_level = True, None
            connection.read_only = connection.deferrable = None
            connection.row_factory, connection.prepare_threshold = tuple_row, 5
            connection.execute(RESET)
            # A test may run DISCARD ALL. psycopg notices it only if it has not counted this
            # statement before.
            connection._prepared.clear()
            for _ in connection.notifies(timeout=0):
                pass
        except psycopg.Error:
            connection.close()
        else:
            self._idle[url].append(connection)

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()
