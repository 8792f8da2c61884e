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

# How long a turn lasts while there is something to take, and how long after that nothing came.
SPAN_SECONDS: Final = 5.0
LINGER_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.02

Record = Callable[[int, Sequence[TaskCounts]], object]


class SparkExchanges:
    """Exchanges that a Spark session runs, in ``tasks`` side by side (default: its cores).

    Each task does what a process of ``exchange run`` does, for a turn: at most ``span`` seconds,
    and less where nothing came for ``linger`` seconds. ``record`` is called in a thread of
    Spark's with the number of each turn and what it has counted. ``modules`` are imported on
    executors, for the selectors in code that they hold. ``dsn_file`` holds the address of the
    namespace default; executors have those of others in the variables PSQLMESSAGES_DSN_<NAME>.
    """

    def __init__(
        self,
        spark: SparkSession,
        record: Record,
        *,
        tasks: int | None = None,
        span: float = SPAN_SECONDS,
        linger: float = LINGER_SECONDS,
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
        """Let these run, and no others, from the next turn on; return whether that is new."""
        text = written(exchanges)
        if text == self._text:
            return False
        self._text = text
        self._edition += 1
        self._folder.put(self._edition, text)
        return True

    @property
    def is_settled(self) -> bool:
        """Whether nothing runs any more by earlier definitions."""
        is_over = self._query is None or not self._query.isActive
        return is_over or self._folder.taken_over == self._edition

    def start(self, *, once: bool = False) -> StreamingQuery:
        """Begin; with ``once`` it ends when there is nothing left to take."""
        self._spark.dataSource.register(ExchangeSource)
        frame = self._spark.readStream.format(FORMAT).option(OPTION, self._settings.as_option())
        trigger: dict[str, Any] = (
            {"availableNow": True} if once else {"processingTime": "0 seconds"}
        )
        self._query = (
            frame.load()
            .writeStream.foreachBatch(self._recorded)
            # Turns are no state to keep: a job that starts again begins with the first one.
            .option("checkpointLocation", (self._home / "checkpoint").as_uri())
            .trigger(**trigger)
            .start()
        )
        return self._query

    def stop(self, seconds: float = 60) -> None:
        """End after the turn at hand, or where that takes longer."""
        self.define(())
        self.settle(seconds)
        if self._query is not None:
            self._query.stop()

    def settle(self, seconds: float) -> bool:
        """Wait until nothing runs by earlier definitions; return whether that is so in time."""
        until = monotonic() + seconds
        while not self.is_settled and self._query is not None and monotonic() < until:
            self._query.awaitTermination(_LOOK_SECONDS)  # type: ignore[arg-type]
        return self.is_settled

    def _recorded(self, frame: DataFrame, turn: int) -> None:
        self._record(turn, [TaskCounts(*row) for row in frame.collect()])
