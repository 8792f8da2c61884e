"""Definitions: documents of exchanges, read strictly (every fault at once) and written."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, TypeVar

from django.db import DEFAULT_DB_ALIAS

from psqlmessages.exchanges.messages import Place
from psqlmessages.graph import parsing
from psqlmessages.graph.entries import (
    MAX_DESTINATIONS,
    DefinedDestination,
    DefinedExchange,
    Fault,
    MalformedExchanges,
)

_FAULTS_SHOWN = 20
CONSUMER = ("parallel", "wsize", "reserve")
EXCHANGE = ("consumer", "src", "dst")
SOURCE = ("ns", "queue")
DESTINATION = ("ns", "queue", "selector")

_Value = TypeVar("_Value", str, int, bool, list[Any], dict[str, Any])


def read(text: bytes | str) -> tuple[DefinedExchange, ...]:
    """Read YAML or JSON text; raise MalformedExchanges, or YAMLMissing."""
    try:
        document = parsing.parsed(text)
    except parsing.MalformedText as error:
        raise MalformedExchanges([Fault((), str(error))]) from error
    return validated(document)


def validated(document: Any) -> tuple[DefinedExchange, ...]:
    """Read a document as JSON gives it, of all exchanges: ``{"exchanges": {NAME: {...}}}``.

    Raises MalformedExchanges with all that is wrong.
    """
    reading = _Reading()
    whole = reading.fields(document, (), ("exchanges",), required=("exchanges",))
    entries = reading.value(whole, "exchanges", (), {})
    found = [reading.exchange(name, given, ("exchanges",)) for name, given in entries.items()]
    return reading.result(tuple(found))


def validated_exchange(name: str, document: Any) -> DefinedExchange:
    """Read the document of one exchange: ``{"consumer": ..., "src": ..., "dst": [...]}``.

    Raises MalformedExchanges with all that is wrong; its places begin within the document.
    """
    reading = _Reading()
    return reading.result(reading.exchange(name, document, ()))


def checked(exchange: DefinedExchange) -> DefinedExchange:
    """Return the exchange; raise MalformedExchanges where it cannot be."""
    if faults := list(exchange.faults()):
        raise MalformedExchanges(_shown(faults))
    return exchange


def as_document(exchanges: Iterable[DefinedExchange]) -> dict[str, Any]:
    """Write exchanges as one document, in the order of their names."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.name)
    return {"exchanges": {exchange.name: exchange.as_document() for exchange in ordered}}


class _Reading:
    """Reads values of the right types, and remembers what is wrong; a default stands in for it."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def result(self, found: Any) -> Any:
        """Return what was found, or raise MalformedExchanges."""
        if self._faults:
            raise MalformedExchanges(_shown(self._faults))
        return found

    def exchange(self, name: Any, given: Any, above: tuple[str, ...]) -> DefinedExchange:
        if not isinstance(name, str):
            self._add(above, f"The name {_short(name)} is no text: put it in quotes.")
            name = str(name)
        where = (*above, name) if above else ()
        fields = self.fields(given, where, EXCHANGE, required=("src", "dst"))
        consumer = self.fields(fields.get("consumer", {}), (*where, "consumer"), CONSUMER)
        at = (*where, "consumer")
        needed = ("queue",) if "src" in fields else ()
        source = self.fields(fields.get("src", {}), (*where, "src"), SOURCE, needed)
        targets = self.value(fields, "dst", where, [])[: MAX_DESTINATIONS + 1]
        found = DefinedExchange(
            name,
            self._place(source, (*where, "src")),
            tuple(
                self._destination(target, (*where, "dst", position))
                for position, target in enumerate(targets)
            ),
            self.value(consumer, "parallel", at, 1),
            self.value(consumer, "wsize", at, 100),
            self.value(consumer, "reserve", at, True),
        )
        self._judge(found, where)
        return found

    def fields(
        self,
        given: Any,
        where: tuple[str | int, ...],
        known: tuple[str, ...],
        required: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Return a map's known fields."""
        listed = ", ".join(known)
        if not isinstance(given, dict):
            self._add(where, f"{_short(given)} is no map of {listed}.")
            return {}
        for field in given:
            if field not in known:
                self._add((*where, str(field)), f"There is no such field; the fields are {listed}.")
        for field in required:
            if field not in given:
                self._add((*where, field), "It is missing.")
        return {field: given[field] for field in known if field in given}

    def value(
        self,
        fields: dict[str, Any],
        field: str,
        where: tuple[str | int, ...],
        default: _Value,
    ) -> _Value:
        """Return a field's value, which is of the type of its default."""
        given = fields.get(field, default)
        if type(given) is type(default):
            return given
        self._add((*where, field), f"{_short(given)} is no {_KINDS[type(default)]}")
        return default

    def _destination(self, given: Any, where: tuple[str | int, ...]) -> DefinedDestination:
        fields = self.fields(given, where, DESTINATION, ("queue",))
        if fields.get("selector", "") is None:
            del fields["selector"]
        return DefinedDestination(
            self._place(fields, where), self.value(fields, "selector", where, "")
        )

    def _place(self, fields: dict[str, Any], where: tuple[str | int, ...]) -> Place:
        return Place(
            self.value(fields, "ns", where, DEFAULT_DB_ALIAS),
            self.value(fields, "queue", where, ""),
        )

    def _judge(self, exchange: DefinedExchange, where: tuple[str | int, ...]) -> None:
        """Add what is wrong with the values; not where a default stands in for one."""
        known = {fault.where for fault in self._faults}
        for fault in exchange.faults():
            step = where if where and fault.where == ("name",) else (*where, *fault.where)
            above = {step[:length] for length in range(len(where) + 1, len(step) + 1)}
            if not known & above:
                self._add(step, fault.sentence)

    def _add(self, where: tuple[str | int, ...], sentence: str) -> None:
        self._faults.append(Fault(where, sentence))


_KINDS = {
    str: "text: put it in quotes.",
    int: "whole number.",
    bool: "true or false.",
    list: "list.",
    dict: "map.",
}


def _short(value: Any) -> str:
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def _shown(faults: list[Fault]) -> list[Fault]:
    more = len(faults) - _FAULTS_SHOWN
    tail = [Fault((), f"And {more:,} more.")] if more > 0 else []
    return faults[:_FAULTS_SHOWN] + tail
