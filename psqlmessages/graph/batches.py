"""Batches: elements that were taken together, and the copies that come of them. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from psqlmessages.exchanges.messages import HOP_HEADER, UNCHANGED, Delivery, Message, Routed
from psqlmessages.exchanges.route import route
from psqlmessages.graph.plans import Plan
from psqlmessages.wire import Body, MalformedPayload, decode

_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Where an element goes that no destination takes.
_ASIDE = {"no_route": "__no_route__", "too_many_hops": "__too_many_hops__"}


class Taken(NamedTuple):
    """An element as it was taken. ``ref`` is its id or its lease; ``now`` the server's time."""

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


class Copy(NamedTuple):
    """A copy to push. ``headers``, ``body`` and ``mature`` are None where they are the source's."""

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
    """A copy for another database, with all that it holds."""

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
class Fate:
    """What became of one element: what `route` said, and how long its selectors took."""

    outcome: str
    selector_seconds: float


class Mishap(NamedTuple):
    """A copy that cannot be made: of which element, for which target, and why."""

    ref: str
    target: int
    why: str


@dataclass(slots=True)
class Batch:
    """What is to be done for elements that were taken together."""

    plan: Plan
    fates: dict[str, Fate] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    remote: dict[str, list[RemoteCopy]] = field(default_factory=dict)
    mishaps: list[Mishap] = field(default_factory=list)
    selector_errors: list[tuple[int, str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def add(self, taken: Taken) -> None:
        """Route an element, and put down its copies."""
        shortcut = self.plan.shortcut
        deliveries = shortcut.deliveries(taken.headers) if shortcut is not None else None
        if deliveries is None:
            routed = self._routed(taken)
            if shortcut is not None:
                shortcut.keep(taken.headers, routed)
            deliveries = routed.deliveries
            fate = Fate(routed.outcome, self._seconds(routed))
        else:
            fate = Fate("ok" if deliveries else "no_route", 0.0)
        self.fates[taken.ref] = fate
        if (aside := _ASIDE.get(fate.outcome)) is not None:
            mark = f"{self.plan.graphed.name}/{aside}"
            self.copies.append(Copy(taken.ref, -1, mark, aside))
        for delivery in deliveries:
            self._deliver(taken, delivery)

    def _routed(self, taken: Taken) -> Routed:
        message = Message(
            body=self._body(taken),
            headers=dict(taken.headers),
            id=taken.id,
            tries=taken.tries,
            hops=taken.hops,
            queue=self.plan.graphed.source.queue,
            ns=self.plan.graphed.source.namespace,
        )
        return route(self.plan.graphed, message, now=taken.now)

    def give_back(self, taken: Taken) -> None:
        """Let an element fail without routing it."""
        self.fates[taken.ref] = Fate("ok", 0.0)
        self.failed.add(taken.ref)

    def _body(self, taken: Taken) -> Any:
        if not self.plan.wants_body or taken.body is None:
            return None
        try:
            return decode(taken.body, taken.enc)
        except MalformedPayload:
            # It was stored as what it is not: selectors see the text.
            return taken.body

    def _seconds(self, routed: Routed) -> float:
        seconds = 0.0
        for verdict in routed.verdicts:
            seconds += verdict.seconds
            if verdict.error is not None:
                self.selector_errors.append((verdict.target, verdict.error))
        return seconds

    def _deliver(self, taken: Taken, delivery: Delivery) -> None:
        mark = self.plan.marks[delivery.target]
        if taken.delivered and mark in taken.delivered:
            return
        place = self.plan.graphed.targets[delivery.target].place
        try:
            if place.namespace == self.plan.graphed.source.namespace:
                self.copies.append(self._copy(taken, delivery, mark, place.queue))
            else:
                copy = self._remote_copy(taken, delivery, mark, place.queue)
                self.remote.setdefault(place.namespace, []).append(copy)
        except (TypeError, ValueError, OverflowError) as error:
            self.refuse(taken.ref, delivery.target, str(error))
            self.failed.add(taken.ref)

    def _copy(self, taken: Taken, delivery: Delivery, mark: str, queue: str) -> Copy:
        if delivery.is_plain:
            return Copy(taken.ref, delivery.target, mark, queue)
        body = None if delivery.body is UNCHANGED else Body.of(delivery.body)
        return Copy(
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

    def _remote_copy(self, taken: Taken, delivery: Delivery, mark: str, queue: str) -> RemoteCopy:
        is_same = delivery.body is UNCHANGED
        body = Body(taken.body or "", taken.enc) if is_same else Body.of(delivery.body)
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

    # What came of it

    def refuse(self, ref: str, target: int, why: str) -> None:
        """Note a copy that was not made."""
        self.mishaps.append(Mishap(ref, target, why))

    def pushed(self, copies: Iterable[RemoteCopy], faults: Sequence[str | None]) -> None:
        """Note which copies another database has got, and why not the others."""
        for copy, fault in zip(copies, faults, strict=True):
            if fault is None:
                # The element remembers it where it fails because of another.
                self.copies.append(Copy(copy.ref, copy.target, copy.mark, None))
            else:
                self.refuse(copy.ref, copy.target, fault)
                self.failed.add(copy.ref)

    def settle(self, lost: Iterable[str], refused: Iterable[Sequence[Any]]) -> None:
        """Note what the source's database has answered."""
        self.lost.update(lost)
        targets = {(copy.mark, copy.ref): copy.target for copy in self.copies} if refused else {}
        for mark, ref, why, *_ in refused:
            self.refuse(ref, targets[mark, ref], why)
            self.failed.add(ref)

    def outcomes(self) -> dict[str, tuple[int, float]]:
        """Return how many elements had each outcome, and the selectors' seconds."""
        found: dict[str, tuple[int, float]] = {}
        for ref, fate in self.fates.items():
            if ref not in self.lost:
                outcome = "failed" if ref in self.failed else fate.outcome
                number, seconds = found.get(outcome, (0, 0.0))
                found[outcome] = (number + 1, seconds + fate.selector_seconds)
        return found

    def copied(self) -> Counter[int]:
        """Return how many copies each target has got."""
        refused = {(mishap.ref, mishap.target) for mishap in self.mishaps}
        return Counter(
            copy.target
            for copy in self.copies
            if copy.target >= 0 and copy.ref not in self.lost
            and (copy.ref, copy.target) not in refused
        )  # fmt: skip


def _json(headers: dict[str, Any]) -> str:
    text = json.dumps(headers, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Lone surrogates, which UTF-8 cannot hold, raise here and concern this copy alone.
    text.encode()
    return text


def _mature(delivery: Delivery, now: datetime) -> datetime | None:
    if delivery.mature is not None:
        return _EPOCH + timedelta(seconds=delivery.mature)
    return None if delivery.delay is None else now + timedelta(seconds=delivery.delay)
