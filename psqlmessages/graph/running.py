"""Running: the process of `exchange run`, until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Final

from django.db import DEFAULT_DB_ALIAS

from psqlmessages.commands.output import Progress
from psqlmessages.conf import get_settings
from psqlmessages.graph.counted import ELEMENT_OUTCOMES
from psqlmessages.graph.worker import Worker
from psqlmessages.models import Exchange
from psqlmessages.stopping import stopped_by_signals

_STOPPING: Final = "ends after what is in hand; once more ends it at once"


def run(names: Sequence[str], using: str = DEFAULT_DB_ALIAS) -> int:
    """Run exchanges, all or those named, until SIGINT or SIGTERM; return the exit code."""
    there = set(Exchange.objects.using(using).values_list("name", flat=True))
    if unknown := sorted(set(names) - there):
        print(f"psqlmessages: there is no exchange {', '.join(unknown)}", file=sys.stderr)
        return 1
    with Progress("routed") as progress:
        worker = Worker(names, using)
        show = _shower(worker, progress)
        asyncio.run(_run(worker, show))
        progress.count = worker.ledger.elements
        progress.say(_summary(worker))
    return 0


async def _run(worker: Worker, show: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # In the loop, which a signal handler may have interrupted anywhere.
        loop.call_soon_threadsafe(worker.stop)

    with stopped_by_signals(stop, _STOPPING, get_settings().STOP_SECONDS):
        await worker.run(show)


def _shower(worker: Worker, progress: Progress) -> Callable[[], None]:
    """Make what shows the rate, and which exchanges run where that changes."""
    shown: list[str] | None = None

    def show() -> None:
        nonlocal shown
        if (running := worker.running) != shown:
            shown = running
            what = ", ".join(running) if running else "no exchange (exchange load defines some)"
            progress.say(f"runs {what}; Ctrl-C ends it")
        # A process that has nothing to do says nothing.
        if progress.count != (count := worker.ledger.elements):
            progress.count = count
            progress.show()

    return show


def _summary(worker: Worker) -> str:
    tallies = worker.ledger.tallies.values()
    outcomes = ", ".join(
        f"{sum(tally.count(outcome) for tally in tallies):,} {outcome.label}"
        for outcome in ELEMENT_OUTCOMES
    )
    failures = sum(tally.selector_failures for tally in tallies)
    return f"stopped: {outcomes}; {failures:,} selectors failed"
