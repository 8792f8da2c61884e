"""PubSub: publish and subscribe to bare PostgreSQL channels, with threads."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import psycopg

from psqlmessages.client.options import Options
from psqlmessages.pubsub import segments
from psqlmessages.pubsub.bus_connection import BusConnection
from psqlmessages.pubsub.bus_state import (
    BusCounters,
    BusNotifications,
    Handler,
    Script,
    Subscriptions,
)
from psqlmessages.pubsub.segments import SegmentAssembler, channel_name

# Bus: what PubSub and AsyncPubSub have in common: their handlers, and what was published.

MAX_UNFINISHED: Final = 1_000
MAX_UNFINISHED_BYTES: Final = 64 * 1024 * 1024


class Bus:
    """The handlers of a bus and the state behind it; see :class:`PubSub`."""

    _awaits_handlers: ClassVar[bool] = False

    def __init__(
        self,
        options: Options,
        interval: float,
        max_unfinished: int,
        max_unfinished_bytes: int,
        *,
        skip_self: bool,
    ) -> None:
        for name, value in (
            ("interval", interval),
            ("max_unfinished", max_unfinished),
            ("max_unfinished_bytes", max_unfinished_bytes),
        ):
            if not value > 0:
                raise ValueError(f"{name} is more than 0, not {value!r}")
        assembly = SegmentAssembler(max_unfinished, max_unfinished_bytes)
        self._subscriptions = Subscriptions(interval, assembly, options, skip_self=skip_self)

    def on(self, channel: str, handler: Handler) -> None:
        """Call a function with each :class:`Event` of a channel that is subscribed to.

        What it raises is logged and counted, and the bus goes on.
        """
        if not callable(handler):
            raise TypeError(f"a handler can be called, unlike {handler!r:.100}")
        if not self._awaits_handlers and inspect.iscoroutinefunction(handler):
            raise TypeError("a coroutine function can be a handler of AsyncPubSub only")
        self._subscriptions.on(segments.channel_name(channel), handler)

    def off(self, channel: str, handler: Handler) -> bool:
        """Undo ``on``; False where there was no such handler."""
        return self._subscriptions.off(channel, handler)

    @property
    def is_healthy(self) -> bool:
        """Whether the bus is connected, as far as its last keep-alive and calls showed."""
        return self._subscriptions.is_connected

    @property
    def counters(self) -> BusCounters:
        """What the bus has seen since it was made."""
        return self._subscriptions.counters


class Publishing:
    """A message about to be published: checked, and cut as the connection's state wants it."""

    def __init__(self, subscriptions: Subscriptions, channel: str, payload: Any) -> None:
        self._subscriptions = subscriptions
        self._channel = segments.channel_name(channel)
        self._text = segments.flagged(payload)

    def __call__(self, buffer: BusNotifications) -> Script[None]:
        """Give the script that sends it; it looks at the connection when it is begun."""
        yield from self._subscriptions.publishing(
            self._channel, self._text, is_in_transaction=buffer.is_in_transaction
        )


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
        self._bus = BusConnection(connection, self._subscriptions, options)

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
        self._bus.open()

    def close(self) -> None:
        """Hear nothing more and disconnect; a connection of yours is left open, without LISTEN."""
        self._bus.close()

    def run(self) -> None:
        """Wait until the bus is closed, by another thread, a handler or a signal handler."""
        self._bus.ended.wait()

    @property
    def connection(self) -> psycopg.Connection[Any] | None:
        """The connection in use, for a transaction around ``publish``; None while it is away."""
        return self._bus.connection

    def subscribe(self, channel: str) -> bool:
        """Hear a channel from now on; False where it was heard."""
        name = channel_name(channel)
        self._bus.require_own_backend()
        is_new = self._bus.run(lambda _: self._subscriptions.subscribing(name))
        self._bus.watch()
        return is_new

    def unsubscribe(self, channel: str) -> bool:
        """Hear a channel no more; False where it was not heard."""
        name = channel_name(channel)
        return self._bus.run(lambda _: self._subscriptions.unsubscribing(name))

    def publish(self, channel: str, payload: Any = None) -> None:
        """Send a str or what JSON can hold to whoever listens; None is a signal.

        Raise TypeError or ValueError where it cannot be sent: then nothing is.
        """
        self._bus.run(Publishing(self._subscriptions, channel, payload))
