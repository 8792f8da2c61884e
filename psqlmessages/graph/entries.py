"""Entries: an exchange as it is defined, and what is wrong with it: the one place for bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from psqlmessages.exchanges.errors import SelectorError
from psqlmessages.exchanges.messages import Place
from psqlmessages.exchanges.selector import Selector
from psqlmessages.graph import namespaces
from psqlmessages.models.exchanges import EXCHANGE_CHARACTERS, MAX_PARALLEL, MAX_WSIZE
from psqlmessages.models.names import NAME_CHARACTERS

MAX_DESTINATIONS = 1000

# What an exchange finds there it would only put back there, again and again.
TOO_MANY_HOPS = "__too_many_hops__"


class Fault(NamedTuple):
    """What is wrong, as a sentence, and where: a way through the document."""

    where: tuple[str | int, ...]
    sentence: str

    def __str__(self) -> str:
        return f"{written(self.where)}: {self.sentence}" if self.where else self.sentence

    def under(self, *above: str | int) -> Fault:
        """Return the same fault, seen from further up the document."""
        return Fault((*above, *self.where), self.sentence)


class MalformedExchanges(ValueError):
    """Definitions that cannot be: ``faults`` holds all that is wrong with them."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


@dataclass(frozen=True)
class DefinedDestination:
    """Where copies go, and the selector's text; "" where each element gets there."""

    place: Place
    selector: str = ""

    def __str__(self) -> str:
        return str(self.place)

    def faults(self) -> Iterator[Fault]:
        """Yield why it cannot be."""
        yield from _place_faults(self.place)
        if sentence := selector_fault(self.selector):
            yield Fault(("selector",), sentence)

    def as_document(self) -> dict[str, Any]:
        """Write it as files and REST do."""
        document = _place_document(self.place)
        return {**document, "selector": self.selector} if self.selector else document


@dataclass(frozen=True)
class DefinedExchange:
    """An exchange, without its state: whether it runs is no matter of its definition."""

    name: str
    source: Place
    destinations: tuple[DefinedDestination, ...]
    parallel: int = 1
    wsize: int = 100
    reserve: bool = True

    def __str__(self) -> str:
        targets = ", ".join(map(str, self.destinations))
        return f"{self.name}: {self.source} -> {targets}"

    @property
    def places(self) -> set[Place]:
        """Every queue that it takes from or pushes to."""
        return {self.source, *(destination.place for destination in self.destinations)}

    def faults(self) -> Iterator[Fault]:
        """Yield why it cannot be; ``where`` is as in its document."""
        if sentence := name_fault(self.name, EXCHANGE_CHARACTERS):
            yield Fault(("name",), sentence)
        yield from _range_faults("parallel", self.parallel, MAX_PARALLEL)
        yield from _range_faults("wsize", self.wsize, MAX_WSIZE)
        yield from (fault.under("src") for fault in _place_faults(self.source))
        if self.source.queue == TOO_MANY_HOPS:
            sentence = "All that is there has too many hops: an exchange can move none of it."
            yield Fault(("src", "queue"), sentence)
        if not 1 <= len(self.destinations) <= MAX_DESTINATIONS:
            yield Fault(
                ("dst",),
                f"It has {len(self.destinations):,} destinations; an exchange has 1 to"
                f" {MAX_DESTINATIONS:,}.",
            )
        for position, destination in enumerate(self.destinations[:MAX_DESTINATIONS]):
            yield from (fault.under("dst", position) for fault in destination.faults())

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


def name_fault(name: str, most: int = NAME_CHARACTERS) -> str:
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


def selector_fault(text: str) -> str:
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


def _place_document(place: Place) -> dict[str, Any]:
    return {"ns": place.namespace, "queue": place.queue}


def _place_faults(place: Place) -> Iterator[Fault]:
    checks: tuple[tuple[str, Callable[[str], str], str], ...] = (
        ("ns", namespaces.fault_of, place.namespace),
        ("queue", name_fault, place.queue),
    )
    for field, fault_of, value in checks:
        if sentence := fault_of(value):
            yield Fault((field,), sentence)


def _range_faults(field: str, number: int, most: int) -> Iterator[Fault]:
    if not 1 <= number <= most:
        yield Fault(("consumer", field), f"It is {number:,}, and must be 1 to {most:,}.")
