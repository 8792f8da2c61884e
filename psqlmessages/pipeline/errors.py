"""Errors of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psqlmessages.exceptions import (
    ConnectionLost,
    InvalidArgument,
    MessagesError,
    ServerUnreachable,
)


class DsnMissing(InvalidArgument):
    """No variable and no file says which database to connect to."""


class OptionRefused(InvalidArgument):
    """An option of the source or sink is unknown, or its value cannot be used."""


class ColumnRefused(InvalidArgument):
    """A schema names a column that the source does not have, or a type it cannot be turned into."""


class OtherCluster(MessagesError):
    """A checkpoint was written against another cluster of PostgreSQL: its offsets mean nothing."""


class MessagesGone(MessagesError):
    """Messages that a query has not read yet are kept no more."""


class ReadBroken(MessagesError):
    """The connection broke in a read of which Spark has already received a part."""


class LoginRefused(ServerUnreachable):
    """PostgreSQL refuses the password, the role or the database: waiting does not help."""


class KeptConnectionLost(ConnectionLost):
    """A connection that was cached by an earlier call is dead."""


# What to say where the packages of the extra psqlmessages[pipeline] are missing.

PACKAGES = frozenset(
    {"adbc_driver_manager", "adbc_driver_postgresql", "py4j", "pyarrow", "pyspark"}
)


class ExtraMissing(ImportError):
    """A package that the pipeline needs is not installed."""


@contextmanager
def needs_extra() -> Iterator[None]:
    """Raise :class:`ExtraMissing`, which says what to install, where an import within fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        raise ExtraMissing(
            f"The pipeline needs {package}: pip install 'psqlmessages[pipeline]'",
            name=error.name,
        ) from error
