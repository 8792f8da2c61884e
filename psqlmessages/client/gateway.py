"""Gateway: many nodes on one session, for programs that speak for others. psycopg only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from math import inf
from time import monotonic
from typing import Any

from psycopg import errors

from psqlmessages.client import gateway_calls
from psqlmessages.client.async_link import AsyncLink
from psqlmessages.client.counters import Counters
from psqlmessages.client.gateway_calls import CHANGES, FUNCTIONS, REGISTRATIONS, Answer
from psqlmessages.client.gateway_listening import GatewayListening
from psqlmessages.client.listening import Arrival
from psqlmessages.client.options import Options, conninfo
from psqlmessages.client.patience import LEAST_SECONDS
from psqlmessages.exceptions import ConnectionLost, MessagesError

_BATCH = 100


class Gateway:
    """One session that many nodes share; each call says which of them acts.

    ``name`` is for the log and for ``application_name``: no node of that name is registered. Tasks
    may share a gateway; sends that they make at the same time share round trips. What was
    registered is registered again after a lost connection.
    """

    def __init__(self, name: str, dsn: str = "", *, options: Options | None = None) -> None:
        self.name = name
        options = options or Options()
        self._listening = GatewayListening(name, options)
        self._link = AsyncLink(conninfo(dsn, name), self._listening, options)
        self._taken = 0
        self._changing = asyncio.Lock()
        self._reconnect_seconds = options.reconnect_wait.total_seconds()

    async def open(self) -> None:
        """Connect; raises ServerUnreachable at once where that is not possible."""
        await self._link.open()

    async def close(self) -> None:
        """Deregister all nodes and disconnect; ends every wait at once."""
        await self._link.close()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, on which all is registered."""
        return self._listening.pulse.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether the gateway is closed, or being closed: it will not return."""
        return self._link.is_stopped

    @property
    def echo_seconds(self) -> float | None:
        """How long the last notification to ourselves took, from NOTIFY to here."""
        return self._listening.pulse.echo_seconds

    @property
    def counters(self) -> Counters:
        """What came since the gateway was made."""
        return self._listening.counters

    @property
    def pid(self) -> int:
        """The process of the server behind the connection."""
        return self._listening.pid

    @property
    def idents(self) -> tuple[str, ...]:
        """The nodes that are registered."""
        return self._listening.registration.idents

    @property
    def arrived(self) -> int:
        """How many arrivals there were so far, taken or not."""
        return self._taken + len(self._listening.inbox)

    def on_ran(self, told: Callable[[str, str, str], None]) -> None:
        """Have what changes a registration told as it succeeds: ident, function, ident or topic.

        So it is known before what follows it arrives, and even where the caller was cancelled.
        A crash is told as deinit.
        """
        self._listening.on_ran = told

    async def run(
        self, ident: str, function: str, *arguments: str | None, is_patient: bool = True
    ) -> Answer:
        """Call a function of the SQL core as a node; a refusal is an answer too.

        ``init``, ``deinit``, ``crash`` and ``use`` take no arguments. The answer of ``get_data`` is
        the message's header, with the body's text as ``Body``. Raises ConnectionLost and NodeClosed
        where there is no connection, ValueError for what PostgreSQL cannot hold, psycopg's errors
        for what the server aborts: LockNotAvailable where others hold for too long what a change
        needs, without ``is_patient`` where they hold it now.
        """
        try:
            if function in REGISTRATIONS and not arguments:
                return await self._change(ident, function, ident, is_patient=is_patient)
            if function in CHANGES and len(arguments) == 1 and arguments[0] is not None:
                return await self._change(ident, function, arguments[0], is_patient=is_patient)
            if function in FUNCTIONS:
                return await self._link.run(gateway_calls.acting(ident, function, *arguments))
        except MessagesError as error:
            if error.number is None:
                raise
            return {"Err": str(error.number), "Errstr": error.text}
        raise TypeError(f"no function of a gateway: {function}{arguments!r:.100}")

    async def _change(self, ident: str, function: str, subject: str, *, is_patient: bool) -> Answer:
        patience = self._listening.patience
        deadline = monotonic() + self._reconnect_seconds
        # One at a time: those that gathered would each wait for what the first finds held.
        async with self._changing:
            if not self.is_connected and monotonic() >= deadline:
                # It has waited for the connection along with those before it.
                raise ConnectionLost(f"{self.name} is not connected")
            seconds = patience.seconds((subject,)) if is_patient else LEAST_SECONDS
            if function in REGISTRATIONS:
                call = gateway_calls.registration(function, ident, seconds)
            else:
                call = gateway_calls.changing(ident, function, subject, seconds)
            try:
                answer = await self._link.run(call)
            except errors.LockNotAvailable:
                patience.waited(seconds, subject)
                raise
            patience.found_free(subject)
            return answer

    def forget(self, ident: str, function: str = "init", topic: str = "") -> None:
        """Do not register a node again after a lost connection, or no more what it did."""
        self._listening.registration.drop(ident, function, topic or ident)

    def has(self, ident: str, function: str, topic: str) -> bool:
        """Whether a node has called ``topic_listen``, ``_notify`` or ``_observe`` for a topic."""
        return self._listening.registration.has(ident, function, topic)

    async def batches(self) -> AsyncIterator[list[Arrival]]:
        """Give what came, in its order, until the gateway is closed; for one task alone.

        Local events are among it: ``connection_lost`` and ``reconnected``, and after that what of
        the nodes could not be registered again.
        """
        inbox: Any = self._listening.inbox
        while not self._link.is_stopped:
            await self._link.wait(lambda: inbox, inf)
            batch = [inbox.popleft() for _ in range(min(_BATCH, len(inbox)))]
            self._taken += len(batch)
            self._link.took(len(batch))
            if batch:
                yield batch
