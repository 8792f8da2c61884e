"""Exchanges on Spark: the driver."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.exchanges.model import CompiledExchange
from psqlmessages.pipeline.exchange.definition import DefinitionFolder, written
from psqlmessages.pipeline.exchange.source import (
    FORMAT,
    OPTION,
    ExchangeSource,
    TaskCounts,
    TurnSettings,
)
from psqlmessages.pipeline.private_folder import driver_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_SECONDS: Final = 0.02


class SparkExchanges:
    """Runs exchanges in a Spark session, in parallel ``tasks`` (default: the number of cores).

    A turn is one micro-batch. In a turn, each task works like a process of ``exchange run``: for
    ``span`` seconds at most, and until it has found nothing for ``linger`` seconds. A Spark thread
    calls ``record`` with the number and the counts of each turn. Executors import ``modules``,
    which contain selector functions. ``dsn_file`` holds the address of the namespace default;
    executors read other addresses from the variables PSQLMESSAGES_DSN_<NAME>.
    """

    def __init__(
        self,
        spark: SparkSession,
        record: Callable[[int, Sequence[TaskCounts]], object],
        *,
        tasks: int | None = None,
        span: float = 5.0,
        linger: float = 1.0,
        modules: Sequence[str] = (),
        dsn_file: str | None = None,
    ) -> None:
        self._spark = spark
        self._record = record
        self._home = Path(tempfile.mkdtemp(prefix="exchange-", dir=driver_folder()))
        self._folder = DefinitionFolder(self._home)
        self._edition = 0
        self._text = ""
        self._query: StreamingQuery | None = None
        self._settings = TurnSettings(
            folder=str(self._home),
            tasks=tasks or spark.sparkContext.defaultParallelism,
            span=span,
            linger=linger,
            modules=tuple(modules),
            dsn_file=dsn_file,
        )
        self.define(())

    def define(self, exchanges: Iterable[CompiledExchange]) -> bool:
        """Run exactly these exchanges from the next turn on; return whether they have changed."""
        text = written(exchanges)
        if text == self._text:
            return False
        self._text = text
        self._edition += 1
        self._folder.put(self._edition, text)
        return True

    @property
    def is_settled(self) -> bool:
        """Whether no task uses earlier definitions."""
        is_over = self._query is None or not self._query.isActive
        return is_over or self._folder.taken_over == self._edition

    def start(self, *, once: bool = False) -> StreamingQuery:
        """Start the query; with ``once``, it ends when the queues are empty."""
        self._spark.dataSource.register(ExchangeSource)
        trigger: dict[str, Any] = (
            {"availableNow": True} if once else {"processingTime": "0 seconds"}
        )
        self._query = (
            self._spark.readStream.format(FORMAT)
            .option(OPTION, self._settings.as_option())
            .load()
            .writeStream.foreachBatch(self._on_turn)
            # Turns have no state to restore: a restarted job begins with the first turn.
            .option("checkpointLocation", (self._home / "checkpoint").as_uri())
            .trigger(**trigger)
            .start()
        )
        return self._query

    def stop(self, seconds: float = 60) -> None:
        """Stop after the current turn, or after this number of seconds."""
        self.define(())
        self.settle(seconds)
        if self._query is not None:
            self._query.stop()

    def settle(self, seconds: float) -> bool:
        """Wait until no task uses earlier definitions; return False if the time is over before."""
        until = monotonic() + seconds
        while not self.is_settled and self._query is not None and monotonic() < until:
            self._query.awaitTermination(_POLL_SECONDS)  # type: ignore[arg-type]
        return self.is_settled

    def _on_turn(self, frame: DataFrame, turn: int) -> None:
        self._record(turn, [TaskCounts(*row) for row in frame.collect()])
