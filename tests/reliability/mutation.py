"""A mutation: a security check taken out of what is installed, and the test that must notice."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from django.db.backends.base.base import BaseDatabaseWrapper

VARIABLE = "PSQLMESSAGES_MUTATION"
# An inlined function and a view are replaced as any other: plans are made anew.
SOURCE = """
    SELECT pg_get_functiondef(to_regproc(%(name)s)) WHERE to_regproc(%(name)s) IS NOT NULL
    UNION ALL
    SELECT concat('CREATE OR REPLACE VIEW ', %(name)s,
                  ' WITH (' || array_to_string(c.reloptions, ', ') || ')',
                  ' AS ', pg_get_viewdef(c.oid))
    FROM pg_class AS c WHERE c.oid = to_regclass(%(name)s)
"""


class MutationError(Exception):
    """A mutation that cannot be made as it is written."""


class Cursor(Protocol):
    """A cursor of Django or of psycopg."""

    def execute(self, query: Any, params: Any = ..., /) -> Any: ...
    def fetchall(self) -> list[Any]: ...


@dataclass(frozen=True)
class Mutation:
    """A function or view of the schema messages, text in it, what replaces that, a test's id.

    times: how often the text stands there, where one check is made for each of many tables.
    """

    what: str
    find: str
    replacement: str
    test: str
    times: int = 1

    @contextmanager
    def installed(self, cursor: Cursor) -> Iterator[None]:
        """Replace what is installed in a database by the mutated source, for a while."""
        source = self.install(cursor)
        try:
            yield
        finally:
            cursor.execute(source)

    def install(self, cursor: Cursor) -> str:
        """Replace what is installed in a database by the mutated source; return the former."""
        cursor.execute(SOURCE, {"name": f"messages.{self.what}"})
        sources = cursor.fetchall()
        if len(sources) != 1:
            raise MutationError(f"messages.{self.what} is there {len(sources)} times")
        ((source,),) = sources
        if source.count(self.find) != self.times:
            raise MutationError(
                f"{self.find!r} stands {source.count(self.find)} times in messages.{self.what}"
            )
        cursor.execute(source.replace(self.find, self.replacement))
        return str(source)


def install_asked(connection: BaseDatabaseWrapper, known: Mapping[str, Mutation]) -> None:
    """Install the mutation that the environment names, if it names one."""
    name = os.environ.get(VARIABLE)
    if name is not None:
        with connection.cursor() as cursor:
            known[name].install(cursor)
