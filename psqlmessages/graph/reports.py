"""Reports: what loops tell of their work, in tallies and in the log at a bounded rate."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from psqlmessages.client.backoff import QuietLog
from psqlmessages.exceptions import MessagesError, NotAuthorized
from psqlmessages.graph.tallies import Tally

if TYPE_CHECKING:
    from psqlmessages.graph.batches import Batch
    from psqlmessages.graph.plans import Plan

logger = logging.getLogger("psqlmessages")


class Reports:
    """What the loops of an exchange tell."""

    def __init__(self, plan: Plan, tally: Tally) -> None:
        self._plan = plan
        self._tally = tally
        self._log = QuietLog(logger)
        self.has_refusals = False

    @property
    def _name(self) -> str:
        return self._plan.graphed.name

    def _place(self, target: int) -> str:
        return str(self._plan.graphed.targets[target].place) if target >= 0 else "what is put aside"

    def finished(self, batch: Batch, seconds: float) -> None:
        """Count what became of a batch, and tell of what went wrong."""
        for outcome, (number, selector_seconds) in batch.outcomes().items():
            self._tally.finished(outcome, number, seconds, selector_seconds)
        for target, number in batch.copied().items():
            self._tally.copied(target, number)
        if batch.lost:
            self._log.warning(
                "exchange %s: %d elements are not in its hands any more: others have them",
                self._name, len(batch.lost),
            )  # fmt: skip
        for target, why in batch.selector_errors:
            self._tally.failed_to_select(target)
            self._log.warning(
                "exchange %s: the selector of %s failed, which counts as no: %s",
                self._name, self._place(target), why,
            )  # fmt: skip
        for mishap in batch.mishaps:
            self.has_refusals = True
            self._log.warning(
                "exchange %s: no copy for %s: %s",
                self._name, self._place(mishap.target), mishap.why,
            )  # fmt: skip

    def failed(self, error: Exception) -> None:
        """Tell why a loop has to wait."""
        self._tally.waits += 1
        name, text = self._name, " ".join(str(error).split())
        if isinstance(error, MessagesError):
            self.has_refusals = self.has_refusals or isinstance(error, NotAuthorized)
            self._log.warning("exchange %s waits: %s", name, text)
        else:
            self._log.warning("exchange %s waits: %s: %s", name, type(error).__name__, text)

    def unexpected(self, error: Exception) -> None:
        """Tell of a fault of ours, with its stack."""
        self._log.warning("exchange %s: unexpected error", self._name, exc_info=error)
