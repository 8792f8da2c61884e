"""Changes: what a file would change of the exchanges there are, and doing it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db import DEFAULT_DB_ALIAS, transaction

from psqlmessages.graph import stored
from psqlmessages.graph.definitions import as_document
from psqlmessages.graph.entries import DefinedExchange, written
from psqlmessages.graph.rights import MissingRule, add_missing_rules


class ExchangesChanged(Exception):
    """The exchanges are no longer those that the difference was computed from."""


@dataclass(frozen=True)
class Difference:
    """What is to be done, by name; ``changed`` holds pairs of before and after."""

    added: tuple[DefinedExchange, ...] = ()
    changed: tuple[tuple[DefinedExchange, DefinedExchange], ...] = ()
    unchanged: tuple[DefinedExchange, ...] = ()
    removed: tuple[DefinedExchange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def summary(self) -> str:
        """Say it in numbers."""
        return (
            f"{len(self.added):,} added, {len(self.changed):,} changed,"
            f" {len(self.unchanged):,} unchanged, {len(self.removed):,} removed"
        )

    def lines(self) -> list[str]:
        """Say it in a line per exchange, and one per field that changes."""
        lines = [f"+ {exchange}" for exchange in self.added]
        for old, new in self.changed:
            lines.append(f"~ {new}")
            lines += [
                f"    {written(where)}: {before} -> {after}"
                for where, before, after in fields_changed(old, new)
            ]
        return lines + [f"- {exchange}" for exchange in self.removed]


def difference(
    now: Iterable[DefinedExchange], wanted: Iterable[DefinedExchange], *, replace_all: bool = False
) -> Difference:
    """Compare. What `wanted` does not name stays, or with `replace_all` goes."""
    there = {exchange.name: exchange for exchange in now}
    asked = {exchange.name: exchange for exchange in wanted}
    both = [(there[name], exchange) for name, exchange in asked.items() if name in there]
    return Difference(
        tuple(exchange for name, exchange in asked.items() if name not in there),
        tuple((old, new) for old, new in both if old != new),
        tuple(new for old, new in both if old == new),
        tuple(exchange for name, exchange in there.items() if replace_all and name not in asked),
    )


def fields_changed(
    old: DefinedExchange, new: DefinedExchange
) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """Yield where two definitions differ, and both values as JSON; "nothing" where one has none."""
    yield from _differing((), old.as_document(), new.as_document())


def fingerprint(exchanges: Iterable[DefinedExchange]) -> str:
    """Return a text that is the same for equal definitions, and for no others."""
    return hashlib.sha256(json.dumps(as_document(exchanges)).encode()).hexdigest()


def apply(
    todo: Difference, shown: str, using: str = DEFAULT_DB_ALIAS, *, with_rules: bool = False
) -> list[MissingRule]:
    """Do it, in one transaction; raise ExchangesChanged where `shown` is not the fingerprint.

    `with_rules` also adds the rules that are missing in this database, and returns them.
    Raises what PostgreSQL raises where rules cannot be changed now.
    """
    added: list[MissingRule] = []
    with transaction.atomic(using=using):
        stored.lock(using)
        if fingerprint(stored.present(using)) != shown:
            raise ExchangesChanged
        stored.delete((exchange.name for exchange in todo.removed), using)
        for exchange in (*todo.added, *(new for _, new in todo.changed)):
            stored.write(exchange, using)
        if with_rules:
            for exchange in (*todo.added, *(new for _, new in todo.changed), *todo.unchanged):
                added += add_missing_rules(exchange, using)
    return added


def _differing(
    where: tuple[str | int, ...], old: Any, new: Any
) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
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
