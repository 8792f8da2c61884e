"""Exchange definitions as text: Spark sends the text to executors, which compile it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.model import (
    CompiledDestination,
    CompiledExchange,
    QueueRef,
    SelectorError,
    ident_of,
)
from psqlmessages.exchanges.selectors import Selector
from psqlmessages.pipeline.private_folder import replace_file

_OPTION_FIELDS = ("parallel", "wsize", "reserve", "max_hops", "no_route")


class UnsuitableExchange(MessagesError):
    """An executor cannot import a module of selector functions, or cannot compile a selector."""


class ExchangeInput(NamedTuple):
    """The source queue of an exchange, and the node that reads it."""

    ident: str
    queue: QueueRef


def dump_exchanges(exchanges: Iterable[CompiledExchange]) -> str:
    """Write exchanges as text, ordered by name, so that equal exchanges give equal texts."""
    documents = [
        {
            "name": exchange.name,
            "source": astuple(exchange.source),
            "destinations": [
                [*astuple(each.queue), each.selector.text if each.selector else ""]
                for each in exchange.destinations
            ],
            **{name: getattr(exchange, name) for name in _OPTION_FIELDS},
        }
        for exchange in sorted(exchanges, key=lambda exchange: exchange.name)
    ]
    return json.dumps(documents)


def read_inputs(text: str) -> tuple[ExchangeInput, ...]:
    """Return the source queue of each exchange, without compiling selectors."""
    return tuple(
        ExchangeInput(ident_of(each["name"]), QueueRef(*each["source"]))
        for each in json.loads(text)
    )


@lru_cache(maxsize=16)
def compile_exchanges(text: str, modules: tuple[str, ...]) -> tuple[CompiledExchange, ...]:
    """Import modules with selector functions, and compile exchanges; raises UnsuitableExchange."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise UnsuitableExchange(
                f"an executor cannot import {module}, which should contain selectors: {error}"
            ) from error
    return tuple(_compile_exchange(each) for each in json.loads(text))


def _compile_exchange(document: dict[str, Any]) -> CompiledExchange:
    destinations = []
    for namespace, name, text in document["destinations"]:
        queue = QueueRef(namespace, name)
        try:
            destinations.append(CompiledDestination(queue, Selector.of(text)))
        except SelectorError as error:
            raise UnsuitableExchange(
                f"exchange {document['name']} cannot run on an executor: the selector of {queue}:"
                f" {error.text}"
            ) from error
    queues = {"source": QueueRef(*document["source"]), "destinations": tuple(destinations)}
    return CompiledExchange(**(document | queues))


class DefinitionFolder:
    """The folder through which the driver passes the current definitions to its data source.

    Each change of the definitions is a new, numbered version. A folder is needed because Spark runs
    the data source of a stream in a separate process, with options that cannot change.
    """

    def __init__(self, path: Path) -> None:
        self._definitions = path / "definitions"
        self._version_in_use = path / "version-in-use"

    def put(self, version: int, text: str) -> None:
        """Write a new version of the definitions."""
        replace_file(self._definitions, f"{version}\n{text}")

    def get(self) -> tuple[int, str]:
        """Return the number and the text of the last version."""
        number, _, text = self._definitions.read_text(encoding="utf-8").partition("\n")
        return int(number), text

    def record_in_use(self, version: int) -> None:
        """Record that from now on all tasks use this version or a later one."""
        replace_file(self._version_in_use, str(version))

    @property
    def version_in_use(self) -> int:
        """The last version recorded by ``record_in_use``; 0 before the first."""
        try:
            return int(self._version_in_use.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0
