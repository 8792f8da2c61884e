"""Stored exchanges: conversion between rows and definitions, and changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import QuerySet

from psqlmessages.conf import get_settings
from psqlmessages.exchanges.model import CompiledExchange, QueueRef, RouteTarget, SelectorError
from psqlmessages.exchanges.selectors import Selector
from psqlmessages.exchanges.store.definitions import (
    DefinedDestination,
    DefinedExchange,
    ExchangeError,
    MalformedExchanges,
    as_document,
    written,
)
from psqlmessages.exchanges.store.permissions import MissingRule, add_missing_rules
from psqlmessages.models import Destination, Exchange, ExchangeCount


class ExchangeExists(Exception):
    """An exchange with this name exists already."""


def rows(using: str = DEFAULT_DB_ALIAS) -> QuerySet[Exchange]:
    """Return all exchanges with their destinations, in two queries."""
    return Exchange.objects.using(using).prefetch_related("destinations")


def present(using: str = DEFAULT_DB_ALIAS) -> tuple[DefinedExchange, ...]:
    """Read the definitions of all exchanges, ordered by name."""
    return tuple(definition(row) for row in rows(using))


def definition(row: Exchange) -> DefinedExchange:
    """Return the definition that a row and its destinations hold."""
    return DefinedExchange(
        row.name,
        QueueRef(row.source_namespace, row.source_queue),
        tuple(
            DefinedDestination(QueueRef(target.namespace, target.queue), target.selector)
            for target in row.destinations.all()
        ),
        row.parallel,
        row.wsize,
        row.reserve,
    )


def compiled(exchange: Exchange | DefinedExchange) -> CompiledExchange:
    """Compile an exchange for `route`; raise MalformedExchanges if a selector is not valid."""
    known = definition(exchange) if isinstance(exchange, Exchange) else exchange
    errors, targets = [], []
    for position, destination in enumerate(known.destinations):
        try:
            selector = Selector.of(destination.selector)
        except SelectorError as error:
            errors.append(ExchangeError(("dst", position, "selector"), error.text))
            continue
        targets.append(RouteTarget(destination.place, selector))
    if errors:
        raise MalformedExchanges([problem.under("exchanges", known.name) for problem in errors])
    return CompiledExchange(
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
    """Store a valid definition; raise ExchangeExists if the name is taken, unless `replace`.

    Replacing an exchange does not change whether it runs.
    """
    with transaction.atomic(using=using):
        lock(using)
        if not replace and Exchange.objects.using(using).filter(name=exchange.name).exists():
            raise ExchangeExists(exchange.name)
        return write(exchange, using)


def write(exchange: DefinedExchange, using: str) -> Exchange:
    """Write a definition to its rows; the transaction must hold the lock."""
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
    """Start or stop an exchange; return False if it already was in this state.

    Raise Exchange.DoesNotExist.
    """
    with transaction.atomic(using=using):
        row = Exchange.objects.using(using).select_for_update().get(name=name)
        if row.is_running == is_running:
            return False
        row.is_running = is_running
        row.save(using=using, update_fields=["is_running", "changed_at"])
    return True


def delete(names: Iterable[str], using: str = DEFAULT_DB_ALIAS) -> set[str]:
    """Delete exchanges and their counters; return the names that existed."""
    with transaction.atomic(using=using):
        # A worker that writes counters now waits for this lock, and then finds no exchange.
        found = Exchange.objects.using(using).select_for_update().filter(name__in=list(names))
        keys = {row.pk: row.name for row in found}
        ExchangeCount.objects.using(using).filter(exchange__in=keys).delete()
        Destination.objects.using(using).filter(exchange__in=keys).delete()
        Exchange.objects.using(using).filter(pk__in=keys).delete()
    return set(keys.values())


def lock(using: str) -> None:
    """Prevent other changes of exchanges until the transaction ends; do not block readers."""
    connection = connections[using]
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(Exchange._meta.db_table)
        cursor.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")


# Changes: the difference between a file and the stored exchanges, and how to apply it.


class ExchangesChanged(Exception):
    """The exchanges have changed since the difference was computed."""


@dataclass(frozen=True)
class ExchangeDifference:
    """Changes to make, by kind; ``changed`` holds pairs of the old and the new definition."""

    added: tuple[DefinedExchange, ...] = ()
    changed: tuple[tuple[DefinedExchange, DefinedExchange], ...] = ()
    unchanged: tuple[DefinedExchange, ...] = ()
    removed: tuple[DefinedExchange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def summary(self) -> str:
        """Return the number of exchanges of each kind."""
        return (
            f"{len(self.added):,} added, {len(self.changed):,} changed,"
            f" {len(self.unchanged):,} unchanged, {len(self.removed):,} removed"
        )

    def lines(self) -> list[str]:
        """Return a line per changed exchange, and one per changed field."""
        lines = [f"+ {exchange}" for exchange in self.added]
        for old, new in self.changed:
            lines.append(f"~ {new}")
            lines += [
                f"    {written(where)}: {before} -> {after}"
                for where, before, after in _differing((), old.as_document(), new.as_document())
            ]
        return lines + [f"- {exchange}" for exchange in self.removed]


def difference(
    now: Iterable[DefinedExchange], wanted: Iterable[DefinedExchange], *, replace_all: bool = False
) -> ExchangeDifference:
    """Compare definitions. Exchanges not in `wanted` stay, or are removed with `replace_all`."""
    there = {exchange.name: exchange for exchange in now}
    asked = {exchange.name: exchange for exchange in wanted}
    both = [(there[name], exchange) for name, exchange in asked.items() if name in there]
    return ExchangeDifference(
        tuple(exchange for name, exchange in asked.items() if name not in there),
        tuple((old, new) for old, new in both if old != new),
        tuple(new for old, new in both if old == new),
        tuple(exchange for name, exchange in there.items() if replace_all and name not in asked),
    )


def fingerprint(exchanges: Iterable[DefinedExchange]) -> str:
    """Return a text that is equal for equal definitions only."""
    return hashlib.sha256(json.dumps(as_document(exchanges)).encode()).hexdigest()


def apply(
    todo: ExchangeDifference, shown: str, using: str = DEFAULT_DB_ALIAS, *, with_rules: bool = False
) -> list[MissingRule]:
    """Apply a difference in one transaction; raise ExchangesChanged if it is out of date.

    `shown` is the fingerprint of the exchanges that it was computed from. `with_rules` also adds
    the rules that are missing in this database, and returns them. Raise the error of PostgreSQL
    if rules cannot be changed now.
    """
    added: list[MissingRule] = []
    with transaction.atomic(using=using):
        lock(using)
        if fingerprint(present(using)) != shown:
            raise ExchangesChanged
        delete((exchange.name for exchange in todo.removed), using)
        for exchange in (*todo.added, *(new for _, new in todo.changed)):
            write(exchange, using)
        if with_rules:
            for exchange in (*todo.added, *(new for _, new in todo.changed), *todo.unchanged):
                added += add_missing_rules(exchange, using)
    return added


def _differing(
    where: tuple[str | int, ...], old: Any, new: Any
) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """Yield the path of each difference, and both values as JSON ("nothing" if one is missing)."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differing((*where, key), old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list):
        for index in range(max(len(old), len(new))):
            before, after = (
                values[index] if index < len(values) else None for values in (old, new)
            )
            yield from _differing((*where, index), before, after)
    elif old != new:
        yield where, _as_text(old), _as_text(new)


def _as_text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)
