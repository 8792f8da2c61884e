"""PubSub: publish and subscribe to plain NOTIFY channels of PostgreSQL, with threads."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Final, Generic, Self

import psycopg

from psqlmessages.client.options import Options
from psqlmessages.pubsub import segments
from psqlmessages.pubsub.bus_connection import BusConnection
from psqlmessages.pubsub.bus_state import BusCounters, C, Handler, Subscriptions
from psqlmessages.pubsub.segments import SegmentAssembler, channel_name

# Bus: the common part of PubSub and AsyncPubSub.

MAX_UNFINISHED: Final = 1_000
MAX_UNFINISHED_BYTES: Final = 64 * 1024 * 1024


class Bus(Generic[C]):
    """The handlers and the state of a bus; see :class:`PubSub`."""

    _given_class: ClassVar[type[Any]]
    _connection_class: ClassVar[type[Any]]
    _awaits_handlers: ClassVar[bool] = False

    def __init__(
        self,
        connection: C | str = "",
        *,
        interval: float = 1.0,
        skip_self: bool = False,
        max_unfinished: int = MAX_UNFINISHED,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
        options: Options | None = None,
    ) -> None:
        if not isinstance(connection, self._given_class | str):
            raise TypeError(
                f"connection must be a psycopg.{self._given_class.__name__} or str,"
                f" not {type(connection).__name__}"
            )
        for name, value in (
            ("interval", interval),
            ("max_unfinished", max_unfinished),
            ("max_unfinished_bytes", max_unfinished_bytes),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be more than 0, not {value!r}")
        options = options or Options()
        assembly = SegmentAssembler(max_unfinished, max_unfinished_bytes)
        self._subscriptions = Subscriptions(interval, assembly, options, skip_self=skip_self)
        self._connection = self._connection_class(connection, self._subscriptions, options)

    def on(self, channel: str, handler: Handler) -> None:
        """Call a function with each :class:`Event` of a subscribed channel.

        Exceptions of the handler are logged and counted; the bus continues.
        """
        if not callable(handler):
            raise TypeError(f"a handler must be callable, not {handler!r:.100}")
        if not self._awaits_handlers and inspect.iscoroutinefunction(handler):
            raise TypeError("a handler of PubSub cannot be a coroutine function: use AsyncPubSub")
        self._subscriptions.on(segments.channel_name(channel), handler)

    def off(self, channel: str, handler: Handler) -> bool:
        """Undo ``on``; False if there was no such handler."""
        return self._subscriptions.off(channel, handler)

    @property
    def is_healthy(self) -> bool:
        """Whether the bus was connected at its last keep-alive or call."""
        return self._subscriptions.is_connected

    @property
    def counters(self) -> BusCounters:
        """Counters since the bus was created."""
        return self._subscriptions.counters


class PubSub(Bus[psycopg.Connection[Any]]):
    """Plain NOTIFY channels of one database: no rules, no tables, nothing stored.

    ``connection`` is a connection string or your own connection. On your own connection, messages
    published within a transaction are sent at COMMIT, and none are received before. A thread of the
    bus calls the handlers, one after the other. ``interval`` is the time between keep-alives in
    seconds; ``skip_self`` drops messages that this connection sent itself. After a connection loss
    the bus reconnects with the same parameters and listens again. Threads may share a bus.
    """

    _given_class = psycopg.Connection
    _connection_class = BusConnection
    _connection: BusConnection

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect now rather than at the first call; the context manager calls it on entry."""
        self._connection.open()

    def close(self) -> None:
        """Stop receiving and disconnect; your own connection stays open, after UNLISTEN."""
        self._connection.close()

    def run(self) -> None:
        """Wait until another thread, a handler or a signal handler closes the bus."""
        self._connection.ended.wait()

    @property
    def connection(self) -> psycopg.Connection[Any] | None:
        """The current connection, for a transaction around ``publish``; None while disconnected."""
        return self._connection.connection

    def subscribe(self, channel: str) -> bool:
        """Receive a channel's messages from now on; False if already subscribed."""
        name = channel_name(channel)
        self._connection.require_own_backend()
        is_new = self._connection.run(lambda _: self._subscriptions.subscribing(name))
        self._connection.watch()
        return is_new

    def unsubscribe(self, channel: str) -> bool:
        """Stop receiving a channel's messages; False if not subscribed."""
        name = channel_name(channel)
        return self._connection.run(lambda _: self._subscriptions.unsubscribing(name))

    def publish(self, channel: str, payload: Any = None) -> None:
        """Send a str or a JSON value to all listeners; None is a signal without payload.

        Raises TypeError or ValueError, and sends nothing, if the payload cannot be sent.
        """
        self._connection.run(self._subscriptions.publishing(channel, payload))
