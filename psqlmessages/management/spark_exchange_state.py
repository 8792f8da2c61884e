"""State of an exchange on Spark: its definition and its counters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, OperationalError
from django.db.models.functions import Now

from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.exchanges.store import repository
from psqlmessages.exchanges.store.definitions import (
    DefinedExchange,
    MalformedExchanges,
    namespace_error,
)
from psqlmessages.exchanges.store.permissions import MissingRuleLog
from psqlmessages.exchanges.store.stats import ELEMENT_OUTCOMES, CounterStore
from psqlmessages.models import Element
from psqlmessages.retry import error_line

if TYPE_CHECKING:
    from psqlmessages.exchanges.model import CompiledExchange
    from psqlmessages.pipeline.exchange.source import TaskCounts

logger = logging.getLogger("psqlmessages")

_TURNS_KEPT: Final = 1000


class SparkExchangeState:
    """Definition and counters of one exchange.

    Everything except `count` and `lag` must be used by one thread only.
    """

    def __init__(self, name: str, using: str = DEFAULT_DB_ALIAS) -> None:
        self._name = name
        self._using = using
        self._key: int | None = None
        self._known: tuple[DefinedExchange, datetime] | None = None
        self._compiled: CompiledExchange | None = None
        self._running: tuple[int, ...] = ()
        self._counted: SimpleQueue[Sequence[TaskCounts]] = SimpleQueue()
        self._elements: dict[int, int] = {}
        self._rules = MissingRuleLog()
        self._is_refused = False
        self.counter_store = CounterStore(using)

    # Called by Spark's threads

    def count(self, turn: int, counts: Sequence[TaskCounts]) -> None:
        """Record the counts of a micro-batch."""
        if len(self._elements) >= _TURNS_KEPT:
            del self._elements[min(self._elements)]
        self._elements[turn] = sum(
            each.number for each in counts if each.outcome in ELEMENT_OUTCOMES
        )
        self._counted.put(counts)

    def elements(self, turn: int) -> int:
        """Return how many elements a micro-batch has finished, with any outcome."""
        return self._elements.get(turn, 0)

    # The definition

    def look(self) -> CompiledExchange | None:
        """Read the exchange to run; None if it is stopped or cannot run.

        Raise Exchange.DoesNotExist if it was deleted.
        """
        row = repository.rows(self._using).get(name=self._name)
        self._key = row.pk
        known = (repository.to_definition(row), row.changed_at)
        if known != self._known:
            self._known = known
            self._compiled = self._compile(known[0])
        found = self._compiled if row.is_running else None
        self._running = () if found is None else (row.pk,)
        return found

    def _compile(self, definition: DefinedExchange) -> CompiledExchange | None:
        places = sorted(definition.places, key=str)
        errors = [problem for place in places if (problem := namespace_error(place.namespace))]
        try:
            if not errors:
                return repository.compile_exchange(definition)
        except (MalformedExchanges, MessagesError) as error:
            errors.append(error_line(error))
        logger.warning("exchange %s cannot run: %s", self._name, errors[0])
        return None

    def lag(self) -> float | None:
        """Return the seconds that the oldest available element has waited; 0 if there is none.

        Raise ServerUnreachable if the source's database is unreachable, and MessagesError if the
        role may not read the table of elements: taking elements needs a rule only.
        """
        if self._compiled is None:
            return None
        source = self._compiled.source
        elements = Element.objects.using(source.namespace).filter(queue__name=source.queue)
        waiting = elements.filter(available_at__lte=Now()).order_by("available_at")
        try:
            found = waiting.values_list("available_at", Now()).first()
        except (OperationalError, InterfaceError) as error:
            raise ServerUnreachable(error_line(error)) from error
        except DatabaseError as error:
            raise MessagesError(error_line(error)) from error
        return 0.0 if found is None else max((found[1] - found[0]).total_seconds(), 0.0)

    # Counters

    def write(self) -> None:
        """Write the counters and the heartbeat; log missing rules."""
        if self._key is None:
            return
        counters = self.counter_store.of(self._key)
        for counts in self._new():
            counts.add_to(counters)
            self._is_refused |= counts.is_refusal
        self.counter_store.mark_written(
            self.counter_store.write(self.counter_store.list_rows(self._running))
        )
        if self._is_refused and self._known is not None and self._rules.is_due:
            self._is_refused = False
            self._rules.report(self._known[0], self._using)

    def _new(self) -> Iterable[TaskCounts]:
        while True:
            try:
                yield from self._counted.get_nowait()
            except Empty:
                return
