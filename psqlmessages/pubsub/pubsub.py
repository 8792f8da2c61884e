"""PubSub and AsyncPubSub: publish and subscribe to plain NOTIFY channels of PostgreSQL."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Final, Generic, Self

import psycopg

from psqlmessages.client.options import Options
from psqlmessages.pubsub.async_bus_connection import AsyncBusConnection
from psqlmessages.pubsub.bus_connection import BusConnection
from psqlmessages.pubsub.bus_state import BusCounters, BusState, ConnectionT, Handler
from psqlmessages.pubsub.segments import SegmentAssembler, check_channel_name

MAX_UNFINISHED: Final = 1_000
MAX_UNFINISHED_BYTES: Final = 64 * 1024 * 1024


class PubSubBase(Generic[ConnectionT]):
    """Common part of PubSub and AsyncPubSub: arguments, handlers and counters."""

    _psycopg_class: ClassVar[type[Any]]
    _connection_class: ClassVar[type[Any]]
    _can_await_handlers: ClassVar[bool] = False

    def __init__(
        self,
        connection: ConnectionT | str = "",
        *,
        interval: float = 1.0,
        skip_self: bool = False,
        max_unfinished: int = MAX_UNFINISHED,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
        options: Options | None = None,
    ) -> None:
        if not isinstance(connection, self._psycopg_class | str):
            raise TypeError(
                f"connection must be a psycopg.{self._psycopg_class.__name__} or str,"
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
        assembler = SegmentAssembler(max_unfinished, max_unfinished_bytes)
        self._state = BusState(interval, assembler, options, skip_self=skip_self)
        self._connection = self._connection_class(connection, self._state, options)

    def on(self, channel: str, handler: Handler) -> None:
        """Call a function with each :class:`Event` of a channel; log the function's exceptions."""
        if not callable(handler):
            raise TypeError(f"a handler must be callable, not {handler!r:.100}")
        if not self._can_await_handlers and inspect.iscoroutinefunction(handler):
            raise TypeError("a handler of PubSub cannot be a coroutine function: use AsyncPubSub")
        self._state.on(check_channel_name(channel), handler)

    def off(self, channel: str, handler: Handler) -> bool:
        """Undo ``on``; return False if there was no such handler."""
        return self._state.off(channel, handler)

    @property
    def connection(self) -> ConnectionT | None:
        """The current connection, for a transaction around ``publish``; None while disconnected."""
        connection: ConnectionT | None = self._connection.connection
        return connection

    @property
    def is_healthy(self) -> bool:
        """Whether the bus was connected at its last keep-alive or call."""
        return self._state.is_connected

    @property
    def counters(self) -> BusCounters:
        """Counters since the bus was created."""
        return self._state.counters


class PubSub(PubSubBase[psycopg.Connection[Any]]):
    """Plain NOTIFY channels of one database: no rules, no tables, nothing stored.

    ``connection`` is a connection string or your own connection. On your own connection, messages
    published in a transaction are sent at COMMIT, and the bus receives nothing until the
    transaction ends. A thread of the bus calls the handlers, one after the other. ``interval`` is
    the time between keep-alives in seconds; ``skip_self`` drops messages that this connection sent
    itself. After a connection loss the bus reconnects with the same parameters and listens again.
    Threads may share a bus.

    A long message arrives in segments. ``max_unfinished`` limits the number, and
    ``max_unfinished_bytes`` the memory, of messages whose segments have not all arrived.
    """

    _psycopg_class = psycopg.Connection
    _connection_class = BusConnection
    _connection: BusConnection

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect now rather than at the first call; raise ServerUnreachable if that fails."""
        self._connection.open()

    def close(self) -> None:
        """Stop receiving, and disconnect. Your own connection stays open, but no longer listens."""
        self._connection.close()

    def run(self) -> None:
        """Wait until another thread, a handler or a signal handler closes the bus."""
        self._connection.closed_event.wait()

    def subscribe(self, channel: str) -> bool:
        """Receive a channel's messages from now on; return False if already subscribed."""
        name = check_channel_name(channel)
        self._connection.require_own_backend()
        is_new = self._connection.run(lambda _: self._state.subscribe_script(name))
        self._connection.start_receiving()
        return is_new

    def unsubscribe(self, channel: str) -> bool:
        """Stop receiving a channel's messages; return False if not subscribed."""
        name = check_channel_name(channel)
        return self._connection.run(lambda _: self._state.unsubscribe_script(name))

    def publish(self, channel: str, payload: Any = None) -> None:
        """Send a str or a JSON value to all listeners; None is a signal without payload.

        Raises TypeError or ValueError, and sends nothing, if the channel or payload is invalid.
        """
        self._connection.run(self._state.publish_script(channel, payload))


class AsyncPubSub(PubSubBase[psycopg.AsyncConnection[Any]]):
    """Plain NOTIFY channels of one database, for asyncio; same methods as :class:`PubSub`.

    ``connection`` is a connection string or your own ``psycopg.AsyncConnection``. Handlers can be
    functions or coroutine functions; a task of the bus calls them one after the other. Tasks may
    share a bus.
    """

    _psycopg_class = psycopg.AsyncConnection
    _connection_class = AsyncBusConnection
    _can_await_handlers = True
    _connection: AsyncBusConnection

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """See :meth:`PubSub.open`."""
        await self._connection.open()

    async def close(self) -> None:
        """See :meth:`PubSub.close`."""
        await self._connection.close()

    async def run(self) -> None:
        """See :meth:`PubSub.run`."""
        await self._connection.closed_event.wait()

    async def subscribe(self, channel: str) -> bool:
        """See :meth:`PubSub.subscribe`."""
        name = check_channel_name(channel)
        await self._connection.require_own_backend()
        is_new = await self._connection.run(lambda _: self._state.subscribe_script(name))
        self._connection.start_receiving()
        return is_new

    async def unsubscribe(self, channel: str) -> bool:
        """See :meth:`PubSub.unsubscribe`."""
        name = check_channel_name(channel)
        return await self._connection.run(lambda _: self._state.unsubscribe_script(name))

    async def publish(self, channel: str, payload: Any = None) -> None:
        """See :meth:`PubSub.publish`."""
        await self._connection.run(self._state.publish_script(channel, payload))
