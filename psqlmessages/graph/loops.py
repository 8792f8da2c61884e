"""Loops: take elements, route them, deliver their copies; again and again, until stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import NamedTuple

import psycopg

from psqlmessages.client.backoff import Backoff
from psqlmessages.client.calls import checked, error_of
from psqlmessages.exceptions import ConnectionLost, MessagesError
from psqlmessages.graph import routing_calls
from psqlmessages.graph.batches import Batch, Taken
from psqlmessages.graph.crews import Crew
from psqlmessages.graph.lines import Line, Query, Row
from psqlmessages.graph.plans import Flow
from psqlmessages.graph.remote import REFUSALS, Pusher

_ANSWER_SECONDS = 60
# A server that is silent when all is to end is left after so long.
_CLOSING_SECONDS = 5
_LEAST, _MOST = timedelta(seconds=0.1), timedelta(seconds=5)
# How many elements are routed before others have their turn: a few milliseconds of work.
_ROUTED_AT_ONCE = 200
# What bodies of a batch may add up to, roughly; the first batch is small, as nothing is known yet.
_CHARACTERS = 16 * 1024 * 1024
_FIRST_BATCH = 10


class Ahead(NamedTuple):
    """What was taken with the delivery of a batch before: its elements, and when that began."""

    elements: list[Taken]
    began: float


class Loop:
    """One loop of an exchange, with a connection of its own to each database."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._plan = crew.plan
        self._reports = crew.reports
        self._line = Line(crew.source.address, _ANSWER_SECONDS)
        self._pushers = {
            alias: Pusher(crew.plan.ident, crew.namespaces[alias].address, namespace.circuit)
            for alias, namespace in crew.namespaces.items()
            if alias != crew.source.alias
        }
        self._backoff = Backoff(_LEAST, _MOST)
        most = _FIRST_BATCH if self._plan.fetches_body else self._plan.batch
        self._limit = min(most, self._plan.batch)
        self._singly = 0
        self._condemned = 0
        self._asked = 0
        self._ahead: Ahead | None = None

    async def run(self) -> None:
        """Run until the crew is stopped; what is being routed then is finished."""
        try:
            while not self._crew.is_stopping:
                await self._step()
        finally:
            for pusher in self._pushers.values():
                await pusher.close()
            # What was taken ahead stays where it was, for others at once.
            await self._line.end(_CLOSING_SECONDS)

    async def _step(self) -> None:
        rouses = self._crew.rouses
        try:
            number = await self._turn(1 if self._singly else self._limit)
            self._backoff.succeeded()
            self._singly = max(0, self._singly - number) if number else 0
            if number:
                self._crew.found()
            else:
                await self._crew.rest(rouses)
        except (psycopg.Error, MessagesError) as error:
            await self._failed(error)
        except Exception as error:  # noqa: BLE001 - logged and counted; the other loops go on
            self._reports.unexpected(error)
            await self._failed(error)

    async def _failed(self, error: Exception) -> None:
        if isinstance(error, psycopg.Error):
            error = error_of(error, is_broken=not self._line.is_open)
        self._reports.failed(error)
        self._ahead = None
        await self._line.reset()
        await self._crew.pause(self._backoff.failed(monotonic()))

    async def _turn(self, size: int) -> int:
        """Take elements and do what is to be done for them; return how many."""
        began = monotonic() if self._ahead is None else self._ahead.began
        if self._plan.flow is Flow.RESERVED:
            batch = await self._reserve(size)
        else:
            batch = await self._take(size)
        if batch is None:
            return 0
        if self._plan.flow is Flow.POPPED:
            await self._push(batch)
        self._reports.finished(batch, monotonic() - began)
        return len(batch.fates)

    # In one transaction

    async def _take(self, size: int) -> Batch | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            elements = ahead.elements
        else:
            elements = routing_calls.taken_at_once(await self._line.ask(*self._taking(size)))
        if not elements:
            await self._line.ask(Query("COMMIT"))
            return None
        is_all = len(elements) < self._asked
        self._took(elements)
        batch = await self._routed(elements)
        delivering = (routing_calls.deliver(batch, sorted(batch.failed)), Query("COMMIT"))
        try:
            if is_all or not self._may_take_ahead:
                answers = await self._line.ask(*delivering)
            else:
                answers = await self._deliver_and_take(delivering)
        except psycopg.Error as error:
            self._blame(error, elements)
            raise
        self._settle(batch, answers[0])
        return batch

    def _taking(self, size: int) -> list[Query]:
        self._asked = size
        plan = self._plan
        queue = plan.graphed.source.queue
        return routing_calls.take(plan.ident, queue, size, with_body=plan.fetches_body)

    @property
    def _may_take_ahead(self) -> bool:
        """Whether nothing else is to be done before the next batch is taken."""
        return self._plan.flow is Flow.WITHIN and not (self._singly or self._crew.is_stopping)

    async def _deliver_and_take(self, delivering: Sequence[Query]) -> list[list[Row]]:
        """Deliver, and take what comes next in the same round trip.

        Where there is none it is asked for once more, after this batch: a push may be told between.
        """
        began = monotonic()
        answers, taking = await self._line.ask_on(delivering, self._taking(self._limit))
        elements = routing_calls.taken_at_once(taking) if taking is not None else []
        if elements:
            self._ahead = Ahead(elements, began)
        else:
            await self._line.reset()
        return answers

    # With leases

    async def _reserve(self, size: int) -> Batch | None:
        plan = self._plan
        until = monotonic() + routing_calls.LEASE_SECONDS / 2
        (rows,) = await self._line.ask(
            routing_calls.reserve(plan.ident, plan.graphed.source.queue, size)
        )
        elements = routing_calls.taken(rows)
        if not elements:
            return None
        self._took(elements)
        batch = await self._routed(elements)
        await self._push(batch)
        await self._deliver(batch, elements, until)
        return batch

    async def _deliver(self, batch: Batch, elements: list[Taken], until: float) -> None:
        """Deliver what was reserved; where the connection breaks, anew while the leases hold.

        Where the first time succeeded unheard, the second one finds them lost, and does nothing.
        """
        while True:
            try:
                (rows,) = await self._line.ask(routing_calls.deliver(batch, sorted(batch.failed)))
            except psycopg.Error as error:
                self._blame(error, elements)
                is_broken = not self._line.is_open
                if not is_broken:
                    await self._release(batch, elements)
                if not is_broken or self._crew.is_stopping or monotonic() > until:
                    raise
                await self._failed(error)
            else:
                self._settle(batch, rows)
                return

    async def _release(self, batch: Batch, elements: list[Taken]) -> None:
        await self._line.reset()
        leases = [taken.ref for taken in elements]
        await self._line.ask(routing_calls.release(batch.plan.ident, leases))

    # Parts of both

    async def _routed(self, elements: list[Taken]) -> Batch:
        batch = Batch(self._plan)
        for number, taken in enumerate(elements, 1):
            if taken.id == self._condemned:
                self._condemned = 0
                batch.give_back(taken)
            else:
                batch.add(taken)
            if number % _ROUTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return batch

    async def _push(self, batch: Batch) -> None:
        """Push to the other databases, all at once."""
        wanted = {
            alias: [copy for copy in copies if copy.ref not in batch.lost]
            for alias, copies in batch.remote.items()
        }
        faults = await asyncio.gather(
            *(self._pushers[alias].push(copies) for alias, copies in wanted.items())
        )
        for copies, why in zip(wanted.values(), faults, strict=True):
            batch.pushed(copies, why)

    @staticmethod
    def _settle(batch: Batch, rows: Sequence[tuple[object, ...]]) -> None:
        answer = checked(rows[0][0])
        batch.settle(answer["Lost"], answer["Refused"])

    def _took(self, elements: list[Taken]) -> None:
        self._resize(elements)
        # What is in hand may take long: who watches is not this loop meanwhile.
        self._crew.found()

    def _resize(self, elements: list[Taken]) -> None:
        """Take as many the next time as their bodies allow."""
        weight = sum(len(taken.body) for taken in elements if taken.body is not None)
        most = len(elements) * _CHARACTERS // max(weight, 1)
        self._limit = max(1, min(self._plan.batch, most, 2 * max(self._limit, len(elements))))

    def _blame(self, error: psycopg.Error, elements: list[Taken]) -> None:
        """Find the element by which a whole batch failed: one by one, and the one alone fails."""
        is_of_data = (error.sqlstate or "")[:2] in REFUSALS or isinstance(error, psycopg.DataError)
        if not is_of_data or isinstance(error, ConnectionLost):
            return
        self._singly = len(elements)
        if len(elements) == 1:
            self._condemned = elements[0].id
