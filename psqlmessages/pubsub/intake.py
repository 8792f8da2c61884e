"""Intake: the notifications of a connection that belong to a bus, and when it may be touched."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from psqlmessages.pubsub.statements import BACKEND, Script

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

_IDLE = pq.TransactionStatus.IDLE
_OPEN = (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)


class Intake:
    """What comes on a connection; that of other channels is left to psycopg and its owner.

    Waiting is done on a duplicate of the connection's file descriptor: its owner may wait on the
    descriptor itself at the same time, and close it.
    """

    def __init__(self, connection: AnyConnection, is_wanted: Callable[[str], bool]) -> None:
        self._pgconn = connection.pgconn
        self._is_wanted = is_wanted
        self._others = self._pgconn.notify_handler
        self._raw: deque[pq.PGnotify] = deque()
        self._info = connection.info
        self.process_id = self._pgconn.backend_pid
        self._is_identified = False
        self.descriptor = os.dup(self._pgconn.socket)
        self._pgconn.notify_handler = self._keep

    def _keep(self, notification: pq.PGnotify) -> None:
        if self._is_wanted(notification.relname.decode(self.encoding, "replace")):
            self._raw.append(notification)
        elif self._others is not None:
            self._others(notification)

    @property
    def encoding(self) -> str:
        """The name of the connection's encoding; its owner may change it."""
        return self._info.encoding

    @property
    def is_touchable(self) -> bool:
        """Whether its owner is not amid a COPY or the like, which nothing may disturb."""
        return self._pgconn.transaction_status != pq.TransactionStatus.ACTIVE

    @property
    def is_idle(self) -> bool:
        """Whether a statement would be a transaction of its own."""
        is_plain = self._pgconn.pipeline_status == pq.PipelineStatus.OFF
        return is_plain and self._pgconn.transaction_status == _IDLE

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._pgconn.transaction_status in _OPEN

    def identifying(self) -> Script[bool]:
        """See what serves the connection, by its real process id; True where it is a pooler."""
        if not self._is_identified:
            (answer,) = yield BACKEND
            self.process_id = int(answer)
            self._is_identified = True
        return self.process_id != self._pgconn.backend_pid

    def read(self) -> None:
        """Read what the socket has; raises OperationalError where the connection is gone."""
        self._pgconn.consume_input()
        while (notification := self._pgconn.notifies()) is not None:
            self._keep(notification)

    def take(self) -> list[pq.PGnotify]:
        """Take what came so far, in its order."""
        taken = list(self._raw)
        self._raw.clear()
        return taken

    def close(self) -> None:
        """Leave the connection to its owner."""
        self._pgconn.notify_handler = self._others
        os.close(self.descriptor)


def conninfo_of(connection: AnyConnection) -> str:
    """Give the connection string of a connection, with its password: it is not to be logged."""
    password = connection.info.password
    given: dict[str, Any] = dict(connection.info.get_parameters())
    return make_conninfo(**given, **({"password": password} if password else {}))


def is_closed_by_owner(connection: AnyConnection) -> bool:
    """Whether a connection was closed on purpose, and not cut."""
    return connection.closed and not connection.broken
