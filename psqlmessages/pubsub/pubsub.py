"""PubSub: publishes to bare channels of PostgreSQL and hears them, from threads."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import psycopg

from psqlmessages.client.options import Options
from psqlmessages.pubsub.bus import MAX_UNFINISHED, MAX_UNFINISHED_BYTES, Bus, Publishing
from psqlmessages.pubsub.line import Line
from psqlmessages.pubsub.segments import channel_name


class PubSub(Bus):
    """Bare channels of one database: no rules, no tables, nothing stored.

    ``connection`` is a connection string, or a connection of yours: then what is published within
    its transaction leaves at COMMIT, and nothing arrives before. Handlers are called in a thread
    of the bus, one after the other. ``interval`` is the keep-alive's, in seconds; ``skip_self``
    drops what this connection sent itself. A lost connection is made again, with the same
    parameters, and listens again. Threads may share a bus.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any] | str = "",
        *,
        interval: float = 1.0,
        skip_self: bool = False,
        max_unfinished: int = MAX_UNFINISHED,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
        options: Options | None = None,
    ) -> None:
        if not isinstance(connection, psycopg.Connection | str):
            raise TypeError(
                f"a psycopg.Connection or a str is needed, not {type(connection).__name__}"
            )
        options = options or Options()
        super().__init__(
            options, interval, max_unfinished, max_unfinished_bytes, skip_self=skip_self
        )
        self._line = Line(connection, self._subscriptions, options)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Connect now, and not at the first call; what the context manager does first."""
        self._line.open()

    def close(self) -> None:
        """Hear nothing more and disconnect; a connection of yours is left open, without LISTEN."""
        self._line.close()

    def run(self) -> None:
        """Wait until the bus is closed, by another thread, a handler or a signal handler."""
        self._line.ended.wait()

    @property
    def connection(self) -> psycopg.Connection[Any] | None:
        """The connection in use, for a transaction around ``publish``; None while it is away."""
        return self._line.connection

    def subscribe(self, channel: str) -> bool:
        """Hear a channel from now on; False where it was heard."""
        name = channel_name(channel)
        self._line.require_own_backend()
        is_new = self._line.run(lambda _: self._subscriptions.subscribing(name))
        self._line.watch()
        return is_new

    def unsubscribe(self, channel: str) -> bool:
        """Hear a channel no more; False where it was not heard."""
        name = channel_name(channel)
        return self._line.run(lambda _: self._subscriptions.unsubscribing(name))

    def publish(self, channel: str, payload: Any = None) -> None:
        """Send a str or what JSON can hold to whoever listens; None is a signal.

        Raise TypeError or ValueError where it cannot be sent: then nothing is.
        """
        self._line.run(Publishing(self._subscriptions, channel, payload))
