"""Command pipeline exchange: run exchanges on Spark."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Final

from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connections

from psqlmessages.cli.output import fail, one_line, positive
from psqlmessages.conf import get_settings
from psqlmessages.management.pipeline import JobContext
from psqlmessages.management.spark_exchange_state import SparkExchangeState
from psqlmessages.models import Exchange
from psqlmessages.orm import dsn
from psqlmessages.retry import error_line

if TYPE_CHECKING:
    from psqlmessages.pipeline.exchange.driver import SparkExchanges


# Definition sync: a thread that uses Django while the query runs.

_LOOK_SECONDS: Final = 0.5
_WRITE_SECONDS: Final = 2.0


class DefinitionSync(Thread):
    """Applies changes of the definition and writes the counters while Spark runs."""

    def __init__(
        self,
        name: str,
        state: SparkExchangeState,
        exchanges: SparkExchanges,
        say: Callable[[str], object],
    ) -> None:
        super().__init__(name=f"exchange {name}")
        self._name = one_line(name)
        self._state = state
        self._exchanges = exchanges
        self._tell = say
        self._write_at = 0.0
        self._said = ""
        self._ending = Event()
        self._error: BaseException | None = None

    def look(self) -> None:
        """Apply the current definition; raise Exchange.DoesNotExist if it was deleted."""
        exchange = self._state.look()
        self._exchanges.define([] if exchange is None else [exchange])
        state = f"{self._name} is stopped" if exchange is None else f"running {self._name}"
        self._say(state if exchange is None else f"{state}; press Ctrl-C to stop")

    def run(self) -> None:
        """Repeat until closed; if the exchange is deleted, stop its query."""
        try:
            while not self._ending.wait(_LOOK_SECONDS):
                self._supervise()
        except Exchange.DoesNotExist:
            self._say(f"{self._name} is removed")
            self._exchanges.stop()
        except BaseException as error:  # noqa: BLE001 - raised again by close()
            self._error = error
            self._exchanges.stop()
        finally:
            connections.close_all()

    def close(self) -> None:
        """Stop the thread and write the last counters; raise the error of the thread, if any."""
        self._ending.set()
        self.join()
        if self._error is not None:
            raise self._error
        try:
            self._state.write()
        except (OperationalError, InterfaceError) as error:
            self._say(f"could not write the last counters: {error_line(error)}")

    def _supervise(self) -> None:
        try:
            self.look()
            if monotonic() >= self._write_at:
                self._state.write()
                self._write_at = monotonic() + _WRITE_SECONDS
        except (OperationalError, InterfaceError) as error:
            connections.close_all()
            self._say(f"could not read the definition: {error_line(error)}")

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._tell(text)


NAME = "exchange"
HELP = "run an exchange on Spark, until Ctrl-C"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", metavar="NAME", help="the exchange")
    parser.add_argument(
        "--tasks",
        type=positive,
        help="number of parallel tasks, each like a process of exchange run (default: all cores)",
    )
    parser.add_argument(
        "--span",
        metavar="SECONDS",
        type=positive,
        default=5,
        help="longest duration of a batch; changes take effect with the next batch (default: 5)",
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
    """Run it until Ctrl-C, until it is deleted, or with --once until its queue is empty."""
    name = arguments.name
    if not Exchange.objects.using(arguments.database).filter(name=name).exists():
        return fail(f"there is no exchange {name}")
    with JobContext(f"exchange {name}", arguments) as context:
        # A namespace is an alias of DATABASES, even if --database is another one.
        os.environ["PSQLMESSAGES_DSN"] = dsn(DEFAULT_DB_ALIAS)
        _follow(context)
    return 0


def _follow(context: JobContext) -> None:
    from psqlmessages.pipeline import job_runner
    from psqlmessages.pipeline.exchange.driver import SparkExchanges

    arguments = context.arguments
    state = SparkExchangeState(arguments.name, arguments.database)
    exchanges = SparkExchanges(
        context.spark,
        state.count,
        tasks=arguments.tasks,
        span=arguments.span,
        modules=arguments.module,
    )
    sync = DefinitionSync(arguments.name, state, exchanges, context.say)
    sync.look()
    query = exchanges.start(once=arguments.once)
    sync.start()
    try:
        job_runner.follow(
            query,
            context.record,
            state.lag,
            context.say,
            rows=lambda batch: state.elements(int(batch.batchId)),
            stop_seconds=get_settings().STOP_SECONDS,
        )
    finally:
        sync.close()
    context.say(f"stopped: {state.counter_store.summary()}")
