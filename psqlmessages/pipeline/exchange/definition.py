"""Exchange definitions as Spark carries them: text, compiled on the executor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.model import CompiledExchange, QueueRef, RouteTarget, SelectorError
from psqlmessages.exchanges.selectors import Selector

_NUMBERS = ("parallel", "wsize", "reserve", "max_hops")


class UnsuitableExchange(MessagesError):
    """An exchange cannot run on an executor: of what is named there, something is missing."""


class ExchangeInput(NamedTuple):
    """Where an exchange takes elements from, and as which node."""

    ident: str
    place: QueueRef


def written(exchanges: Iterable[CompiledExchange]) -> str:
    """Write exchanges as text, in the order of their names: equal ones give equal texts."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.name)
    return json.dumps([_document(exchange) for exchange in ordered])


def sources(text: str) -> tuple[ExchangeInput, ...]:
    """Read what each exchange takes from; nothing is compiled."""
    return tuple(
        ExchangeInput(f"exchange.{each['name']}", QueueRef(*each["source"]))
        for each in json.loads(text)
    )


@lru_cache(maxsize=16)
def compiled(text: str, modules: tuple[str, ...]) -> tuple[CompiledExchange, ...]:
    """Import the modules that hold selectors in code, and compile exchanges; once per process.

    Raises UnfitExchange where a module or a selector is not there.
    """
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise UnsuitableExchange(
                f"an executor cannot import {module}, which is to hold selectors: {error}"
            ) from error
    return tuple(_graphed(each) for each in json.loads(text))


def _document(exchange: CompiledExchange) -> dict[str, Any]:
    return {
        "name": exchange.name,
        "source": [exchange.source.namespace, exchange.source.queue],
        "targets": [
            [
                target.place.namespace,
                target.place.queue,
                "" if target.selector is None else target.selector.text,
            ]
            for target in exchange.targets
        ],
        **{name: getattr(exchange, name) for name in _NUMBERS},
    }


def _graphed(document: dict[str, Any]) -> CompiledExchange:
    name = document["name"]
    return CompiledExchange(
        name=name,
        source=QueueRef(*document["source"]),
        targets=tuple(
            RouteTarget(
                QueueRef(namespace, queue), _selector(name, QueueRef(namespace, queue), text)
            )
            for namespace, queue, text in document["targets"]
        ),
        **{number: document[number] for number in _NUMBERS},
    )


def _selector(name: str, place: QueueRef, text: str) -> Selector | None:
    try:
        return Selector.of(text)
    except SelectorError as error:
        raise UnsuitableExchange(
            f"exchange {name} does not run on an executor: the selector of {place}: {error.text}"
        ) from error


# The folder by which the driver tells its data source which exchanges are to run.


class DefinitionFolder:
    """Numbered editions of the definitions, and which of them has been taken over.

    Spark keeps the source of a stream in a process of its own beside the driver, and its options
    are what they were when the stream began.
    """

    def __init__(self, path: Path) -> None:
        self._definitions = path / "definitions"
        self._taken_over = path / "taken-over"

    def put(self, edition: int, text: str) -> None:
        """Publish an edition."""
        _write(self._definitions, f"{edition}\n{text}")

    def get(self) -> tuple[int, str]:
        """Return the last edition: its number, and its text."""
        number, _, text = self._definitions.read_text(encoding="utf-8").partition("\n")
        return int(number), text

    def take_over(self, edition: int) -> None:
        """Tell that no work goes on by an earlier edition."""
        _write(self._taken_over, str(edition))

    @property
    def taken_over(self) -> int:
        """The last edition of which that is so; 0 for none."""
        try:
            return int(self._taken_over.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0


def _write(path: Path, text: str) -> None:
    # Whoever reads meanwhile gets the former text, or this one.
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
