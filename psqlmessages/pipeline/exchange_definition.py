"""Definitions of exchanges as Spark carries them: plain text, compiled where they are run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.errors import SelectorError
from psqlmessages.exchanges.messages import Graphed, Place, Target
from psqlmessages.exchanges.selector import Selector

_NUMBERS = ("parallel", "wsize", "reserve", "max_hops")


class UnfitExchange(MessagesError):
    """An exchange cannot run on an executor: of what is named there, something is missing."""


class Source(NamedTuple):
    """Where an exchange takes elements from, and as which node."""

    ident: str
    place: Place


def written(exchanges: Iterable[Graphed]) -> str:
    """Write exchanges as text, in the order of their names: equal ones give equal texts."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.name)
    return json.dumps([_document(exchange) for exchange in ordered])


def sources(text: str) -> tuple[Source, ...]:
    """Read what each exchange takes from; nothing is compiled."""
    return tuple(
        Source(f"exchange.{each['name']}", Place(*each["source"])) for each in json.loads(text)
    )


@lru_cache(maxsize=16)
def compiled(text: str, modules: tuple[str, ...]) -> tuple[Graphed, ...]:
    """Import the modules that hold selectors in code, and compile exchanges; once per process.

    Raises UnfitExchange where a module or a selector is not there.
    """
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise UnfitExchange(
                f"an executor cannot import {module}, which is to hold selectors: {error}"
            ) from error
    return tuple(_graphed(each) for each in json.loads(text))


def _document(exchange: Graphed) -> dict[str, Any]:
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


def _graphed(document: dict[str, Any]) -> Graphed:
    name = document["name"]
    return Graphed(
        name=name,
        source=Place(*document["source"]),
        targets=tuple(
            Target(Place(namespace, queue), _selector(name, Place(namespace, queue), text))
            for namespace, queue, text in document["targets"]
        ),
        **{number: document[number] for number in _NUMBERS},
    )


def _selector(name: str, place: Place, text: str) -> Selector | None:
    try:
        return Selector.of(text)
    except SelectorError as error:
        raise UnfitExchange(
            f"exchange {name} does not run on an executor: the selector of {place}: {error.text}"
        ) from error
