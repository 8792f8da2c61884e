"""Stored exchanges: conversion of rows to definitions, changes, and loading a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import Prefetch, QuerySet

from psqlmessages.conf import get_settings
from psqlmessages.exchanges.model import (
    CompiledDestination,
    CompiledExchange,
    QueueRef,
    SelectorError,
    SelectorsUnavailable,
)
from psqlmessages.exchanges.selectors import Selector
from psqlmessages.exchanges.store.definitions import (
    DefinedDestination,
    DefinedExchange,
    ExchangeError,
    MalformedExchanges,
    Path,
    format_path,
    to_document,
)
from psqlmessages.exchanges.store.permissions import MissingRule, add_missing_rules
from psqlmessages.models import Destination, Exchange


class ExchangeExists(Exception):
    """An exchange with this name exists already."""


def rows(using: str = DEFAULT_DB_ALIAS) -> QuerySet[Exchange]:
    """Return a query set of all exchanges with their destinations. It makes two queries."""
    # Without its own query set, a router of the project could read the destinations elsewhere.
    destinations = Prefetch("destinations", Destination.objects.using(using))
    return Exchange.objects.using(using).prefetch_related(destinations)


def read_all(using: str = DEFAULT_DB_ALIAS) -> tuple[DefinedExchange, ...]:
    """Read the definitions of all exchanges, ordered by name."""
    return tuple(to_definition(row) for row in rows(using))


def to_definition(row: Exchange) -> DefinedExchange:
    """Return the definition in a row and its destinations."""
    return DefinedExchange(
        row.name,
        QueueRef(row.source_namespace, row.source_queue),
        tuple(
            DefinedDestination(QueueRef(each.namespace, each.queue), each.selector)
            for each in row.destinations.all()
        ),
        row.parallel,
        row.wsize,
        row.reserve,
        row.no_route_action,
        row.is_running,
    )


def compile_exchange(exchange: Exchange | DefinedExchange) -> CompiledExchange:
    """Compile an exchange for `route`; raise MalformedExchanges."""
    if isinstance(exchange, Exchange):
        exchange = to_definition(exchange)
    errors, destinations = [], []
    for position, destination in enumerate(exchange.destinations):
        try:
            selector = Selector.of(destination.selector)
        except (SelectorError, SelectorsUnavailable) as error:
            path = ("exchanges", exchange.name, "dst", position, "selector")
            errors.append(ExchangeError(path, str(error)))
        else:
            destinations.append(CompiledDestination(destination.queue, selector))
    if errors:
        raise MalformedExchanges(errors)
    return CompiledExchange(
        name=exchange.name,
        source=exchange.source,
        destinations=tuple(destinations),
        parallel=exchange.parallel,
        wsize=exchange.wsize,
        reserve=exchange.reserve,
        no_route=exchange.no_route,
        max_hops=get_settings().MAX_HOPS,
    )


def store(
    exchange: DefinedExchange, *, replace: bool = False, using: str = DEFAULT_DB_ALIAS
) -> Exchange:
    """Store a valid definition; raise ExchangeExists if the name is used, unless `replace`.

    Replacing an exchange does not change whether it runs.
    """
    with transaction.atomic(using=using):
        lock(using)
        if not replace and Exchange.objects.using(using).filter(name=exchange.name).exists():
            raise ExchangeExists(exchange.name)
        return write_rows(exchange, using)


def write_rows(exchange: DefinedExchange, using: str) -> Exchange:
    """Write a definition to its rows; the transaction must hold `lock`."""
    values = {
        "source_namespace": exchange.source.namespace,
        "source_queue": exchange.source.name,
        "parallel": exchange.parallel,
        "wsize": exchange.wsize,
        "reserve": exchange.reserve,
        "no_route_action": exchange.no_route,
    }
    row, _ = Exchange.objects.using(using).update_or_create(
        name=exchange.name,
        defaults=values,
        create_defaults={**values, "is_running": exchange.starts_running},
    )
    destinations = Destination.objects.using(using)
    destinations.filter(exchange=row).delete()
    destinations.bulk_create(
        Destination(
            exchange=row,
            position=position,
            namespace=destination.queue.namespace,
            queue=destination.queue.name,
            selector=destination.selector,
        )
        for position, destination in enumerate(exchange.destinations)
    )
    return row


def set_running(name: str, is_running: bool, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Start or stop an exchange; return whether its state changed, or raise DoesNotExist."""
    with transaction.atomic(using=using):
        row = Exchange.objects.using(using).select_for_update().get(name=name)
        if row.is_running == is_running:
            return False
        row.is_running = is_running
        row.save(using=using, update_fields=["is_running", "changed_at"])
    return True


def delete(names: Iterable[str], using: str = DEFAULT_DB_ALIAS) -> set[str]:
    """Delete the exchanges with these names, and their counters; return the deleted names."""
    with transaction.atomic(using=using):
        # A worker that writes counters now waits for this lock, and then finds no exchange.
        rows = Exchange.objects.using(using).select_for_update().filter(name__in=list(names))
        keys = {row.pk: row.name for row in rows}
        Exchange.objects.using(using).filter(pk__in=keys).delete()
    return set(keys.values())


def lock(using: str) -> None:
    """Block other changes of exchanges, but no reads, until the transaction ends."""
    connection = connections[using]
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(Exchange._meta.db_table)
        cursor.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")


# Loading a file: the difference between the file and the stored exchanges, and its application.


class ExchangesChanged(Exception):
    """The exchanges have changed since the difference was computed."""


@dataclass(frozen=True)
class ExchangeDifference:
    """Difference between stored and wanted exchanges. ``changed`` holds pairs (old, new)."""

    added: tuple[DefinedExchange, ...] = ()
    changed: tuple[tuple[DefinedExchange, DefinedExchange], ...] = ()
    unchanged: tuple[DefinedExchange, ...] = ()
    removed: tuple[DefinedExchange, ...] = ()

    def summary(self) -> str:
        """Return the number of exchanges for each kind of change, as text."""
        return (
            f"{len(self.added):,} added, {len(self.changed):,} changed,"
            f" {len(self.unchanged):,} unchanged, {len(self.removed):,} removed"
        )

    def describe(self) -> list[str]:
        """Return a line for each exchange that changes, and for each changed field."""
        lines = [
            f"+ {exchange}{'' if exchange.starts_running else ' (stopped)'}"
            for exchange in self.added
        ]
        for old, new in self.changed:
            lines.append(f"~ {new}")
            lines += [
                f"    {format_path(path)}: {before} -> {after}"
                for path, before, after in _changes((), old.to_document(), new.to_document())
            ]
        return lines + [f"- {exchange}" for exchange in self.removed]


def compare(
    stored: Iterable[DefinedExchange],
    wanted: Iterable[DefinedExchange],
    *,
    replace_all: bool = False,
) -> ExchangeDifference:
    """Compare definitions. With `replace_all`, exchanges that are not in `wanted` are removed."""
    old = {exchange.name: exchange for exchange in stored}
    new = {exchange.name: exchange for exchange in wanted}
    pairs = [(old[name], exchange) for name, exchange in new.items() if name in old]
    return ExchangeDifference(
        added=tuple(exchange for name, exchange in new.items() if name not in old),
        changed=tuple((before, after) for before, after in pairs if before != after),
        unchanged=tuple(after for before, after in pairs if before == after),
        removed=tuple(
            exchange for name, exchange in old.items() if replace_all and name not in new
        ),
    )


def fingerprint(exchanges: Iterable[DefinedExchange]) -> str:
    """Return a hash of definitions, which ignores whether the exchanges run."""
    return hashlib.sha256(json.dumps(to_document(exchanges)).encode()).hexdigest()


def apply(
    difference: ExchangeDifference,
    expected_fingerprint: str,
    using: str = DEFAULT_DB_ALIAS,
    *,
    with_rules: bool = False,
) -> list[MissingRule]:
    """Apply a difference in one transaction.

    Raise ExchangesChanged if the stored exchanges no longer have `expected_fingerprint`.
    `with_rules` also adds the rules that are missing in this database, as `add_missing_rules` does.
    Return the added rules.
    """
    added_rules: list[MissingRule] = []
    to_write = [*difference.added, *(new for _, new in difference.changed)]
    with transaction.atomic(using=using):
        lock(using)
        if fingerprint(read_all(using)) != expected_fingerprint:
            raise ExchangesChanged
        delete((exchange.name for exchange in difference.removed), using)
        for exchange in to_write:
            write_rows(exchange, using)
        if with_rules:
            for exchange in (*to_write, *difference.unchanged):
                added_rules += add_missing_rules(exchange, using)
    return added_rules


def _changes(path: Path, old: Any, new: Any) -> Iterator[tuple[Path, str, str]]:
    """Yield the path of each difference, and the old and the new value as text."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _changes((*path, key), old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list):
        for index, (before, after) in enumerate(zip_longest(old, new)):
            yield from _changes((*path, index), before, after)
    elif old != new:
        yield path, _as_text(old), _as_text(new)


def _as_text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)
