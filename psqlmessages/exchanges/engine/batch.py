"""A batch of elements: plan, routing outcomes, copies. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, NamedTuple

from psqlmessages.exchanges.model import (
    HOP_HEADER,
    UNCHANGED,
    CompiledExchange,
    CopyToPush,
    QueueRef,
    RoutingResult,
    SelectorInput,
)
from psqlmessages.exchanges.routing import RouteCache, needs_body, route
from psqlmessages.wire import EncodedBody, MalformedPayload, decode

# Limit of one call of `deliver`.
_MOST_COPIES: Final = 65_536


class DeliveryMode(Enum):
    """How elements are taken and delivered.

    WITHIN: in one transaction, if all queues are in one database. If copies go to other databases,
    an element is either RESERVED until all copies are delivered, or POPPED: then a copy that cannot
    be delivered is lost.
    """

    WITHIN = "within"
    RESERVED = "reserved"
    POPPED = "popped"


@dataclass(frozen=True)
class ExchangePlan:
    """Plan for the consumers of an exchange.

    ``names`` identify the targets by their place and, among targets with the same place, by a
    number. They stay the same when targets are added, removed or reordered. ``marks`` are stored
    in an element when the copies for the targets have been made.
    """

    exchange: CompiledExchange
    flow: DeliveryMode
    names: tuple[str, ...]
    marks: tuple[str, ...]
    wants_body: bool
    loops: int
    batch: int
    shortcut: RouteCache | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, exchange: CompiledExchange) -> ExchangePlan:
        """Plan the consumers of an exchange."""
        queues = [target.place for target in exchange.targets]
        is_within = all(exchange.source.namespace == queue.namespace for queue in queues)
        taking = DeliveryMode.RESERVED if exchange.reserve else DeliveryMode.POPPED
        loops = min(exchange.parallel, exchange.wsize)
        seen: Counter[QueueRef] = Counter()
        names = []
        for queue in queues:
            names.append(f"{queue}/{seen[queue]}")
            seen[queue] += 1
        return cls(
            exchange=exchange,
            flow=DeliveryMode.WITHIN if is_within else taking,
            names=tuple(names),
            marks=tuple(f"{exchange.name}/{name}" for name in names),
            wants_body=needs_body(exchange),
            loops=loops,
            batch=min(exchange.wsize // loops, _MOST_COPIES // max(len(exchange.targets), 1)),
            shortcut=RouteCache.of(exchange),
        )

    @property
    def ident(self) -> str:
        """The node name of the exchange."""
        return f"exchange.{self.exchange.name}"

    @property
    def fetches_body(self) -> bool:
        """Whether this process reads bodies: for selectors, or to copy them to other databases."""
        return self.wants_body or self.flow is not DeliveryMode.WITHIN

    @property
    def namespaces(self) -> set[str]:
        """The namespaces of the source and of all targets."""
        queues = (self.exchange.source, *(target.place for target in self.exchange.targets))
        return {queue.namespace for queue in queues}

    def key(self, target: int, element: int, pushed_at: int) -> str:
        """Return the key of a copy in another database: a second push with this key adds nothing.

        ``pushed_at`` is in microseconds. It is needed because a recreated database may reuse ids.
        """
        nth = self.names[target].rpartition("/")[2]
        return f"{self.exchange.name}.{element}.{pushed_at}.{nth}"


# Batches: elements that were taken together, and their copies. Pure.

_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Queues for elements that no destination takes.
_ASIDE = {"no_route": "__no_route__", "too_many_hops": "__too_many_hops__"}


class TakenElement(NamedTuple):
    """An element from `take` or `reserve`. ``ref``: its id or lease; ``now``: the server's time."""

    ref: str
    id: int
    body: str | None
    enc: str | None
    headers: dict[str, Any]
    tries: int
    hops: int
    pushed_at: datetime
    delivered: list[str] | None
    now: datetime


class LocalCopy(NamedTuple):
    """A copy in the source's database. Values that equal those of the element are None."""

    ref: str
    target: int
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
    target: int
    mark: str
    queue: str
    headers: str
    body: str
    enc: str | None
    delay: float | None
    mature: datetime | None
    tries: int
    key: str


@dataclass(slots=True)
class RoutingOutcome:
    """Outcome of `route` for one element, and the time of its selectors."""

    outcome: str
    selector_seconds: float


class CopyError(NamedTuple):
    """A copy that was not made: its element, its target and the reason."""

    ref: str
    target: int
    why: str


@dataclass(slots=True)
class RoutedBatch:
    """Elements that were taken together: their outcomes, copies and errors."""

    plan: ExchangePlan
    outcome_of: dict[str, RoutingOutcome] = field(default_factory=dict)
    copies: list[LocalCopy] = field(default_factory=list)
    remote: dict[str, list[RemoteCopy]] = field(default_factory=dict)
    copy_errors: list[CopyError] = field(default_factory=list)
    selector_errors: list[tuple[int, str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def add(self, taken: TakenElement) -> None:
        """Route an element, and add its copies."""
        shortcut = self.plan.shortcut
        deliveries = shortcut.deliveries(taken.headers) if shortcut is not None else None
        if deliveries is None:
            routed = self._routed(taken)
            if shortcut is not None:
                shortcut.keep(taken.headers, routed)
            deliveries = routed.deliveries
            outcome = RoutingOutcome(routed.outcome, self._seconds(routed))
        else:
            outcome = RoutingOutcome("ok" if deliveries else "no_route", 0.0)
        self.outcome_of[taken.ref] = outcome
        if (aside := _ASIDE.get(outcome.outcome)) is not None:
            mark = f"{self.plan.exchange.name}/{aside}"
            self.copies.append(LocalCopy(taken.ref, -1, mark, aside))
        for delivery in deliveries:
            self._deliver(taken, delivery)

    def _routed(self, taken: TakenElement) -> RoutingResult:
        message = SelectorInput(
            body=self._body(taken),
            headers=dict(taken.headers),
            id=taken.id,
            tries=taken.tries,
            hops=taken.hops,
            queue=self.plan.exchange.source.queue,
            ns=self.plan.exchange.source.namespace,
        )
        return route(self.plan.exchange, message, now=taken.now)

    def fail_unrouted(self, taken: TakenElement) -> None:
        """Mark an element as failed without routing it."""
        self.outcome_of[taken.ref] = RoutingOutcome("ok", 0.0)
        self.failed.add(taken.ref)

    def _body(self, taken: TakenElement) -> Any:
        if not self.plan.wants_body or taken.body is None:
            return None
        try:
            return decode(taken.body, taken.enc)
        except MalformedPayload:
            # The stored body does not match its encoding: selectors see the text.
            return taken.body

    def _seconds(self, routed: RoutingResult) -> float:
        seconds = 0.0
        for verdict in routed.verdicts:
            seconds += verdict.seconds
            if verdict.error is not None:
                self.selector_errors.append((verdict.target, verdict.error))
        return seconds

    def _deliver(self, taken: TakenElement, delivery: CopyToPush) -> None:
        mark = self.plan.marks[delivery.target]
        if taken.delivered and mark in taken.delivered:
            return
        place = self.plan.exchange.targets[delivery.target].place
        try:
            if place.namespace == self.plan.exchange.source.namespace:
                self.copies.append(self._copy(taken, delivery, mark, place.queue))
            else:
                copy = self._remote_copy(taken, delivery, mark, place.queue)
                self.remote.setdefault(place.namespace, []).append(copy)
        except (TypeError, ValueError, OverflowError) as error:
            self.refuse(taken.ref, delivery.target, str(error))
            self.failed.add(taken.ref)

    def _copy(self, taken: TakenElement, delivery: CopyToPush, mark: str, queue: str) -> LocalCopy:
        if delivery.is_plain:
            return LocalCopy(taken.ref, delivery.target, mark, queue)
        body = None if delivery.body is UNCHANGED else EncodedBody.of(delivery.body)
        return LocalCopy(
            ref=taken.ref,
            target=delivery.target,
            mark=mark,
            queue=queue,
            headers=None if delivery.headers is None else _json(delivery.headers),
            body=None if body is None else body.text,
            enc=None if body is None else body.enc,
            mature=_mature(delivery, taken.now),
            tries=delivery.tries,
        )

    def _remote_copy(
        self, taken: TakenElement, delivery: CopyToPush, mark: str, queue: str
    ) -> RemoteCopy:
        if delivery.body is UNCHANGED:
            body = EncodedBody(taken.body or "", taken.enc)
        else:
            body = EncodedBody.of(delivery.body)
        headers = delivery.headers
        if headers is None:
            headers = {**taken.headers, HOP_HEADER: taken.hops + 1}
        pushed_at = (taken.pushed_at - _EPOCH) // _MICROSECOND
        return RemoteCopy(
            ref=taken.ref,
            target=delivery.target,
            mark=mark,
            queue=queue,
            headers=_json(headers),
            body=body.text,
            enc=body.enc,
            delay=delivery.delay if delivery.mature is None else None,
            mature=_mature(delivery, taken.now) if delivery.mature is not None else None,
            tries=delivery.tries,
            key=self.plan.key(delivery.target, taken.id, pushed_at),
        )

    # Results

    def refuse(self, ref: str, target: int, why: str) -> None:
        """Record a copy that was not made."""
        self.copy_errors.append(CopyError(ref, target, why))

    def pushed(self, copies: Iterable[RemoteCopy], errors: Sequence[str | None]) -> None:
        """Record which copies another database has accepted, and the errors of the others."""
        for copy, problem in zip(copies, errors, strict=True):
            if problem is None:
                # If the element fails because of another copy, its mark prevents a second push.
                self.copies.append(LocalCopy(copy.ref, copy.target, copy.mark, None))
            else:
                self.refuse(copy.ref, copy.target, problem)
                self.failed.add(copy.ref)

    def acknowledge(self, lost: Iterable[str], refused: Iterable[Sequence[Any]]) -> None:
        """Record the answer of the source's database."""
        self.lost.update(lost)
        targets = {(copy.mark, copy.ref): copy.target for copy in self.copies} if refused else {}
        for mark, ref, why, *_ in refused:
            self.refuse(ref, targets[mark, ref], why)
            self.failed.add(ref)

    def outcomes(self) -> dict[str, tuple[int, float]]:
        """Return the number of elements and the time of their selectors, by outcome."""
        found: dict[str, tuple[int, float]] = {}
        for ref, outcome in self.outcome_of.items():
            if ref not in self.lost:
                name = "failed" if ref in self.failed else outcome.outcome
                number, seconds = found.get(name, (0, 0.0))
                found[name] = (number + 1, seconds + outcome.selector_seconds)
        return found

    def copied(self) -> Counter[int]:
        """Return how many copies each target received."""
        refused = {(error.ref, error.target) for error in self.copy_errors}
        return Counter(
            copy.target
            for copy in self.copies
            if copy.target >= 0 and copy.ref not in self.lost
            and (copy.ref, copy.target) not in refused
        )  # fmt: skip


def _json(headers: dict[str, Any]) -> str:
    text = json.dumps(headers, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Lone surrogates, which UTF-8 cannot represent, raise here, so that only this copy fails.
    text.encode()
    return text


def _mature(delivery: CopyToPush, now: datetime) -> datetime | None:
    if delivery.mature is not None:
        return _EPOCH + timedelta(seconds=delivery.mature)
    return None if delivery.delay is None else now + timedelta(seconds=delivery.delay)
