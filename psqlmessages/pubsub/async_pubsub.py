"""AsyncPubSub: the asyncio version of PubSub."""

from __future__ import annotations

from typing import Any, Self

import psycopg

from psqlmessages.pubsub.async_bus_connection import AsyncBusConnection
from psqlmessages.pubsub.pubsub import Bus
from psqlmessages.pubsub.segments import channel_name


class AsyncPubSub(Bus[psycopg.AsyncConnection[Any]]):
    """Plain NOTIFY channels of one database, for asyncio; same methods as :class:`PubSub`.

    ``connection`` is a connection string or your own ``psycopg.AsyncConnection``. Handlers can be
    functions or coroutine functions; a task of the bus calls them one after the other. Tasks may
    share a bus.
    """

    _given_class = psycopg.AsyncConnection
    _connection_class = AsyncBusConnection
    _awaits_handlers = True
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
        await self._connection.ended.wait()

    @property
    def connection(self) -> psycopg.AsyncConnection[Any] | None:
        """See :attr:`PubSub.connection`."""
        return self._connection.connection

    async def subscribe(self, channel: str) -> bool:
        """See :meth:`PubSub.subscribe`."""
        name = channel_name(channel)
        await self._connection.require_own_backend()
        is_new = await self._connection.run(lambda _: self._subscriptions.subscribing(name))
        self._connection.watch()
        return is_new

    async def unsubscribe(self, channel: str) -> bool:
        """See :meth:`PubSub.unsubscribe`."""
        name = channel_name(channel)
        return await self._connection.run(lambda _: self._subscriptions.unsubscribing(name))

    async def publish(self, channel: str, payload: Any = None) -> None:
        """See :meth:`PubSub.publish`."""
        await self._connection.run(self._subscriptions.publishing(channel, payload))
