"""Stored exchanges: rows to definitions and back, and what the loops make of them."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import QuerySet

from psqlmessages.conf import get_settings
from psqlmessages.exchanges.errors import SelectorError
from psqlmessages.exchanges.messages import Graphed, Place, Target
from psqlmessages.exchanges.selector import Selector
from psqlmessages.graph.entries import (
    DefinedDestination,
    DefinedExchange,
    Fault,
    MalformedExchanges,
)
from psqlmessages.models import Destination, Exchange, ExchangeCount


class ExchangeExists(Exception):
    """An exchange of this name is there."""


def rows(using: str = DEFAULT_DB_ALIAS) -> QuerySet[Exchange]:
    """Return all exchanges with their destinations, which takes two queries."""
    return Exchange.objects.using(using).prefetch_related("destinations")


def present(using: str = DEFAULT_DB_ALIAS) -> tuple[DefinedExchange, ...]:
    """Read the definitions of all exchanges, by name."""
    return tuple(definition(row) for row in rows(using))


def definition(row: Exchange) -> DefinedExchange:
    """Return the definition that a row and those of its destinations hold."""
    return DefinedExchange(
        row.name,
        Place(row.source_namespace, row.source_queue),
        tuple(
            DefinedDestination(Place(target.namespace, target.queue), target.selector)
            for target in row.destinations.all()
        ),
        row.parallel,
        row.wsize,
        row.reserve,
    )


def compiled(exchange: Exchange | DefinedExchange) -> Graphed:
    """Return what `route` takes; raise MalformedExchanges where a selector is none (any more)."""
    known = definition(exchange) if isinstance(exchange, Exchange) else exchange
    faults, targets = [], []
    for position, destination in enumerate(known.destinations):
        try:
            selector = Selector.of(destination.selector)
        except SelectorError as error:
            faults.append(Fault(("dst", position, "selector"), error.text))
            continue
        targets.append(Target(destination.place, selector))
    if faults:
        raise MalformedExchanges([fault.under("exchanges", known.name) for fault in faults])
    return Graphed(
        name=known.name,
        source=known.source,
        targets=tuple(targets),
        parallel=known.parallel,
        wsize=known.wsize,
        reserve=known.reserve,
        max_hops=get_settings().MAX_HOPS,
    )


def put(
    exchange: DefinedExchange, *, replace: bool = False, using: str = DEFAULT_DB_ALIAS
) -> Exchange:
    """Store a checked definition; raise ExchangeExists where one is there, unless `replace`.

    One that is replaced goes on running, or stays stopped.
    """
    with transaction.atomic(using=using):
        lock(using)
        if not replace and Exchange.objects.using(using).filter(name=exchange.name).exists():
            raise ExchangeExists(exchange.name)
        return write(exchange, using)


def write(exchange: DefinedExchange, using: str) -> Exchange:
    """Make rows what the definition says, within a transaction that has taken the lock."""
    row, _ = Exchange.objects.using(using).update_or_create(
        name=exchange.name,
        defaults={
            "source_namespace": exchange.source.namespace,
            "source_queue": exchange.source.queue,
            "parallel": exchange.parallel,
            "wsize": exchange.wsize,
            "reserve": exchange.reserve,
        },
    )
    destinations = Destination.objects.using(using)
    destinations.filter(exchange=row).delete()
    destinations.bulk_create(
        Destination(
            exchange=row,
            position=position,
            namespace=target.place.namespace,
            queue=target.place.queue,
            selector=target.selector,
        )
        for position, target in enumerate(exchange.destinations)
    )
    return row


def set_running(name: str, is_running: bool, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Start or stop an exchange; return False where it was so already.

    Raises Exchange.DoesNotExist.
    """
    with transaction.atomic(using=using):
        row = Exchange.objects.using(using).select_for_update().get(name=name)
        if row.is_running == is_running:
            return False
        row.is_running = is_running
        row.save(using=using, update_fields=["is_running", "changed_at"])
    return True


def delete(names: Iterable[str], using: str = DEFAULT_DB_ALIAS) -> set[str]:
    """Remove exchanges with what was counted of them; return the names that were there."""
    with transaction.atomic(using=using):
        # A loop that adds a count meanwhile waits for this lock, and then finds no exchange.
        found = Exchange.objects.using(using).select_for_update().filter(name__in=list(names))
        keys = {row.pk: row.name for row in found}
        ExchangeCount.objects.using(using).filter(exchange__in=keys).delete()
        Destination.objects.using(using).filter(exchange__in=keys).delete()
        Exchange.objects.using(using).filter(pk__in=keys).delete()
    return set(keys.values())


def lock(using: str) -> None:
    """Keep others from changing exchanges until the transaction ends; reading goes on."""
    connection = connections[using]
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(Exchange._meta.db_table)
        cursor.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
