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


class NoValidDsn(InvalidArgument):
    """The address of the database is missing, unreadable or invalid."""


class OptionRefused(InvalidArgument):
    """An option, or the mode of a write, is unknown, missing or invalid."""


class ColumnRefused(InvalidArgument):
    """A schema has an unknown, repeated or unsuitable column, or lacks the column body."""


class CheckpointRefused(MessagesError):
    """A checkpoint is of another database, or is newer than a database restored from a backup."""


class MessagesGone(MessagesError):
    """A query cannot read messages, because the messages, their topic or a rule were removed."""


class ReadBroken(MessagesError):
    """A read broke after it had returned rows, and cannot continue."""


class LoginRefused(ServerUnreachable):
    """No host of the address accepts the login, so a retry would not succeed."""


class ReusedConnectionLost(ConnectionLost):
    """A cached connection is lost. The loss may be old, so the database may be up."""


_PACKAGES = ("adbc_driver_manager", "adbc_driver_postgresql", "py4j", "pyarrow", "pyspark")


class ExtraMissing(ImportError):
    """A package that the pipeline needs is not installed; the text names the extra to install."""


@contextmanager
def needs_extra() -> Iterator[None]:
    """Raise :class:`ExtraMissing` if the block imports one of _PACKAGES that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise ExtraMissing(
            f"The pipeline needs {package}: pip install 'psqlmessages[pipeline]'", name=error.name
        ) from error
