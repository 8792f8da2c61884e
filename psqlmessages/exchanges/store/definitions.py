"""Exchange definitions: strict parsing that collects all errors, and conversion to documents."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, router

from psqlmessages.exchanges.model import (
    FALLBACK_QUEUES,
    NO_ROUTE_ACTIONS,
    QueueRef,
    SelectorError,
    SelectorsUnavailable,
)
from psqlmessages.exchanges.selectors import Selector
from psqlmessages.exchanges.store import files
from psqlmessages.models.exchanges import EXCHANGE_CHARACTERS, MAX_PARALLEL, MAX_WSIZE
from psqlmessages.models.names import NAME_CHARACTERS
from psqlmessages.wire import MalformedText, describe_unstorable

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

Path = tuple[str | int, ...]


class ExchangeError(NamedTuple):
    """An error in a document, as a sentence, and the path of the value that causes it."""

    path: Path
    sentence: str

    def __str__(self) -> str:
        return f"{format_path(self.path)}: {self.sentence}" if self.path else self.sentence

    def under(self, *above: str | int) -> ExchangeError:
        """Return this error with ``above`` in front of its path."""
        return ExchangeError((*above, *self.path), self.sentence)


_MAX_ERRORS = 20


class MalformedExchanges(ValueError):
    """Invalid definitions. ``errors`` has the first 20 errors, and the number of omitted ones."""

    def __init__(self, errors: list[ExchangeError]) -> None:
        further = len(errors) - _MAX_ERRORS
        self.errors = errors[:_MAX_ERRORS]
        if further > 0:
            self.errors.append(ExchangeError((), f"And {further:,} more."))
        super().__init__("\n".join(map(str, self.errors)))


@dataclass(frozen=True)
class DefinedDestination:
    """A destination queue, and the text of its selector; "" selects every element."""

    queue: QueueRef
    selector: str = ""

    def __str__(self) -> str:
        return str(self.queue)

    def errors(self) -> Iterator[ExchangeError]:
        """Yield the errors of this destination."""
        yield from _queue_errors(self.queue)
        try:
            Selector.of(self.selector)
        except (SelectorError, SelectorsUnavailable) as error:
            yield ExchangeError(("selector",), str(error))

    def to_document(self) -> dict[str, Any]:
        """Return the document for files and REST."""
        document = _queue_document(self.queue)
        return {**document, "selector": self.selector} if self.selector else document


@dataclass(frozen=True)
class DefinedExchange:
    """Definition of an exchange.

    ``starts_running`` says whether a new exchange runs. Storing the definition of an existing
    exchange does not start or stop it. ``no_route`` is one of NO_ROUTE_ACTIONS.
    """

    name: str
    source: QueueRef
    destinations: tuple[DefinedDestination, ...]
    parallel: int = 1
    wsize: int = 100
    reserve: bool = True
    no_route: str = "queue"
    starts_running: bool = dataclasses.field(default=True, compare=False)

    def __str__(self) -> str:
        destinations = ", ".join(map(str, self.destinations))
        return f"{self.name}: {self.source} -> {destinations}"

    @property
    def queues(self) -> set[QueueRef]:
        """The source and all destinations."""
        return {self.source, *(destination.queue for destination in self.destinations)}

    def errors(self) -> Iterator[ExchangeError]:
        """Yield the errors of this definition. Their paths are relative to its document."""
        if sentence := name_error(self.name, EXCHANGE_CHARACTERS):
            yield ExchangeError(("name",), sentence)
        yield from _range_errors("parallel", self.parallel, MAX_PARALLEL)
        yield from _range_errors("wsize", self.wsize, MAX_WSIZE)
        yield from (error.under("src") for error in _queue_errors(self.source))
        if self.source.name == FALLBACK_QUEUES["too_many_hops"]:
            sentence = "All its elements have too many hops: an exchange cannot move them."
            yield ExchangeError(("src", "queue"), sentence)
        if self.no_route not in NO_ROUTE_ACTIONS:
            known = " or ".join(NO_ROUTE_ACTIONS)
            yield ExchangeError(
                ("no_route",), f"It is {self.no_route!r:.100}, but must be {known}."
            )
        if not 1 <= len(self.destinations) <= MAX_DESTINATIONS:
            sentence = f"An exchange must have 1 to {MAX_DESTINATIONS:,} destinations."
            yield ExchangeError(("dst",), sentence)
        for position, destination in enumerate(self.destinations[:MAX_DESTINATIONS]):
            yield from (error.under("dst", position) for error in destination.errors())

    def to_document(self) -> dict[str, Any]:
        """Return the document for files and REST, without ``running``."""
        document = {
            "consumer": {name: getattr(self, name) for name in CONSUMER_FIELDS},
            "src": _queue_document(self.source),
            "dst": [destination.to_document() for destination in self.destinations],
        }
        return document if self.no_route == "queue" else {**document, "no_route": self.no_route}


def name_error(name: str, maximum: int = NAME_CHARACTERS) -> str:
    """Return why this is not a name of an exchange or queue, as a sentence; "" if it is valid."""
    if not name:
        return "It is empty."
    if len(name) > maximum:
        return f"It has {len(name):,} characters; at most {maximum} are allowed."
    if describe_unstorable(name):
        return f"{name!r:.100} contains a character that PostgreSQL cannot store."
    if name.endswith("*"):
        return f"{name!r:.100} ends in *: this is a pattern, not a name."
    return ""


def format_path(path: Path) -> str:
    """Format a path in a document: ``exchanges.x1.dst[0].selector``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier():
            text += f".{step:.100}" if text else f"{step:.100}"
        else:
            text += f"[{step!r:.110}]"
    return text


def _queue_document(queue: QueueRef) -> dict[str, Any]:
    return {"ns": queue.namespace, "queue": queue.name}


def _queue_errors(queue: QueueRef) -> Iterator[ExchangeError]:
    if sentence := namespace_error(queue.namespace):
        yield ExchangeError(("ns",), sentence)
    if sentence := name_error(queue.name):
        yield ExchangeError(("queue",), sentence)


def _range_errors(field: str, number: int, maximum: int) -> Iterator[ExchangeError]:
    if not 1 <= number <= maximum:
        yield ExchangeError(("consumer", field), f"It is {number:,}, but must be 1 to {maximum:,}.")


CONSUMER_FIELDS = ("parallel", "wsize", "reserve")
EXCHANGE_FIELDS = ("consumer", "src", "dst", "no_route", "running")
SOURCE_FIELDS = ("ns", "queue")
DESTINATION_FIELDS = ("ns", "queue", "selector")

_Value = TypeVar("_Value", str, int, bool, list[Any], dict[str, Any])


def parse_text(text: bytes | str) -> tuple[DefinedExchange, ...]:
    """Read YAML or JSON text of exchanges; raise as `read_document` and `parse_document` do."""
    return parse_document(read_document(text))


def read_document(text: bytes | str) -> Any:
    """Convert YAML or JSON text to a document; raise MalformedExchanges, or YAMLMissing."""
    try:
        return files.parse(text)
    except MalformedText as error:
        raise MalformedExchanges([ExchangeError((), error.sentence())]) from error


def parse_document(document: Any) -> tuple[DefinedExchange, ...]:
    """Read ``{"exchanges": {NAME: {...}}}``; raise MalformedExchanges with its errors."""
    reader = _DocumentReader()
    fields = reader.fields(document, (), ("exchanges",), required=("exchanges",))
    documents = reader.value(fields, "exchanges", (), {})
    exchanges = tuple(
        reader.exchange(name, value, ("exchanges",)) for name, value in documents.items()
    )
    reader.raise_errors()
    return exchanges


def parse_exchange(name: str, document: Any) -> DefinedExchange:
    """Read the JSON document of one exchange: ``{"consumer": ..., "src": ..., "dst": [...]}``.

    Raise as `parse_document` does. The paths of errors are relative to this document.
    """
    reader = _DocumentReader()
    exchange = reader.exchange(name, document, ())
    reader.raise_errors()
    return exchange


def to_document(
    exchanges: Iterable[DefinedExchange], *, with_running: bool = False
) -> dict[str, Any]:
    """Convert exchanges to one document, in the order of their names."""
    documents = {}
    for exchange in sorted(exchanges, key=lambda exchange: exchange.name):
        running = {"running": exchange.starts_running} if with_running else {}
        documents[exchange.name] = exchange.to_document() | running
    return {"exchanges": documents}


class _DocumentReader:
    """Reads documents with type checks and collects errors; defaults replace invalid values."""

    def __init__(self) -> None:
        self._errors: list[ExchangeError] = []

    def raise_errors(self) -> None:
        """Raise MalformedExchanges if there are errors."""
        if self._errors:
            raise MalformedExchanges(self._errors)

    def exchange(self, name: Any, document: Any, above: Path) -> DefinedExchange:
        if not isinstance(name, str):
            self._add(above, f"The name {_describe(name)} is not text: put it in quotes.")
            name = str(name)
        path = (*above, name) if above else ()
        fields = self.fields(document, path, EXCHANGE_FIELDS, required=("src", "dst"))
        consumer_path = (*path, "consumer")
        consumer = self.fields(fields.get("consumer", {}), consumer_path, CONSUMER_FIELDS)
        # A missing source is one error; do not add that its queue is missing too.
        required = ("queue",) if "src" in fields else ()
        source = self.fields(fields.get("src", {}), (*path, "src"), SOURCE_FIELDS, required)
        documents = self.value(fields, "dst", path, [])[: MAX_DESTINATIONS + 1]
        exchange = DefinedExchange(
            name,
            self._queue(source, (*path, "src")),
            tuple(
                self._destination(destination, (*path, "dst", position))
                for position, destination in enumerate(documents)
            ),
            self.value(consumer, "parallel", consumer_path, 1),
            self.value(consumer, "wsize", consumer_path, 100),
            self.value(consumer, "reserve", consumer_path, True),
            self.value(fields, "no_route", path, "queue"),
            self.value(fields, "running", path, True),
        )
        self._add_value_errors(exchange, path)
        return exchange

    def fields(
        self, document: Any, path: Path, known: tuple[str, ...], required: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the known fields of a map; add errors for unknown and missing ones."""
        listed = ", ".join(known)
        if not isinstance(document, dict):
            self._add(path, f"{_describe(document)} is not a map of {listed}.")
            return {}
        for field in document:
            if field not in known:
                self._add((*path, str(field)), f"Unknown field; the fields are {listed}.")
        for field in required:
            if field not in document:
                self._add((*path, field), "It is missing.")
        return {field: document[field] for field in known if field in document}

    def value(self, fields: dict[str, Any], field: str, path: Path, default: _Value) -> _Value:
        """Return the value of a field, or the default if it is missing or has another type."""
        value = fields.get(field, default)
        if type(value) is type(default):
            return value
        self._add((*path, field), f"{_describe(value)} is not {_TYPE_NAMES[type(default)]}")
        return default

    def _destination(self, document: Any, path: Path) -> DefinedDestination:
        fields = self.fields(document, path, DESTINATION_FIELDS, ("queue",))
        if fields.get("selector", "") is None:
            # Null means no selector.
            del fields["selector"]
        return DefinedDestination(
            self._queue(fields, path), self.value(fields, "selector", path, "")
        )

    def _queue(self, fields: dict[str, Any], path: Path) -> QueueRef:
        return QueueRef(
            self.value(fields, "ns", path, DEFAULT_DB_ALIAS), self.value(fields, "queue", path, "")
        )

    def _add_value_errors(self, exchange: DefinedExchange, path: Path) -> None:
        """Add the errors of values; skip fields with an earlier error: they have default values."""
        known_paths = {error.path for error in self._errors}
        for error in exchange.errors():
            full_path = (*path, *error.path)
            if path and error.path == ("name",):
                full_path = path
            # The path of the field, and the paths of the fields that contain it.
            prefixes = {full_path[:end] for end in range(len(path) + 1, len(full_path) + 1)}
            if not known_paths & prefixes:
                self._add(full_path, error.sentence)

    def _add(self, path: Path, sentence: str) -> None:
        self._errors.append(ExchangeError(path, sentence))


_TYPE_NAMES = {
    str: "text: put it in quotes.",
    int: "a whole number.",
    bool: "true or false.",
    list: "a list.",
    dict: "a map.",
}


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_describe = _REPR.repr
