"""Command pipeline exchange: run an exchange on Spark."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from datetime import datetime
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Final

from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, OperationalError, connections
from django.db.models.functions import Now

from psqlmessages.cli.output import CliCommand, fail, one_line, positive
from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.exchanges.store import repository
from psqlmessages.exchanges.store.definitions import (
    DefinedExchange,
    MalformedExchanges,
    namespace_error,
)
from psqlmessages.exchanges.store.permissions import MissingRuleCheck
from psqlmessages.exchanges.store.stats import ELEMENT_OUTCOMES, CounterStore
from psqlmessages.management.pipeline import JobContext
from psqlmessages.models import Element, Exchange
from psqlmessages.orm import direct_dsn
from psqlmessages.retry import error_line

if TYPE_CHECKING:
    from psqlmessages.exchanges.model import CompiledExchange
    from psqlmessages.pipeline.exchange.driver import SparkExchanges
    from psqlmessages.pipeline.exchange.source import TaskCounts

logger = logging.getLogger("psqlmessages")

_MAX_COUNTED_BATCHES: Final = 1000


class SparkExchangeState:
    """Definition and counters of one exchange, as the driver of the Spark job needs them.

    Any thread may call `add_counts`, `element_count` and `lag`. No other method is thread-safe.
    """

    def __init__(self, name: str, using: str = DEFAULT_DB_ALIAS) -> None:
        self._name = name
        self._using = using
        self._pk: int | None = None
        self._definition: tuple[DefinedExchange, datetime] | None = None
        self._compiled: CompiledExchange | None = None
        self._running_pks: tuple[int, ...] = ()
        self._new_counts: SimpleQueue[Sequence[TaskCounts]] = SimpleQueue()
        self._element_counts: dict[int, int] = {}
        self._rules = MissingRuleCheck()
        # Check the rules at the start, after a refused call, and while rules are missing.
        self._may_lack_rules = True
        self.counter_store = CounterStore(using)

    def add_counts(self, batch_id: int, counts: Sequence[TaskCounts]) -> None:
        """Record the counts of a micro-batch."""
        if len(self._element_counts) >= _MAX_COUNTED_BATCHES:
            del self._element_counts[min(self._element_counts)]
        self._element_counts[batch_id] = sum(
            each.number for each in counts if each.outcome in ELEMENT_OUTCOMES
        )
        self._new_counts.put(counts)

    def element_count(self, batch_id: int) -> int:
        """Return how many elements a micro-batch has finished; 0 if this is unknown."""
        return self._element_counts.get(batch_id, 0)

    def read(self) -> CompiledExchange | None:
        """Read and compile the exchange; return None if it is stopped or cannot run.

        Raises Exchange.DoesNotExist if the exchange was deleted.
        """
        row = repository.rows(self._using).get(name=self._name)
        self._pk = row.pk
        definition = (repository.to_definition(row), row.changed_at)
        if definition != self._definition:
            self._definition = definition
            self._compiled = self._compile(definition[0])
        exchange = self._compiled if row.is_running else None
        self._running_pks = () if exchange is None else (row.pk,)
        if exchange is None:
            self.counter_store.set_state(row.pk, [], is_failing=False)
        return exchange

    def _compile(self, definition: DefinedExchange) -> CompiledExchange | None:
        """Compile a definition; if this fails, log the first error and return None."""
        queues = sorted(definition.queues, key=str)
        errors = [error for queue in queues if (error := namespace_error(queue.namespace))]
        try:
            if not errors:
                return repository.compile_exchange(definition)
        except (MalformedExchanges, MessagesError) as error:
            errors.append(error_line(error))
        logger.warning("exchange %s cannot run: %s", self._name, errors[0])
        return None

    def lag(self) -> float | None:
        """Return for how many seconds the oldest element has been available; 0 if there is none.

        Returns None if the exchange cannot run. Raises ServerUnreachable if the source's database
        is unreachable, and MessagesError if the role may not read the table of elements.
        """
        if self._compiled is None:
            return None
        source = self._compiled.source
        elements = Element.objects.using(source.namespace).filter(queue__name=source.name)
        waiting = elements.filter(available_at__lte=Now()).order_by("available_at")
        try:
            times = waiting.values_list("available_at", Now()).first()
        except (OperationalError, InterfaceError) as error:
            raise ServerUnreachable(error_line(error)) from error
        except DatabaseError as error:
            raise MessagesError(error_line(error)) from error
        return 0.0 if times is None else max((times[1] - times[0]).total_seconds(), 0.0)

    def write(self) -> None:
        """Write the counters and the current time; check the rules if one may be missing."""
        if self._pk is None:
            return
        counters = self.counter_store.of(self._pk)
        while not self._new_counts.empty():
            for counts in self._new_counts.get():
                counts.add_to(counters)
                self._may_lack_rules = self._may_lack_rules or counts.may_lack_rules
        self.counter_store.mark_written(
            self.counter_store.write(self.counter_store.list_rows(self._running_pks))
        )
        may_lack_rules = self._running_pks and (self._may_lack_rules or self._rules.rules)
        if may_lack_rules and self._definition is not None and self._rules.is_due:
            self._may_lack_rules = False
            self._rules.check(self._definition[0], self._using)
            self.counter_store.set_state(self._pk, self._rules.describe(), is_failing=False)


_SYNC_SECONDS: Final = 0.5
_WRITE_SECONDS: Final = 2.0


class DefinitionSync(Thread):
    """Thread that applies changes of the definition and writes the counters while Spark runs."""

    def __init__(
        self,
        name: str,
        state: SparkExchangeState,
        exchanges: SparkExchanges,
        print_line: Callable[[str], object],
    ) -> None:
        super().__init__(name=f"exchange {name}")
        self._exchange_name = one_line(name)
        self._state = state
        self._exchanges = exchanges
        self._print_line = print_line
        self._write_at = 0.0
        self._last_text = ""
        self._is_stopping = Event()
        self._error: BaseException | None = None

    def apply_definition(self) -> None:
        """Apply the current definition; raise Exchange.DoesNotExist if it was deleted."""
        exchange = self._state.read()
        self._exchanges.define([] if exchange is None else [exchange])
        if exchange is None:
            self._say(f"{self._exchange_name} is stopped")
        else:
            self._say(f"running {self._exchange_name}; press Ctrl-C to stop")

    def run(self) -> None:
        """Apply changes and write counters until `close`, an error, or the exchange's deletion."""
        try:
            while not self._is_stopping.wait(_SYNC_SECONDS):
                self._sync()
        except Exchange.DoesNotExist:
            self._say(f"{self._exchange_name} was deleted")
            self._exchanges.stop()
        except BaseException as error:  # noqa: BLE001 - raised again by close()
            self._error = error
            self._exchanges.stop()
        finally:
            connections.close_all()

    def close(self) -> None:
        """Stop the thread. Raise the error that ended it, or else write the last counters."""
        self._is_stopping.set()
        self.join()
        if self._error is not None:
            raise self._error
        try:
            self._state.write()
        except (OperationalError, InterfaceError) as error:
            self._say(f"could not write the last counters: {error_line(error)}")

    def _sync(self) -> None:
        try:
            self.apply_definition()
            if monotonic() >= self._write_at:
                self._state.write()
                self._write_at = monotonic() + _WRITE_SECONDS
        except (OperationalError, InterfaceError) as error:
            connections.close_all()
            self._say(f"could not read the definition or write counters: {error_line(error)}")

    def _say(self, text: str) -> None:
        """Print a line, unless it equals the last printed line."""
        if text != self._last_text:
            self._last_text = text
            self._print_line(text)


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the exchange")
    parser.add_argument(
        "--tasks",
        type=positive,
        help="number of parallel tasks; each works like a process of `exchange run` (default: one"
        " per core)",
    )
    parser.add_argument(
        "--span",
        metavar="SECONDS",
        type=positive,
        default=5,
        help="maximum duration of a batch; changes of the exchange take effect with the next batch"
        " (default: 5)",
    )
    parser.add_argument(
        "--module",
        metavar="MODULE",
        action="append",
        default=[],
        help="module with selectors in code, imported on executors; repeatable",
    )
    parser.add_argument("--once", action="store_true", help="stop when the queue is empty")


def run(arguments: Namespace) -> int:
    """Run until Ctrl-C, until the exchange is deleted, or with --once until its queue is empty."""
    from psqlmessages.pipeline.exchange.driver import SparkExchanges

    name = arguments.name
    if not Exchange.objects.using(arguments.database).filter(name=name).exists():
        return fail(f"there is no exchange {name}")
    with JobContext(f"exchange {name}", arguments) as context:
        # The namespace "default" is Django's alias "default", even with another --database.
        os.environ["PSQLMESSAGES_DSN"] = direct_dsn(DEFAULT_DB_ALIAS)
        state = SparkExchangeState(name, arguments.database)
        exchanges = SparkExchanges(
            context.spark,
            state.add_counts,
            tasks=arguments.tasks,
            span=arguments.span,
            modules=arguments.module,
        )
        sync = DefinitionSync(name, state, exchanges, context.say)
        sync.apply_definition()
        query = exchanges.start(once=arguments.once)
        sync.start()
        try:
            context.follow(
                query, state.lag, count_rows=lambda batch: state.element_count(int(batch.batchId))
            )
        finally:
            sync.close()
        context.say(f"stopped: {state.counter_store.summary()}")
    return 0


COMMAND = CliCommand("exchange", "run an exchange on Spark, until Ctrl-C", _configure, run)
