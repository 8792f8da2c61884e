"""Job runner: follows a streaming query until it stops."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psycopg

from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.shutdown import stopped_by_signals

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

RUNNING, WAITING, STOPPED, FAILED = "running", "waiting", "stopped", "failed"

RECORD_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.25
# How often to check whether the current batch has ended after a stop was requested.
_STOP_POLL_SECONDS: Final = 0.02
_LAG_SECONDS: Final = 0.5
_RATE_SECONDS: Final = 10.0
_STOPPING: Final = "Stopping after the current batch. Press Ctrl-C again to stop now."
_ERROR_LINE: Final = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): (?P<text>.+)$")


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


@dataclass
class _Follower:
    """The state of one query: its reported batches, their rows, the lag."""

    query: StreamingQuery
    record: Callable[[JobProgress], None]
    lag: Callable[[], float | None]
    print: Callable[[str], object]
    rows: Callable[[Any], int]
    progress: JobProgress = JobProgress(RUNNING)
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    recorded_at: float = float("-inf")
    lag_at: float = float("-inf")
    reported: tuple[str, int] = ("", -1)
    dropped: int = 0
    lag_error: str = ""
    is_stopping: bool = False

    def run(self, stop_seconds: float | None) -> None:
        from py4j.protocol import Py4JError
        from pyspark.errors import StreamingQueryException

        try:
            with stopped_by_signals(self.stop, _STOPPING, stop_seconds):
                while not self.query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]
                    self.report()
                    if self.is_stopping:
                        self.wait_for_batch()
                        self.query.stop()
        except StreamingQueryException as error:
            self.fail(sentence(error), error)
        except Py4JError as error:
            # Probably killed by the kernel because memory ran out.
            self.fail("the Java process that runs Spark has ended", error)
        self.report()
        # Include the last batch: the previous measurement may have been taken during it.
        self.measure_lag()
        self.save(state=STOPPED)

    def stop(self) -> None:
        self.is_stopping = True

    def fail(self, text: str, error: Exception) -> NoReturn:
        self.save(state=FAILED, error=text)
        raise JobFailed(text) from error

    def save(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)
        self.recorded_at = monotonic()
        self.record(self.progress)

    def report(self) -> None:
        """Report the batches that have ended, and record the progress every RECORD_SECONDS."""
        for batch in self.ended_batches():
            rows = self.rows(batch)
            self.recent.append((monotonic(), rows))
            self.progress = replace(
                self.progress,
                batch=int(batch.batchId),
                rows=self.progress.rows + rows,
                rows_per_second=self.rate(),
            )
            if rows:
                self.print_batch(batch, rows)
            # Spark counts them after grouping: these are groups, not rows.
            if late := sum(each.numRowsDroppedByWatermark for each in batch.stateOperators):
                self.dropped += late
                self.print(
                    f"too late: {late:,} windows were closed when more messages arrived, and are"
                    f" not updated ({self.dropped:,} since the start)"
                )
        if monotonic() - self.recorded_at >= RECORD_SECONDS:
            self.measure_lag()
            self.save(rows_per_second=self.rate())

    def ended_batches(self) -> list[Any]:
        """Return the batches that have ended since the last call."""
        last = self.query.lastProgress
        if last is None:
            return []
        # While idle, Spark reports the next batch now and then although it has not run.
        number = last.batchId if "addBatch" in last.durationMs else last.batchId - 1
        before, self.reported = self.reported, (str(last.runId), number)
        if before == self.reported:
            return []
        # Spark keeps the last ones: more than can end between two calls.
        return [
            batch
            for batch in self.query.recentProgress
            if "addBatch" in batch.durationMs and batch.batchId > before[1]
        ]

    def rate(self) -> float:
        since = monotonic() - _RATE_SECONDS
        while self.recent and self.recent[0][0] < since:
            self.recent.popleft()
        return sum(rows for _, rows in self.recent) / _RATE_SECONDS

    def print_batch(self, batch: Any, rows: int) -> None:
        if monotonic() - self.lag_at >= _LAG_SECONDS:
            self.measure_lag()
        lag = self.progress.lag_seconds
        behind = "" if lag is None else ", all messages read" if not lag else f", lag {lag:,.1f} s"
        seconds = batch.durationMs["triggerExecution"] / 1000
        self.print(
            f"batch {batch.batchId}: {rows:,} rows in {seconds:.2f} s,"
            f" {rows / max(seconds, 1e-3):,.0f}/s{behind}"
        )

    def measure_lag(self) -> None:
        self.lag_at = monotonic()
        state = RUNNING
        try:
            lag = self.lag()
        except ServerUnreachable:
            lag, state = self.progress.lag_seconds, WAITING
        except (MessagesError, psycopg.Error) as error:
            # Continue: if a permission or topic is missing, the query fails with that error.
            lag = None
            text = f"the lag is unknown: {sentence(error)}"
            if text != self.lag_error:
                self.lag_error = text
                self.print(text)
        if state != self.progress.state:
            self.print("waiting for the database" if state == WAITING else "continuing")
        self.progress = replace(self.progress, state=state, lag_seconds=lag)

    def wait_for_batch(self) -> None:
        """Wait until the current batch has ended, but not for the next one."""
        last = self.reported
        status = self.query.status
        while status["isTriggerActive"] and status["isDataAvailable"] and self.reported == last:
            if self.query.awaitTermination(_STOP_POLL_SECONDS):  # type: ignore[arg-type]
                return
            self.report()
            status = self.query.status


def sentence(error: BaseException) -> str:
    """Return the cause of an error in one line, without the wrapping of Java and Python."""
    text = str(error)
    head, traceback, tail = text.rpartition("Traceback (most recent call last):")
    if traceback:
        for line in tail.splitlines():
            if found := _ERROR_LINE.match(line.strip() if not line.startswith(" ") else ""):
                kind, said = found["kind"], found["text"].strip()
                is_own = kind.startswith("psqlmessages.")
                return said if is_own else f"{kind.rpartition('.')[2]}: {said}"
        text = head
    text = text.partition("terminated with exception: ")[2] or text
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"\s*SQLSTATE: \w+$", "", first) or type(error).__name__
