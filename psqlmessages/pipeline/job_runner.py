"""Job runner: follows a streaming query until it stops."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psycopg

from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.shutdown import stopped_by_signals

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

RUNNING, WAITING, STOPPED, FAILED = "running", "waiting", "stopped", "failed"

RECORD_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.25
# How often to check whether the current batch has ended after a stop was requested.
_STOP_LOOK_SECONDS: Final = 0.02
_LAG_SECONDS: Final = 0.5
_RATE_SECONDS: Final = 10.0
_STOPPING: Final = "Stopping after the current batch. Press Ctrl-C again to stop now."
_TRACEBACK: Final = "Traceback (most recent call last):"
_ERROR_LINE: Final = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): (?P<text>.+)$")
_OWN: Final = "psqlmessages."


class JobFailed(MessagesError):
    """The query of a job has failed; the text is its error in one line."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job, as stored in the table of jobs."""

    state: str
    batch: int = -1
    rows: int = 0
    rows_per_second: float = 0.0
    lag_seconds: float | None = None
    error: str = ""


def follow(
    query: StreamingQuery,
    record: Callable[[JobProgress], None],
    lag: Callable[[], float | None],
    print: Callable[[str], object] = print,  # noqa: A002 - it replaces print
    rows: Callable[[Any], int] = lambda batch: int(batch.numInputRows),
    stop_seconds: float | None = None,
) -> None:
    """Wait until the query ends; print a line for each batch, and record every two seconds.

    SIGINT and SIGTERM end it after the current batch. A second one ends the process immediately;
    it also ends if that batch takes longer than ``stop_seconds``.
    ``rows`` returns the number of rows of a batch from Spark's progress of it.
    ``lag`` returns seconds (None: unknown). If it raises ServerUnreachable, the job's state is
    waiting for the database. After other database errors the lag is unknown. Must be called in
    the main thread. Raises JobFailed with the query's error.
    """
    _Follower(query, record, lag, print, rows).run(stop_seconds)


class _Follower:
    """The state of one query: its reported batches, their rows, the lag."""

    def __init__(
        self,
        query: StreamingQuery,
        record: Callable[[JobProgress], None],
        lag: Callable[[], float | None],
        say: Callable[[str], object],
        rows: Callable[[Any], int],
    ) -> None:
        self._query = query
        self._record = record
        self._lag = lag
        self._say = say
        self._rows = rows
        self._now = JobProgress(RUNNING)
        self._recent: deque[tuple[float, int]] = deque()
        self._recorded_at = self._lag_at = float("-inf")
        self._reported: tuple[str, int] = ("", -1)
        self._dropped = 0
        self._said = ""
        self._is_stopping = False

    def run(self, stop_seconds: float | None) -> None:
        from py4j.protocol import Py4JError
        from pyspark.errors import StreamingQueryException

        try:
            with stopped_by_signals(self._stop, _STOPPING, stop_seconds):
                while not self._query.awaitTermination(_LOOK_SECONDS):  # type: ignore[arg-type]
                    self._look()
                    if self._is_stopping:
                        self._end_batch()
                        self._query.stop()
        except StreamingQueryException as error:
            self._fail(sentence(error), error)
        except Py4JError as error:
            # Probably killed by the kernel because memory ran out.
            self._fail("the Java process that runs Spark has ended", error)
        self._look()
        # Include the last batch: the previous measurement may have been taken during it.
        self._measure_lag()
        self._now = replace(self._now, state=STOPPED)
        self._keep()

    def _fail(self, text: str, error: Exception) -> NoReturn:
        self._now = replace(self._now, state=FAILED, error=text)
        self._keep()
        raise JobFailed(text) from error

    def _look(self) -> None:
        """Report the batches that have ended, and record the progress every RECORD_SECONDS."""
        for batch in self._ended():
            self._add(batch)
            if self._rows(batch):
                self._say(self._line(batch))
            self._tell_dropped(batch)
        if monotonic() - self._recorded_at >= RECORD_SECONDS:
            self._now = replace(self._now, rows_per_second=self._rate())
            self._measure_lag()
            self._keep()

    def _ended(self) -> list[Any]:
        last = self._query.lastProgress
        if last is None or self._mark(last) == self._reported:
            return []
        # Spark keeps the last ones: more than can end between two calls.
        found = [each for each in self._query.recentProgress if self._is_new(each)]
        self._reported = self._mark(last)
        return found

    def _mark(self, batch: Any) -> tuple[str, int]:
        # While idle, Spark reports the next batch now and then although it has not run.
        is_batch = "addBatch" in batch.durationMs
        return (str(batch.runId), batch.batchId if is_batch else batch.batchId - 1)

    def _is_new(self, batch: Any) -> bool:
        return "addBatch" in batch.durationMs and int(batch.batchId) > self._reported[1]

    def _add(self, batch: Any) -> None:
        self._recent.append((monotonic(), self._rows(batch)))
        self._now = replace(
            self._now,
            batch=int(batch.batchId),
            rows=self._now.rows + self._rows(batch),
            rows_per_second=self._rate(),
        )

    def _rate(self) -> float:
        since = monotonic() - _RATE_SECONDS
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()
        return sum(rows for _, rows in self._recent) / _RATE_SECONDS

    def _line(self, batch: Any) -> str:
        if monotonic() - self._lag_at >= _LAG_SECONDS:
            self._measure_lag()
        lag = self._now.lag_seconds
        behind = "" if lag is None else ", all messages read" if not lag else f", lag {lag:,.1f} s"
        seconds = batch.durationMs["triggerExecution"] / 1000
        return (
            f"batch {batch.batchId}: {self._rows(batch):,} rows in {seconds:.2f} s,"
            f" {self._rows(batch) / max(seconds, 1e-3):,.0f}/s{behind}"
        )

    def _tell_dropped(self, batch: Any) -> None:
        # Spark counts them after grouping: these are groups, not rows.
        if late := sum(each.numRowsDroppedByWatermark for each in batch.stateOperators):
            self._dropped += late
            self._say(
                f"too late: {late:,} windows were closed when more messages arrived, and are not"
                f" updated ({self._dropped:,} since the start)"
            )

    def _measure_lag(self) -> None:
        self._lag_at = monotonic()
        state = RUNNING
        try:
            lag = self._lag()
        except ServerUnreachable:
            lag, state = self._now.lag_seconds, WAITING
        except (MessagesError, psycopg.Error) as error:
            # Continue: if a permission or topic is missing, the query fails with that error.
            lag = None
            self._say_once(f"the lag is unknown: {sentence(error)}")
        if state != self._now.state:
            self._say("waiting for the database" if state == WAITING else "continuing")
        self._now = replace(self._now, state=state, lag_seconds=lag)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _keep(self) -> None:
        self._recorded_at = monotonic()
        self._record(self._now)

    def _end_batch(self) -> None:
        """Wait until the current batch has ended, but not for the next one."""
        last = self._reported
        while self._is_in_batch():
            if self._query.awaitTermination(_STOP_LOOK_SECONDS):  # type: ignore[arg-type]
                return
            self._look()
            if self._reported != last:
                return

    def _is_in_batch(self) -> bool:
        status = self._query.status
        return bool(status["isTriggerActive"] and status["isDataAvailable"])

    def _stop(self) -> None:
        self._is_stopping = True


def sentence(error: BaseException) -> str:
    """Return the cause of an error in one line, without the wrapping of Java and Python."""
    text = str(error)
    head, traceback, tail = text.rpartition(_TRACEBACK)
    if traceback:
        for line in tail.splitlines():
            if found := _ERROR_LINE.match(line.strip() if not line.startswith(" ") else ""):
                kind, said = found["kind"], found["text"].strip()
                return said if kind.startswith(_OWN) else f"{kind.rpartition('.')[2]}: {said}"
        text = head
    text = text.partition("terminated with exception: ")[2] or text
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"\s*SQLSTATE: \w+$", "", first) or type(error).__name__
