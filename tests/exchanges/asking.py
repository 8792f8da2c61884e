"""Short ways to make exchanges and to ask selectors, for the tests of selectors and route."""

from datetime import UTC, datetime
from typing import Any

from psqlmessages.exchanges import (
    CompiledDestination,
    CompiledExchange,
    QueueRef,
    RoutingResult,
    Selector,
    SelectorInput,
    Verdict,
    route,
)
from psqlmessages.exchanges.store.definitions import DefinedDestination, DefinedExchange

NOW = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)


def exchange(*selectors: str, **fields: Any) -> CompiledExchange:
    """An exchange with a destination for each selector; empty text: always."""
    destinations = tuple(
        CompiledDestination(QueueRef("default", f"q{number}"), Selector.of(text))
        for number, text in enumerate(selectors)
    )
    return CompiledExchange("x1", QueueRef("default", "source"), destinations, **fields)


def routed(*selectors: str, body: Any = None, **headers: Any) -> RoutingResult:
    """Route a message with these headers at NOW."""
    message = SelectorInput(body, headers, id=7, tries=2, queue="source", ns="default")
    return route(exchange(*selectors), message, now=NOW)


def asked(selector: str, body: Any = None, **headers: Any) -> Verdict:
    (verdict,) = routed(selector, body=body, **headers).verdicts
    return verdict


def takes(selector: str, body: Any = None, **headers: Any) -> bool:
    """Return whether a selector accepts; it must not fail."""
    verdict = asked(selector, body, **headers)
    assert verdict.error is None, verdict.error
    return verdict.is_accepted


def queue(name: str) -> QueueRef:
    namespace, _, name = name.rpartition("/")
    return QueueRef(namespace or "default", name)


def defined(source: str, *destinations: str, name: str = "x", **fields: Any) -> DefinedExchange:
    destinations = tuple(DefinedDestination(queue(destination)) for destination in destinations)
    return DefinedExchange(name, queue(source), destinations, **fields)
