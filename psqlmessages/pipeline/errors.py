"""Errors of the pipeline that no function of SQL answers."""

from __future__ import annotations

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
    """The connection broke amid a read of which a part was handed to Spark already."""


class LoginRefused(ServerUnreachable):
    """PostgreSQL answers, but refuses the password, the role or the database: waiting is no use."""


class KeptConnectionLost(ConnectionLost):
    """A connection that was kept from an earlier call turned out to be dead."""
