"""Exchange definitions: strict parsing that reports all errors together, and writing."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
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
    """Return why this namespace cannot hold queues, as a sentence; "" if it can."""
    if namespace not in connections.settings:
        return f"Unknown namespace {namespace!r:.100}: DATABASES has {', '.join(connections)}."
    connection = connections[namespace]
    if connection.vendor != "postgresql":
        return f"Database {namespace!r} is {connection.display_name}, but queues need PostgreSQL."
    if not router.allow_migrate(namespace, "psqlmessages"):
        return f"A database router excludes psqlmessages from database {namespace!r}."
    return ""


# Definitions of exchanges and their errors. All limits are checked here.

MAX_DESTINATIONS = 1000

# An exchange could only push the elements of this queue back to it, forever.
TOO_MANY_HOPS = "__too_many_hops__"


class ExchangeError(NamedTuple):
    """An error as a sentence, and its path in the document."""

    where: tuple[str | int, ...]
    sentence: str

    def __str__(self) -> str:
        return f"{written(self.where)}: {self.sentence}" if self.where else self.sentence

    def under(self, *above: str | int) -> ExchangeError:
        """Return this error with a path that begins higher in the document."""
        return ExchangeError((*above, *self.where), self.sentence)


class MalformedExchanges(ValueError):
    """Invalid definitions; ``errors`` holds all their errors."""

    def __init__(self, errors: list[ExchangeError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = errors


@dataclass(frozen=True)
class DefinedDestination:
    """A destination queue, and the text of its selector; "" means always."""

    place: QueueRef
    selector: str = ""

    def __str__(self) -> str:
        return str(self.place)

    def errors(self) -> Iterator[ExchangeError]:
        """Yield the errors of this destination."""
        yield from _place_errors(self.place)
        if sentence := selector_error(self.selector):
            yield ExchangeError(("selector",), sentence)

    def as_document(self) -> dict[str, Any]:
        """Return the document for files and REST."""
        document = _place_document(self.place)
        return {**document, "selector": self.selector} if self.selector else document


@dataclass(frozen=True)
class DefinedExchange:
    """Definition of an exchange. Whether it runs is not part of its definition."""

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
        """All queues that it takes from or pushes to."""
        return {self.source, *(destination.place for destination in self.destinations)}

    def errors(self) -> Iterator[ExchangeError]:
        """Yield the errors of this definition; ``where`` is a path in its document."""
        if sentence := name_error(self.name, EXCHANGE_CHARACTERS):
            yield ExchangeError(("name",), sentence)
        yield from _range_errors("parallel", self.parallel, MAX_PARALLEL)
        yield from _range_errors("wsize", self.wsize, MAX_WSIZE)
        yield from (problem.under("src") for problem in _place_errors(self.source))
        if self.source.queue == TOO_MANY_HOPS:
            sentence = "All its elements have too many hops: an exchange cannot move them."
            yield ExchangeError(("src", "queue"), sentence)
        if not 1 <= len(self.destinations) <= MAX_DESTINATIONS:
            yield ExchangeError(
                ("dst",),
                f"It has {len(self.destinations):,} destinations; an exchange can have 1 to"
                f" {MAX_DESTINATIONS:,}.",
            )
        for position, destination in enumerate(self.destinations[:MAX_DESTINATIONS]):
            yield from (problem.under("dst", position) for problem in destination.errors())

    def as_document(self) -> dict[str, Any]:
        """Return the document for files and REST."""
        return {
            "consumer": {name: getattr(self, name) for name in CONSUMER},
            "src": _place_document(self.source),
            "dst": [destination.as_document() for destination in self.destinations],
        }


def name_error(name: str, most: int = NAME_CHARACTERS) -> str:
    """Return why this is not a name of an exchange or queue, as a sentence; "" if it is valid."""
    if not name:
        return "It is empty."
    if len(name) > most:
        return f"It has {len(name):,} characters; at most {most} are allowed."
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        return f"{name!r:.100} contains a character that PostgreSQL cannot store."
    if name.endswith("*"):
        return f"{name!r:.100} ends in *: this is a pattern, not a name."
    return ""


def selector_error(text: str) -> str:
    """Return why a selector is invalid, as a sentence; "" if it is valid or empty."""
    if not text:
        return ""
    try:
        Selector(text)
    except SelectorError as error:
        return error.text
    return ""


def written(where: tuple[str | int, ...]) -> str:
    """Format a path in a document: ``exchanges.x1.dst[0].selector``."""
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
    if sentence := namespace_error(place.namespace):
        yield ExchangeError(("ns",), sentence)
    if sentence := name_error(place.queue):
        yield ExchangeError(("queue",), sentence)


def _range_errors(field: str, number: int, most: int) -> Iterator[ExchangeError]:
    if not 1 <= number <= most:
        yield ExchangeError(("consumer", field), f"It is {number:,}, but must be 1 to {most:,}.")


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
    """Read a JSON document of all exchanges: ``{"exchanges": {NAME: {...}}}``.

    Raise MalformedExchanges with all errors.
    """
    reading = _ValueReader()
    whole = reading.fields(document, (), ("exchanges",), required=("exchanges",))
    entries = reading.value(whole, "exchanges", (), {})
    found = [reading.exchange(name, given, ("exchanges",)) for name, given in entries.items()]
    return reading.result(tuple(found))


def validated_exchange(name: str, document: Any) -> DefinedExchange:
    """Read the JSON document of one exchange: ``{"consumer": ..., "src": ..., "dst": [...]}``.

    Raise MalformedExchanges with all errors. Their paths begin in this document.
    """
    reading = _ValueReader()
    return reading.result(reading.exchange(name, document, ()))


def checked(exchange: DefinedExchange) -> DefinedExchange:
    """Return a definition; raise MalformedExchanges if it is invalid."""
    if errors := list(exchange.errors()):
        raise MalformedExchanges(_shown(errors))
    return exchange


def as_document(exchanges: Iterable[DefinedExchange]) -> dict[str, Any]:
    """Write exchanges as one document, in the order of their names."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.name)
    return {"exchanges": {exchange.name: exchange.as_document() for exchange in ordered}}


class _ValueReader:
    """Reads values with type checks and collects errors; defaults replace invalid values."""

    def __init__(self) -> None:
        self._errors: list[ExchangeError] = []

    def result(self, found: Any) -> Any:
        """Return ``found``; raise MalformedExchanges if there are errors."""
        if self._errors:
            raise MalformedExchanges(_shown(self._errors))
        return found

    def exchange(self, name: Any, given: Any, above: tuple[str, ...]) -> DefinedExchange:
        if not isinstance(name, str):
            self._add(above, f"The name {_short(name)} is not text: put it in quotes.")
            name = str(name)
        where = (*above, name) if above else ()
        fields = self.fields(given, where, EXCHANGE, required=("src", "dst"))
        at = (*where, "consumer")
        consumer = self.fields(fields.get("consumer", {}), at, CONSUMER)
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
        """Return the known fields of a map."""
        listed = ", ".join(known)
        if not isinstance(given, dict):
            self._add(where, f"{_short(given)} is not a map of {listed}.")
            return {}
        for field in given:
            if field not in known:
                self._add((*where, str(field)), f"Unknown field; the fields are {listed}.")
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
        """Return the value of a field, or the default if it has another type."""
        given = fields.get(field, default)
        if type(given) is type(default):
            return given
        self._add((*where, field), f"{_short(given)} is not {_KINDS[type(default)]}")
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
        """Add the errors of the values, but not of defaults that replace invalid values."""
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
    int: "a whole number.",
    bool: "true or false.",
    list: "a list.",
    dict: "a map.",
}


def _short(value: Any) -> str:
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def _shown(errors: list[ExchangeError]) -> list[ExchangeError]:
    more = len(errors) - _ERRORS_SHOWN
    tail = [ExchangeError((), f"And {more:,} more.")] if more > 0 else []
    return errors[:_ERRORS_SHOWN] + tail
