"""Exchange definitions: strict parsing with all errors at the same time, and writing."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, router

from psqlmessages.exchanges.model import QueueRef, SelectorError
from psqlmessages.exchanges.selectors import Selector
from psqlmessages.exchanges.store import files
from psqlmessages.models.exchanges import EXCHANGE_CHARACTERS, MAX_PARALLEL, MAX_WSIZE
from psqlmessages.models.names import NAME_CHARACTERS
from psqlmessages.wire import MalformedText

# Namespaces: the aliases of DATABASES whose databases hold queues.


def namespaces() -> list[str]:
    """List the namespaces, in the order of DATABASES."""
    return [alias for alias in connections if not namespace_error(alias)]


def namespace_error(namespace: str) -> str:
    """Return why no queue can be in this namespace, as a sentence; "" where one can."""
    if namespace not in connections.settings:
        return f"There is no namespace {namespace!r:.100}: those of DATABASES are {_listed()}."
    connection = connections[namespace]
    if connection.vendor != "postgresql":
        return f"Database {namespace!r} is {connection.display_name}, and queues need PostgreSQL."
    if not router.allow_migrate(namespace, "psqlmessages"):
        return f"A router keeps psqlmessages out of database {namespace!r}."
    return ""


def _listed() -> str:
    return ", ".join(alias for alias in connections)


# Entries: an exchange as it is defined, and what is wrong with it: the one place for bounds.

MAX_DESTINATIONS = 1000

# What an exchange finds there it would only put back there, again and again.
TOO_MANY_HOPS = "__too_many_hops__"


class ExchangeError(NamedTuple):
    """What is wrong, as a sentence, and where: a way through the document."""

    where: tuple[str | int, ...]
    sentence: str

    def __str__(self) -> str:
        return f"{written(self.where)}: {self.sentence}" if self.where else self.sentence

    def under(self, *above: str | int) -> ExchangeError:
        """Return the same fault, seen from further up the document."""
        return ExchangeError((*above, *self.where), self.sentence)


class MalformedExchanges(ValueError):
    """Definitions that cannot be: ``errors`` holds all that is wrong with them."""

    def __init__(self, errors: list[ExchangeError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = errors


@dataclass(frozen=True)
class DefinedDestination:
    """Where copies go, and the selector's text; "" where each element gets there."""

    place: QueueRef
    selector: str = ""

    def __str__(self) -> str:
        return str(self.place)

    def errors(self) -> Iterator[ExchangeError]:
        """Yield why it cannot be."""
        yield from _place_errors(self.place)
        if sentence := selector_error(self.selector):
            yield ExchangeError(("selector",), sentence)

    def as_document(self) -> dict[str, Any]:
        """Write it as files and REST do."""
        document = _place_document(self.place)
        return {**document, "selector": self.selector} if self.selector else document


@dataclass(frozen=True)
class DefinedExchange:
    """An exchange, without its state: whether it runs is no matter of its definition."""

    name: str
    source: QueueRef
    destinations: tuple[DefinedDestination, ...]
    parallel: int = 1
    wsize: int = 100
    reserve: bool = True

    def __str__(self) -> str:
        targets = ", ".join(map(str, self.destinations))
        return f"{self.name}: {self.source} -> {targets}"

    @property
    def places(self) -> set[QueueRef]:
        """Every queue that it takes from or pushes to."""
        return {self.source, *(destination.place for destination in self.destinations)}

    def errors(self) -> Iterator[ExchangeError]:
        """Yield why it cannot be; ``where`` is as in its document."""
        if sentence := name_error(self.name, EXCHANGE_CHARACTERS):
            yield ExchangeError(("name",), sentence)
        yield from _range_errors("parallel", self.parallel, MAX_PARALLEL)
        yield from _range_errors("wsize", self.wsize, MAX_WSIZE)
        yield from (problem.under("src") for problem in _place_errors(self.source))
        if self.source.queue == TOO_MANY_HOPS:
            sentence = "All that is there has too many hops: an exchange can move none of it."
            yield ExchangeError(("src", "queue"), sentence)
        if not 1 <= len(self.destinations) <= MAX_DESTINATIONS:
            yield ExchangeError(
                ("dst",),
                f"It has {len(self.destinations):,} destinations; an exchange has 1 to"
                f" {MAX_DESTINATIONS:,}.",
            )
        for position, destination in enumerate(self.destinations[:MAX_DESTINATIONS]):
            yield from (problem.under("dst", position) for problem in destination.errors())

    def as_document(self) -> dict[str, Any]:
        """Write it as files and REST do."""
        return {
            "consumer": {
                "parallel": self.parallel,
                "wsize": self.wsize,
                "reserve": self.reserve,
            },
            "src": _place_document(self.source),
            "dst": [destination.as_document() for destination in self.destinations],
        }


def name_error(name: str, most: int = NAME_CHARACTERS) -> str:
    """Return why no exchange or queue can have this name, as a sentence; "" where one can."""
    if not name:
        return "It is empty."
    if len(name) > most:
        return f"It has {len(name):,} characters; {most} are the most."
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        return f"{name!r:.100} holds a character that PostgreSQL cannot keep."
    if name.endswith("*"):
        return f"{name!r:.100} ends in *: that is a pattern, and no name."
    return ""


def selector_error(text: str) -> str:
    """Return why this is no selector, as a sentence; "" where it is one, or is empty."""
    if not text:
        return ""
    try:
        Selector(text)
    except SelectorError as error:
        return error.text
    return ""


def written(where: tuple[str | int, ...]) -> str:
    """Write a way through a document: ``exchanges.x1.dst[0].selector``."""
    text = ""
    for step in where:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier():
            text += f".{step:.100}" if text else f"{step:.100}"
        else:
            text += f"[{step!r:.110}]"
    return text


def _place_document(place: QueueRef) -> dict[str, Any]:
    return {"ns": place.namespace, "queue": place.queue}


def _place_errors(place: QueueRef) -> Iterator[ExchangeError]:
    checks: tuple[tuple[str, Callable[[str], str], str], ...] = (
        ("ns", namespace_error, place.namespace),
        ("queue", name_error, place.queue),
    )
    for field, find_error, value in checks:
        if sentence := find_error(value):
            yield ExchangeError((field,), sentence)


def _range_errors(field: str, number: int, most: int) -> Iterator[ExchangeError]:
    if not 1 <= number <= most:
        yield ExchangeError(("consumer", field), f"It is {number:,}, and must be 1 to {most:,}.")


_ERRORS_SHOWN = 20
CONSUMER = ("parallel", "wsize", "reserve")
EXCHANGE = ("consumer", "src", "dst")
SOURCE = ("ns", "queue")
DESTINATION = ("ns", "queue", "selector")

_Value = TypeVar("_Value", str, int, bool, list[Any], dict[str, Any])


def read(text: bytes | str) -> tuple[DefinedExchange, ...]:
    """Read YAML or JSON text; raise MalformedExchanges, or YAMLMissing."""
    try:
        document = files.parsed(text)
    except MalformedText as error:
        raise MalformedExchanges([ExchangeError((), error.sentence())]) from error
    return validated(document)


def validated(document: Any) -> tuple[DefinedExchange, ...]:
    """Read a document as JSON gives it, of all exchanges: ``{"exchanges": {NAME: {...}}}``.

    Raises MalformedExchanges with all that is wrong.
    """
    reading = _ValueReader()
    whole = reading.fields(document, (), ("exchanges",), required=("exchanges",))
    entries = reading.value(whole, "exchanges", (), {})
    found = [reading.exchange(name, given, ("exchanges",)) for name, given in entries.items()]
    return reading.result(tuple(found))


def validated_exchange(name: str, document: Any) -> DefinedExchange:
    """Read the document of one exchange: ``{"consumer": ..., "src": ..., "dst": [...]}``.

    Raises MalformedExchanges with all that is wrong; its places begin within the document.
    """
    reading = _ValueReader()
    return reading.result(reading.exchange(name, document, ()))


def checked(exchange: DefinedExchange) -> DefinedExchange:
    """Return the exchange; raise MalformedExchanges where it cannot be."""
    if errors := list(exchange.errors()):
        raise MalformedExchanges(_shown(errors))
    return exchange


def as_document(exchanges: Iterable[DefinedExchange]) -> dict[str, Any]:
    """Write exchanges as one document, in the order of their names."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.name)
    return {"exchanges": {exchange.name: exchange.as_document() for exchange in ordered}}


class _ValueReader:
    """Reads values of the right types, and remembers what is wrong; a default stands in for it."""

    def __init__(self) -> None:
        self._errors: list[ExchangeError] = []

    def result(self, found: Any) -> Any:
        """Return what was found, or raise MalformedExchanges."""
        if self._errors:
            raise MalformedExchanges(_shown(self._errors))
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

    def _place(self, fields: dict[str, Any], where: tuple[str | int, ...]) -> QueueRef:
        return QueueRef(
            self.value(fields, "ns", where, DEFAULT_DB_ALIAS),
            self.value(fields, "queue", where, ""),
        )

    def _judge(self, exchange: DefinedExchange, where: tuple[str | int, ...]) -> None:
        """Add what is wrong with the values; not where a default stands in for one."""
        known = {problem.where for problem in self._errors}
        for problem in exchange.errors():
            step = where if where and problem.where == ("name",) else (*where, *problem.where)
            above = {step[:length] for length in range(len(where) + 1, len(step) + 1)}
            if not known & above:
                self._add(step, problem.sentence)

    def _add(self, where: tuple[str | int, ...], sentence: str) -> None:
        self._errors.append(ExchangeError(where, sentence))


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


def _shown(errors: list[ExchangeError]) -> list[ExchangeError]:
    more = len(errors) - _ERRORS_SHOWN
    tail = [ExchangeError((), f"And {more:,} more.")] if more > 0 else []
    return errors[:_ERRORS_SHOWN] + tail
