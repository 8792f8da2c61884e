"""Job runner: follows a streaming query until the query ends."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psycopg

from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.shutdown import stop_on_signals

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

RUNNING, WAITING, STOPPED, FAILED = "running", "waiting", "stopped", "failed"

RECORD_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.25
# After a stop was requested, check this often whether the current batch has ended.
_STOP_POLL_SECONDS: Final = 0.02
# Before the line of a batch is printed, measure the lag again if it is older than this.
_LAG_INTERVAL_SECONDS: Final = 0.5
# The rate is an average over this time.
_RATE_PERIOD_SECONDS: Final = 10.0
_ERROR_LINE: Final = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): (?P<text>.+)$")


class JobFailed(MessagesError):
    """A job's query has failed, or its Java process has ended; the text is one line, the cause."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job, as stored in the table of jobs. ``rows`` counts since the start."""

    state: str
    batch: int = -1
    rows: int = 0
    rows_per_second: float = 0.0
    lag_seconds: float | None = None
    error: str = ""


@dataclass
class JobRunner:
    """Follows a query: prints a line for each batch with rows, and records the progress.

    ``lag`` returns seconds (None: unknown). If ``lag`` raises ServerUnreachable, the job's state is
    "waiting"; after other database errors the lag is unknown. ``count_rows`` returns the number of
    rows in Spark's progress of a batch.
    """

    query: StreamingQuery
    record: Callable[[JobProgress], None]
    lag: Callable[[], float | None]
    print_line: Callable[[str], object]
    count_rows: Callable[[Any], int] = lambda batch: int(batch.numInputRows)
    _progress: JobProgress = JobProgress(RUNNING)
    # Time and number of rows of each recent batch.
    _recent_batches: deque[tuple[float, int]] = field(default_factory=deque)
    _recorded_at: float = float("-inf")
    _lag_measured_at: float = float("-inf")
    # Id of Spark's run, and number of the last batch that was reported.
    _last_reported: tuple[str, int] = ("", -1)
    _late_windows: int = 0
    _lag_error: str = ""
    _is_stopping: bool = False

    def run(self, stop_seconds: float | None = None) -> None:
        """Wait until the query ends; raise JobFailed if it fails. Call this in the main thread.

        SIGINT and SIGTERM stop the query after the current batch. The process ends immediately
        after a second signal, or if the batch takes longer than ``stop_seconds``.
        """
        from py4j.protocol import Py4JError
        from pyspark.errors import StreamingQueryException

        try:
            with stop_on_signals(self._stop, "batch", stop_seconds):
                while not self.query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]
                    self._report()
                    if self._is_stopping:
                        self._wait_for_batch()
                        self.query.stop()
        except StreamingQueryException as error:
            self._fail(cause_line(error), error)
        except Py4JError as error:
            # The kernel has probably killed Java because memory ran out.
            self._fail("the Java process that runs Spark has ended", error)
        self._report()
        # Measure again: the previous measurement may have been taken during the last batch.
        self._measure_lag()
        self._save(state=STOPPED)

    def _stop(self) -> None:
        self._is_stopping = True

    def _fail(self, text: str, error: Exception) -> NoReturn:
        self._save(state=FAILED, error=text)
        raise JobFailed(text) from error

    def _save(self, **changes: Any) -> None:
        self._progress = replace(self._progress, **changes)
        self._recorded_at = monotonic()
        self.record(self._progress)

    def _report(self) -> None:
        """Report the batches that have ended, and record the progress every RECORD_SECONDS."""
        for batch in self._ended_batches():
            rows = self.count_rows(batch)
            self._recent_batches.append((monotonic(), rows))
            self._progress = replace(
                self._progress,
                batch=int(batch.batchId),
                rows=self._progress.rows + rows,
                rows_per_second=self._rate(),
            )
            if rows:
                self._print_batch(batch, rows)
            # Spark's "rows" are groups here: windows that were closed when rows for them arrived.
            late = sum(state.numRowsDroppedByWatermark for state in batch.stateOperators)
            if late:
                self._late_windows += late
                self.print_line(
                    f"too late: {late:,} windows were closed before all their messages arrived."
                    f" Late messages are not counted ({self._late_windows:,} windows since the"
                    " start)"
                )
        if monotonic() - self._recorded_at >= RECORD_SECONDS:
            self._measure_lag()
            self._save(rows_per_second=self._rate())

    def _ended_batches(self) -> list[Any]:
        """Return the batches that have ended since the last call."""
        last = self.query.lastProgress
        if last is None:
            return []
        # While idle, Spark sometimes reports the next batch before it has run, without "addBatch".
        number = last.batchId if "addBatch" in last.durationMs else last.batchId - 1
        previous, self._last_reported = self._last_reported, (str(last.runId), number)
        if previous == self._last_reported:
            return []
        # Spark's list is long enough: fewer batches end between two calls.
        return [
            batch
            for batch in self.query.recentProgress
            if "addBatch" in batch.durationMs and batch.batchId > previous[1]
        ]

    def _rate(self) -> float:
        oldest = monotonic() - _RATE_PERIOD_SECONDS
        while self._recent_batches and self._recent_batches[0][0] < oldest:
            self._recent_batches.popleft()
        return sum(rows for _, rows in self._recent_batches) / _RATE_PERIOD_SECONDS

    def _print_batch(self, batch: Any, rows: int) -> None:
        if monotonic() - self._lag_measured_at >= _LAG_INTERVAL_SECONDS:
            self._measure_lag()
        lag_text = ""
        if (lag := self._progress.lag_seconds) is not None:
            lag_text = f", lag {lag:,.1f} s" if lag else ", all messages read"
        seconds = batch.durationMs["triggerExecution"] / 1000
        self.print_line(
            f"batch {batch.batchId}: {rows:,} rows in {seconds:.2f} s,"
            f" {rows / max(seconds, 1e-3):,.0f}/s{lag_text}"
        )

    def _measure_lag(self) -> None:
        self._lag_measured_at = monotonic()
        state = RUNNING
        try:
            lag = self.lag()
        except ServerUnreachable:
            lag, state = self._progress.lag_seconds, WAITING
        except (MessagesError, psycopg.Error) as error:
            # If a permission or topic is missing, the query itself fails with the same error.
            lag = None
            text = f"the lag is unknown: {cause_line(error)}"
            if text != self._lag_error:
                self._lag_error = text
                self.print_line(text)
        if state != self._progress.state:
            self.print_line("waiting for the database" if state == WAITING else "continuing")
        self._progress = replace(self._progress, state=state, lag_seconds=lag)

    def _wait_for_batch(self) -> None:
        """Wait until the current batch has ended; return immediately if none is running."""
        previous = self._last_reported
        while (status := self.query.status)["isTriggerActive"] and status["isDataAvailable"]:
            if self.query.awaitTermination(_STOP_POLL_SECONDS):  # type: ignore[arg-type]
                return
            self._report()
            if self._last_reported != previous:
                return


def cause_line(error: BaseException) -> str:
    """Return the cause of an error in one line, without the traces of Java and Python."""
    text = str(error)
    head, traceback, tail = text.rpartition("Traceback (most recent call last):")
    if traceback:
        for line in tail.splitlines():
            # Skip the lines of the stack, which are indented.
            if not line.startswith(" ") and (match := _ERROR_LINE.match(line.strip())):
                kind, message = match["kind"], match["text"].strip()
                is_own = kind.startswith("psqlmessages.")
                return message if is_own else f"{kind.rpartition('.')[2]}: {message}"
        text = head
    text = text.partition("terminated with exception: ")[2] or text
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"\s*SQLSTATE: \w+$", "", first) or type(error).__name__
