"""Ledgers: the tallies of a process, written down every two seconds, and added up at last."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from itertools import zip_longest
from typing import Final
from uuid import UUID, uuid4

from django.db import DEFAULT_DB_ALIAS, transaction
from django.db.models import Q
from django.db.models.functions import Now

from psqlmessages.graph.tallies import Tally
from psqlmessages.models import Exchange, ExchangeCount

# The rows of workers that are gone are added up here.
FORMER: Final = UUID(int=0)
FORGOTTEN_AFTER: Final = timedelta(days=1)
_UNIQUE: Final = ("exchange", "worker", "outcome", "destination")
_COUNTED: Final = ("count", "seconds", "buckets", "selector_seconds", "seen_at")


class Ledger:
    """The tallies of a process by exchange (its primary key), and its rows in the database."""

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self._using = using
        self.worker = uuid4()
        self.tallies: dict[int, Tally] = {}

    def of(self, exchange: int) -> Tally:
        """Return the tally of an exchange."""
        return self.tallies.setdefault(exchange, Tally())

    @property
    def elements(self) -> int:
        """How many elements were taken and finished, one way or another."""
        return sum(tally.elements for tally in self.tallies.values())

    def unwritten(self, running: Collection[int]) -> list[ExchangeCount]:
        """Return the rows that changed, and for exchanges that run the sign of life."""
        return [
            ExchangeCount(
                exchange_id=key,
                worker=self.worker,
                outcome=outcome,
                destination=destination,
                count=entry.count,
                seconds=entry.seconds,
                buckets=list(entry.buckets),
                selector_seconds=entry.selector_seconds,
                seen_at=Now(),
            )
            for key, tally in self.tallies.items()
            for outcome, destination, entry in tally.unwritten(is_running=key in running)
        ]

    def write(self, rows: list[ExchangeCount]) -> list[ExchangeCount]:
        """Write rows of exchanges that are there, and return them.

        They hold totals: writing them twice is as good as once.
        """
        counts, exchanges = ExchangeCount.objects.using(self._using), Exchange.objects
        wanted = {row.exchange_id for row in rows}
        there = set(exchanges.using(self._using).filter(pk__in=wanted).values_list("pk", flat=True))
        kept = [row for row in rows if row.exchange_id in there]
        counts.bulk_create(
            kept, update_conflicts=True, unique_fields=_UNIQUE, update_fields=_COUNTED
        )
        return kept

    def wrote(self, rows: list[ExchangeCount]) -> None:
        """Note what has been written."""
        for row in rows:
            if (tally := self.tallies.get(row.exchange_id)) is not None:
                tally.wrote(row.outcome, row.destination, row.count)

    def add_up_former(self) -> int:
        """Add the rows of workers not seen for a day to one; return how many those were."""
        counts = ExchangeCount.objects.using(self._using)
        with transaction.atomic(using=self._using):
            former = list(
                counts.select_for_update(skip_locked=True, of=("self",))
                .filter(~Q(worker=FORMER), seen_at__lt=Now() - FORGOTTEN_AFTER)
                .order_by("pk")
            )
            for row in former:
                total, _ = counts.select_for_update().get_or_create(
                    exchange_id=row.exchange_id,
                    worker=FORMER,
                    outcome=row.outcome,
                    destination=row.destination,
                    defaults={"count": 0, "seconds": 0, "buckets": [], "selector_seconds": 0},
                )
                _add(total, row)
                total.save(using=self._using)
            counts.filter(pk__in=[row.pk for row in former]).delete()
        return len(former)


def _add(total: ExchangeCount, row: ExchangeCount) -> None:
    total.count += row.count
    total.seconds += row.seconds
    total.selector_seconds += row.selector_seconds
    pairs = zip_longest(total.buckets, row.buckets, fillvalue=0)
    total.buckets = [one + other for one, other in pairs]
    total.seen_at = max(total.seen_at, row.seen_at)
