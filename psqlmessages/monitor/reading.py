"""Reading: the monitor's own questions to the database, on one connection, bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import psycopg

from psqlmessages.client.connections import AsyncConnection, is_broken
from psqlmessages.client.dialing import bound
from psqlmessages.client.options import conninfo
from psqlmessages.models.names import patterns

_STATEMENT_SECONDS: Final = 2
RULES: Final = 200

_TOPICS: Final = """
    SELECT v.topic, v.notifiers, v.listeners
    FROM messages.list_topics(%(known)s::text[] || ARRAY(
        SELECT t.name::text FROM psqlmessages_topic AS t
        WHERE t.name <> ALL (%(known)s) ORDER BY t.name LIMIT %(others)s
    )) AS v
"""
_RULES: Final = """
    SELECT a.id, a.ident, a.role, a.dest, a.mode
    FROM psqlmessages_auth AS a
    WHERE a.type = 'Topic' AND a.dest = ANY (%s)
    ORDER BY a.ident, a.role, a.dest
    LIMIT %s
"""
_OBSERVES: Final = """
    SELECT EXISTS (
        SELECT FROM psqlmessages_observation AS o
        JOIN psqlmessages_client AS c ON c.id = o.client_id
        WHERE c.ident = %s AND o.pattern = '*'
    )
"""


class RuleRow(NamedTuple):
    """A rule for a topic, as the tables hold it."""

    id: int
    ident: str
    role: str
    dest: str
    mode: str


class Reader:
    """A connection that is made when first used, and again after it broke."""

    def __init__(self, dsn: str) -> None:
        self._dsn = conninfo(dsn, "monitor")
        self._connection: AsyncConnection | None = None
        self._turn = asyncio.Lock()

    async def rows(self, query: str, values: Any = None) -> list[tuple[Any, ...]]:
        """Run a query for at most two seconds; raise what psycopg raises, also while away."""
        async with self._turn:
            connection = self._connection or await self._connect()
            try:
                return await (await connection.execute(query, values)).fetchall()
            except psycopg.Error as error:
                if is_broken(connection, error):
                    self._connection = None
                    await connection.close()
                raise

    async def topics(
        self, known: Iterable[str], others: int
    ) -> list[tuple[str, list[str], list[str]]]:
        """Read who sends and listens to the known topics, and to so many others by name."""
        return await self.rows(_TOPICS, {"known": list(known), "others": others})

    async def count_topics(self) -> int:
        """Count the topics of the database."""
        return (await self.rows("SELECT count(*) FROM psqlmessages_topic"))[0][0]

    async def rules(self, topic: str) -> list[RuleRow]:
        """Read the rules that name a topic, or a pattern of it: ``RULES`` and one more at most."""
        return [RuleRow._make(row) for row in await self.rows(_RULES, (patterns(topic), RULES + 1))]

    async def observes(self, ident: str) -> bool:
        """Tell whether a node is registered, and observes all topics."""
        return (await self.rows(_OBSERVES, (ident,)))[0][0]

    async def role(self) -> str:
        """Tell as which role the database knows us: the one that a rule has to name."""
        return (await self.rows("SELECT session_user::text"))[0][0]

    async def close(self) -> None:
        """Close the connection; the next question opens another."""
        async with self._turn:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()

    async def _connect(self) -> AsyncConnection:
        connection = await AsyncConnection.connect(self._dsn, autocommit=True)
        connection.answer_seconds = 2.0 * _STATEMENT_SECONDS
        await bound(connection, _STATEMENT_SECONDS)
        self._connection = connection
        return connection
