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
    """No environment variable, file or option has a valid address of the database."""


class OptionRefused(InvalidArgument):
    """An option of the source or sink is unknown, or its value is invalid."""


class ColumnRefused(InvalidArgument):
    """A schema has an unknown column, or a type to which a column cannot be cast."""


class OtherCluster(MessagesError):
    """A checkpoint belongs to another PostgreSQL cluster, so its offsets are meaningless."""


class MessagesGone(MessagesError):
    """Messages were removed before a query could read them."""


class ReadBroken(MessagesError):
    """The connection broke during a read that Spark had received in part."""


class LoginRefused(ServerUnreachable):
    """PostgreSQL refuses the password, role or database: a retry does not help."""


class CachedConnectionLost(ConnectionLost):
    """A connection that an earlier call had cached is lost."""


_PACKAGES = ("adbc_driver_manager", "adbc_driver_postgresql", "py4j", "pyarrow", "pyspark")


class ExtraMissing(ImportError):
    """A package that the pipeline needs is not installed."""


@contextmanager
def needs_extra() -> Iterator[None]:
    """Raise :class:`ExtraMissing`, which names the extra, if an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise ExtraMissing(
            f"The pipeline needs {package}: pip install 'psqlmessages[pipeline]'", name=error.name
        ) from error
