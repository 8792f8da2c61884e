"""Driver of exchanges on Spark: starts their streaming query, and changes the definitions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.exchanges.model import CompiledExchange
from psqlmessages.pipeline.exchange.definition import DefinitionFolder, dump_exchanges
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
    """Runs exchanges in a Spark session, in ``tasks`` parallel tasks (default: one per core).

    A turn is one micro-batch. In a turn, each task works like a process of ``exchange run``. The
    task ends after ``span`` seconds, or earlier if it finds no elements for ``linger`` seconds.
    After each turn, a Spark thread calls ``record`` with the turn's number and counts. Executors
    import ``modules``, which contain selector functions. They read the addresses of databases from
    the environment variables that `database.dsn` describes.
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
    ) -> None:
        self._spark = spark
        self._record = record
        self._path = Path(tempfile.mkdtemp(prefix="exchange-", dir=driver_folder()))
        self._folder = DefinitionFolder(self._path)
        self._version = 0
        self._text = ""
        self._query: StreamingQuery | None = None
        self._settings = TurnSettings(
            folder=str(self._path),
            tasks=tasks or spark.sparkContext.defaultParallelism,
            span=span,
            linger=linger,
            modules=tuple(modules),
        )
        self.define(())

    def define(self, exchanges: Iterable[CompiledExchange]) -> None:
        """Run only these exchanges from the next turn on."""
        text = dump_exchanges(exchanges)
        if text != self._text:
            self._text = text
            self._version += 1
            self._folder.put(self._version, text)

    def start(self, *, once: bool = False) -> StreamingQuery:
        """Start the query; with ``once``, the query ends when the queues are empty."""
        self._spark.dataSource.register(ExchangeSource)
        trigger: Any = {"availableNow": True} if once else {"processingTime": "0 seconds"}
        self._query = (
            self._spark.readStream.format(FORMAT)
            .option(OPTION, self._settings.as_option())
            .load()
            .writeStream.foreachBatch(self._on_turn)
            # Turns have no state to restore, so the checkpoint may be temporary.
            .option("checkpointLocation", (self._path / "checkpoint").as_uri())
            .trigger(**trigger)
            .start()
        )
        return self._query

    def stop(self, seconds: float = 60) -> None:
        """Stop the query when the current turn has ended, or else after ``seconds``."""
        # Without exchanges, no new turn begins.
        self.define(())
        self.wait_until_current(seconds)
        if self._query is not None:
            self._query.stop()

    def wait_until_current(self, seconds: float) -> bool:
        """Wait until all tasks use the newest definitions; return False on timeout."""
        deadline = monotonic() + seconds
        while self._query is not None and self._query.isActive:
            if self._folder.version_in_use == self._version:
                return True
            if monotonic() >= deadline:
                return False
            self._query.awaitTermination(_POLL_SECONDS)  # type: ignore[arg-type]
        return True

    def _on_turn(self, frame: DataFrame, turn: int) -> None:
        self._record(turn, [TaskCounts(*row) for row in frame.collect()])
