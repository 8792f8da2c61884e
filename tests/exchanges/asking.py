"""Short ways to make exchanges and to ask selectors, for the tests of selectors and route."""

from datetime import UTC, datetime
from typing import Any

from psqlmessages import exchanges
from psqlmessages.exchanges.store.definitions import DefinedDestination, DefinedExchange

NOW = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)


def exchange(*selectors: str, **fields: Any) -> exchanges.CompiledExchange:
    """An exchange with a destination for each selector; empty text: always."""
    queues = (exchanges.QueueRef("default", f"q{number}") for number in range(len(selectors)))
    compiled = map(exchanges.Selector.of, selectors)
    destinations = tuple(map(exchanges.CompiledDestination, queues, compiled))
    source = exchanges.QueueRef("default", "source")
    return exchanges.CompiledExchange("x1", source, destinations, **fields)


def routed(*selectors: str, body: Any = None, **headers: Any) -> exchanges.RoutingResult:
    """Route a message with these headers at NOW."""
    message = exchanges.SelectorInput(body, headers, id=7, tries=2, queue="source", ns="default")
    return exchanges.route(exchange(*selectors), message, now=NOW)


def asked(selector: str, body: Any = None, **headers: Any) -> exchanges.Verdict:
    (verdict,) = routed(selector, body=body, **headers).verdicts
    return verdict


def takes(selector: str, body: Any = None, **headers: Any) -> bool:
    """Return whether a selector accepts; it must not fail."""
    verdict = asked(selector, body, **headers)
    assert verdict.error is None, verdict.error
    return verdict.is_accepted


def queue(name: str) -> exchanges.QueueRef:
    namespace, _, name = name.rpartition("/")
    return exchanges.QueueRef(namespace or "default", name)


def defined(source: str, *destinations: str, name: str = "x", **fields: Any) -> DefinedExchange:
    destinations = tuple(DefinedDestination(queue(destination)) for destination in destinations)
    return DefinedExchange(name, queue(source), destinations, **fields)
