"""Batch of elements: the plan of its exchange, routing outcomes and copies. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, NamedTuple

from psqlmessages.exchanges.model import (
    FALLBACK_QUEUES,
    HOP_HEADER,
    UNCHANGED,
    CompiledExchange,
    Delivery,
    QueueRef,
    RoutingResult,
    SelectorInput,
    ident_of,
)
from psqlmessages.exchanges.routing import RouteCache, route
from psqlmessages.wire import EncodedBody, MalformedPayload, decode

# `messages.deliver` accepts at most this many copies in one call.
_MAX_COPIES: Final = 65_536

# Index of the destination of a copy that goes to a fallback queue.
FALLBACK_DESTINATION: Final = -1


class DeliveryMode(Enum):
    """How elements are taken and delivered.

    ONE_DATABASE takes and delivers in one transaction. The other modes copy to other databases.
    RESERVED leases an element until all copies are delivered. POPPED removes the element first, so
    a copy that cannot be pushed to another database is lost.
    """

    ONE_DATABASE = "one database"
    RESERVED = "reserved"
    POPPED = "popped"


@dataclass(frozen=True)
class ExchangePlan:
    """Plan for the consumers of an exchange.

    The mark of a destination is ``<exchange>/<namespace>/<queue>/<number>``. The number counts the
    earlier destinations with the same queue, so it is usually 0, and the mark stays the same when
    other destinations are added, removed or reordered. An element stores the marks of the copies
    already made, so that a retry does not make them again.
    """

    exchange: CompiledExchange
    mode: DeliveryMode
    marks: tuple[str, ...]
    needs_body: bool
    consumers: int
    batch_size: int
    route_cache: RouteCache | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, exchange: CompiledExchange) -> ExchangePlan:
        """Plan the consumers of an exchange."""
        queues = [destination.queue for destination in exchange.destinations]
        if all(queue.namespace == exchange.source.namespace for queue in queues):
            mode = DeliveryMode.ONE_DATABASE
        else:
            mode = DeliveryMode.RESERVED if exchange.reserve else DeliveryMode.POPPED
        # All consumers of a process together take at most ``wsize`` elements at a time.
        consumers = min(exchange.parallel, exchange.wsize)
        max_batch_size = _MAX_COPIES // max(len(queues), 1)
        occurrences: Counter[QueueRef] = Counter()
        marks = []
        for queue in queues:
            marks.append(f"{exchange.name}/{queue}/{occurrences[queue]}")
            occurrences[queue] += 1
        return cls(
            exchange=exchange,
            mode=mode,
            marks=tuple(marks),
            needs_body=any(selector.needs_body for selector in exchange.selectors),
            consumers=consumers,
            batch_size=min(exchange.wsize // consumers, max_batch_size),
            route_cache=RouteCache.of(exchange),
        )

    @property
    def ident(self) -> str:
        """The node name of the exchange."""
        return ident_of(self.exchange.name)

    @property
    def fetches_body(self) -> bool:
        """Whether this process reads bodies: for selectors, or to copy them to other databases."""
        return self.needs_body or self.mode is not DeliveryMode.ONE_DATABASE

    @property
    def namespaces(self) -> set[str]:
        """The namespaces of the source and of all destinations."""
        queues = (self.exchange.source, *(each.queue for each in self.exchange.destinations))
        return {queue.namespace for queue in queues}


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TakenElement(NamedTuple):
    """An element from `take` (its ``ref`` is the id) or from `reserve` (its ``ref`` is the lease).

    ``delivered_marks`` are the marks of the copies that earlier attempts made. ``now`` is the
    server's time.
    """

    ref: str
    id: int
    body: str | None
    enc: str | None
    headers: dict[str, Any]
    tries: int
    hops: int
    pushed_at: datetime
    delivered_marks: list[str] | None
    now: datetime


class LocalCopy(NamedTuple):
    """A copy in the source's database. If ``headers`` or ``body`` is None, copy the element's.

    If ``queue`` is None, another database has the copy already, so `deliver` only stores the mark.
    """

    ref: str
    destination: int
    mark: str
    queue: str | None
    headers: str | None = None
    body: str | None = None
    enc: str | None = None
    mature: datetime | None = None
    tries: int | None = None


class RemoteCopy(NamedTuple):
    """A complete copy for another database."""

    ref: str
    destination: int
    mark: str
    queue: str
    headers: str
    body: str
    enc: str | None
    delay: float | None
    mature: datetime | None
    tries: int
    key: str


class CopyError(NamedTuple):
    """A copy that was not made: its element, its destination and the reason."""

    ref: str
    destination: int
    reason: str


@dataclass(slots=True)
class RoutedBatch:
    """The outcomes, copies and errors of elements that were taken together, by their refs.

    ``outcome_of`` has the outcome of `route`, and the total time of the selectors. The keys of
    ``remote_copies`` are namespaces. ``failed`` elements caused a data error, or have a copy that
    could not be made. ``lost`` elements had lost their lease before they were delivered.
    ``is_retry``: an earlier delivery of this batch may have succeeded.
    """

    plan: ExchangePlan
    outcome_of: dict[str, tuple[str, float]] = field(default_factory=dict)
    copies: list[LocalCopy] = field(default_factory=list)
    remote_copies: dict[str, list[RemoteCopy]] = field(default_factory=dict)
    copy_errors: list[CopyError] = field(default_factory=list)
    selector_errors: list[tuple[int, str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    is_retry: bool = False

    def add(self, element: TakenElement) -> None:
        """Route an element, and add its copies."""
        cache = self.plan.route_cache
        deliveries = cache.get(element.headers) if cache is not None else None
        if deliveries is None:
            routed = self._route(element)
            if cache is not None:
                cache.put(element.headers, routed)
            deliveries, outcome = routed.deliveries, routed.outcome
            selector_seconds = sum(verdict.seconds for verdict in routed.verdicts)
            self.selector_errors += [
                (verdict.destination, verdict.error)
                for verdict in routed.verdicts
                if verdict.error is not None
            ]
        else:
            # The cache stores no failed selectors, and returns None for too many hops. So the
            # deliveries alone determine the outcome.
            outcome = "ok" if deliveries else self.plan.exchange.outcome_without_route
            selector_seconds = 0.0
        self.outcome_of[element.ref] = (outcome, selector_seconds)
        if outcome in FALLBACK_QUEUES:
            queue = FALLBACK_QUEUES[outcome]
            mark = f"{self.plan.exchange.name}/{queue}"
            self.copies.append(LocalCopy(element.ref, FALLBACK_DESTINATION, mark, queue))
        for delivery in deliveries:
            self._add_copy(element, delivery)

    def _route(self, element: TakenElement) -> RoutingResult:
        body: Any = None
        if self.plan.needs_body and element.body is not None:
            try:
                body = decode(element.body, element.enc)
            except MalformedPayload:
                # The stored body does not match its encoding: selectors see the text.
                body = element.body
        message = SelectorInput(
            body=body,
            headers=dict(element.headers),
            id=element.id,
            tries=element.tries,
            hops=element.hops,
            queue=self.plan.exchange.source.name,
            ns=self.plan.exchange.source.namespace,
        )
        return route(self.plan.exchange, message, now=element.now)

    def fail_unrouted(self, element: TakenElement) -> None:
        """Mark an element as failed without routing it."""
        # This outcome has no effect: ``count_outcomes`` replaces it with "failed".
        self.outcome_of[element.ref] = ("ok", 0.0)
        self.failed.add(element.ref)

    def _add_copy(self, element: TakenElement, delivery: Delivery) -> None:
        mark = self.plan.marks[delivery.destination]
        if element.delivered_marks and mark in element.delivered_marks:
            return
        queue = self.plan.exchange.destinations[delivery.destination].queue
        try:
            if queue.namespace == self.plan.exchange.source.namespace:
                self.copies.append(_local_copy(element, delivery, mark, queue.name))
            else:
                copy = self._remote_copy(element, delivery, mark, queue.name)
                self.remote_copies.setdefault(queue.namespace, []).append(copy)
        except (TypeError, ValueError, OverflowError) as error:
            self._fail(element.ref, delivery.destination, str(error))

    def _remote_copy(
        self, element: TakenElement, delivery: Delivery, mark: str, queue: str
    ) -> RemoteCopy:
        if delivery.body is UNCHANGED:
            body = EncodedBody(element.body or "", element.enc)
        else:
            body = EncodedBody.of(delivery.body)
        headers = delivery.headers
        if headers is None:
            headers = {**element.headers, HOP_HEADER: element.hops + 1}
        has_mature = delivery.mature is not None
        # The idempotency key. It contains the time, because a recreated database may reuse ids. The
        # number at the end of the mark tells destinations with the same queue apart.
        microseconds = (element.pushed_at - _EPOCH) // timedelta(microseconds=1)
        number = mark.rpartition("/")[2]
        return RemoteCopy(
            ref=element.ref,
            destination=delivery.destination,
            mark=mark,
            queue=queue,
            headers=_json(headers),
            body=body.text,
            enc=body.enc,
            # ``mature`` overrides the delay.
            delay=None if has_mature else delivery.delay,
            mature=_mature(delivery, element.now) if has_mature else None,
            tries=delivery.tries,
            key=f"{self.plan.exchange.name}.{element.id}.{microseconds}.{number}",
        )

    # Results

    def _fail(self, ref: str, destination: int, reason: str) -> None:
        self.copy_errors.append(CopyError(ref, destination, reason))
        self.failed.add(ref)

    def add_pushed(self, copies: Iterable[RemoteCopy], errors: Sequence[str | None]) -> None:
        """Record the result of a push: for each copy an error, or None if it was pushed."""
        for copy, error in zip(copies, errors, strict=True):
            if error is None:
                # If another copy of the element fails, this mark prevents a second push.
                self.copies.append(LocalCopy(copy.ref, copy.destination, copy.mark, None))
            else:
                self._fail(copy.ref, copy.destination, error)

    def add_delivered(self, answer: dict[str, Any]) -> None:
        """Record the answer of `deliver`: the elements that are lost, and the refused copies."""
        self.lost.update(answer["Lost"])
        if answer["Refused"]:
            destinations = {(copy.mark, copy.ref): copy.destination for copy in self.copies}
            for mark, ref, reason, _index in answer["Refused"]:
                self._fail(ref, destinations[mark, ref], reason)

    def count_outcomes(self) -> dict[str, tuple[int, float]]:
        """Return the number of elements (without lost ones) and selector seconds, by outcome."""
        counts: dict[str, tuple[int, float]] = {}
        for ref, (outcome, selector_seconds) in self.outcome_of.items():
            if ref not in self.lost:
                name = "failed" if ref in self.failed else outcome
                number, seconds = counts.get(name, (0, 0.0))
                counts[name] = (number + 1, seconds + selector_seconds)
        return counts

    def count_copies(self) -> Counter[int]:
        """Return how many copies of this batch each destination (by index) received."""
        refused = {(error.ref, error.destination) for error in self.copy_errors}
        return Counter(
            copy.destination
            for copy in self.copies
            if copy.destination != FALLBACK_DESTINATION and copy.ref not in self.lost
            and (copy.ref, copy.destination) not in refused
        )  # fmt: skip


def _local_copy(element: TakenElement, delivery: Delivery, mark: str, queue: str) -> LocalCopy:
    if delivery.is_plain:
        return LocalCopy(element.ref, delivery.destination, mark, queue)
    body = None if delivery.body is UNCHANGED else EncodedBody.of(delivery.body)
    return LocalCopy(
        ref=element.ref,
        destination=delivery.destination,
        mark=mark,
        queue=queue,
        headers=None if delivery.headers is None else _json(delivery.headers),
        body=None if body is None else body.text,
        enc=None if body is None else body.enc,
        mature=_mature(delivery, element.now),
        tries=delivery.tries,
    )


def _json(headers: dict[str, Any]) -> str:
    text = json.dumps(headers, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # UTF-8 cannot represent lone surrogates. Raise UnicodeEncodeError now: only this copy fails.
    text.encode()
    return text


def _mature(delivery: Delivery, now: datetime) -> datetime | None:
    if delivery.mature is not None:
        return _EPOCH + timedelta(seconds=delivery.mature)
    return None if delivery.delay is None else now + timedelta(seconds=delivery.delay)
