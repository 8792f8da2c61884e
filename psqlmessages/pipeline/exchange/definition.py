"""Exchange definitions in the form that Spark transports: text, compiled on the executor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.model import CompiledExchange, QueueRef, RouteTarget, SelectorError
from psqlmessages.exchanges.selectors import Selector
from psqlmessages.pipeline.private_folder import replace_file

_NUMBERS = ("parallel", "wsize", "reserve", "max_hops")


class UnsuitableExchange(MessagesError):
    """An exchange cannot run on an executor, because a module or a selector is missing there."""


class ExchangeInput(NamedTuple):
    """The source queue of an exchange, and the node that reads it."""

    ident: str
    place: QueueRef


def written(exchanges: Iterable[CompiledExchange]) -> str:
    """Write exchanges as text, ordered by name, so that equal exchanges give equal texts."""
    documents = [
        {
            "name": exchange.name,
            "source": astuple(exchange.source),
            "targets": [
                [*astuple(target.place), target.selector.text if target.selector else ""]
                for target in exchange.targets
            ],
            **{name: getattr(exchange, name) for name in _NUMBERS},
        }
        for exchange in sorted(exchanges, key=lambda exchange: exchange.name)
    ]
    return json.dumps(documents)


def sources(text: str) -> tuple[ExchangeInput, ...]:
    """Return the source of each exchange, without compiling anything."""
    return tuple(
        ExchangeInput(f"exchange.{each['name']}", QueueRef(*each["source"]))
        for each in json.loads(text)
    )


@lru_cache(maxsize=16)
def compiled(text: str, modules: tuple[str, ...]) -> tuple[CompiledExchange, ...]:
    """Import the modules with selector functions, and compile exchanges, once per process.

    Raises UnsuitableExchange if a module or a selector is missing.
    """
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise UnsuitableExchange(
                f"an executor cannot import {module}, which should contain selectors: {error}"
            ) from error
    return tuple(_compiled(each) for each in json.loads(text))


def _compiled(document: dict[str, Any]) -> CompiledExchange:
    targets = []
    for namespace, queue, text in document["targets"]:
        place = QueueRef(namespace, queue)
        try:
            targets.append(RouteTarget(place, Selector.of(text)))
        except SelectorError as error:
            raise UnsuitableExchange(
                f"exchange {document['name']} cannot run on an executor: the selector of {place}:"
                f" {error.text}"
            ) from error
    places = {"source": QueueRef(*document["source"]), "targets": tuple(targets)}
    return CompiledExchange(**(document | places))


# The folder in which the driver tells its data source which exchanges to run.


class DefinitionFolder:
    """The numbered editions of the definitions, and the last edition that is in use.

    Spark runs the data source of a stream in a separate process beside the driver, and its options
    cannot change after the stream has started.
    """

    def __init__(self, path: Path) -> None:
        self._definitions = path / "definitions"
        self._taken_over = path / "taken-over"

    def put(self, edition: int, text: str) -> None:
        """Publish an edition."""
        replace_file(self._definitions, f"{edition}\n{text}")

    def get(self) -> tuple[int, str]:
        """Return the last edition: its number and its text."""
        number, _, text = self._definitions.read_text(encoding="utf-8").partition("\n")
        return int(number), text

    def take_over(self, edition: int) -> None:
        """Record that no task uses an earlier edition."""
        replace_file(self._taken_over, str(edition))

    @property
    def taken_over(self) -> int:
        """The last edition that was recorded by ``take_over``; 0 if none was."""
        try:
            return int(self._taken_over.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0
