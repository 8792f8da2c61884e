"""All that a server sends to a connection, as libpq's trace shows it: rows, notices, errors."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Self

from psycopg import Connection
from psycopg.pq import Trace

# A message begins a line; what a text in it broke off is of the message above.
MESSAGE = re.compile(r"^(?=[FB]\t\d+\t)", re.MULTILINE)


class Overheard:
    """A connection that is listened in to, from now on.

    `found` has what the server sent that holds a secret, `messages` how many were looked through.
    """

    def __init__(self, connection: Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        # To be emptied while libpq writes.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.messages = 0
        self.found: list[str] = []
        self._listen()

    def look(self, secrets: Collection[str]) -> list[str]:
        """What the server has sent since the last look that holds a secret."""
        # Only now is all of it in the file.
        self._connection.pgconn.untrace()
        text = self._path.read_text(errors="replace")
        os.ftruncate(self._descriptor, 0)
        self._listen()
        sent = [message for message in MESSAGE.split(text) if message.startswith("B\t")]
        self.messages += len(sent)
        found = [message for message in sent if any(secret in message for secret in secrets)]
        self.found += found
        return found

    def _listen(self) -> None:
        self._connection.pgconn.trace(self._descriptor)
        self._connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.pgconn.untrace()
        os.close(self._descriptor)
