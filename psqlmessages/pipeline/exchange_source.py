"""The data source by which Spark runs exchanges: its rows are what was counted.

An offset is the number of a turn and says nothing of elements: that each is moved once is the
queues' own matter. A turn that Spark repeats takes what is there by then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.pipeline import dsn
from psqlmessages.pipeline.exchange_definition import compiled, sources
from psqlmessages.pipeline.exchange_folder import Folder
from psqlmessages.pipeline.exchange_lookout import Lookout
from psqlmessages.pipeline.exchange_share import Counts, Share
from psqlmessages.pipeline.options import refuse_unknown

FORMAT: Final = "psqlmessages-exchange"
OPTION: Final = "settings"
# How long the driver waits at a time, and so how late it hears of new definitions and of its end.
_WAIT_SECONDS: Final = 0.5
_SCHEMA: Final = (
    "exchange string, outcome string, destination int, count bigint, seconds double,"
    " buckets array<bigint>, selector_seconds double"
)


@dataclass(frozen=True)
class TurnSettings:
    """How a turn is shared out; ``dsn_file`` holds the address of the namespace default."""

    folder: str
    tasks: int
    span: float
    linger: float
    modules: tuple[str, ...] = ()
    dsn_file: str | None = None

    def as_option(self) -> str:
        """Write them as the one option of the source."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, options: Mapping[str, str]) -> TurnSettings:
        """Read them from the options; raises OptionRefused."""
        refuse_unknown(options, (OPTION,))
        given = json.loads(options[OPTION])
        return cls(**{**given, "modules": tuple(given["modules"])})

    def address(self, namespace: str) -> str:
        """Return the address of a namespace's database, as this process is told; or DsnMissing."""
        is_named = self.dsn_file is not None and namespace == "default"
        return dsn.dsn({dsn.OPTION: str(self.dsn_file)} if is_named else None, namespace)


class ExchangeSource(DataSource):
    """Runs exchanges as long as it is read."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of :class:`Counts`."""
        return _SCHEMA

    def streamReader(self, schema: StructType) -> ExchangeReader:  # noqa: N802
        """Return what runs them."""
        return ExchangeReader(TurnSettings.of(self.options))


class ExchangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offers a turn whenever a source has something to take, and shares it out among tasks."""

    def __init__(self, settings: TurnSettings) -> None:
        self._settings = settings
        self._lookout: Lookout | None = None
        self._turn = -1
        self._wait_seconds = _WAIT_SECONDS

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Begin with the first turn."""
        return {"turn": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End as soon as there is nothing to take."""
        self._wait_seconds = 0.0

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Wait a little for something to take; offer another turn where there is something."""
        if self._lookout is None:
            self._lookout = Lookout(self._settings.address)
        turn = start["turn"]
        if turn != self._turn:
            self._turn = turn
            self._lookout.rouse()
        # The turn before this offset has ended, and what comes goes by what is read here.
        folder = Folder(Path(self._settings.folder))
        edition, text = folder.get()
        if edition != folder.taken_over:
            folder.take_over(edition)
        has_work = self._lookout.has_work(sources(text), self._wait_seconds)
        return {"turn": turn + 1 if has_work else turn}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return a share for each task."""
        _, text = Folder(Path(self._settings.folder)).get()
        return [InputPartition(text) for _ in range(self._settings.tasks)]

    def read(self, partition: InputPartition) -> Iterator[Counts]:
        """Run the loops for a while; on an executor."""
        settings = self._settings
        exchanges = compiled(partition.value, settings.modules)
        share = Share(exchanges, settings.address, span=settings.span, linger=settings.linger)
        yield from share.work()

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: what was taken is committed."""

    def stop(self) -> None:
        """Disconnect."""
        if self._lookout is not None:
            self._lookout.close()
