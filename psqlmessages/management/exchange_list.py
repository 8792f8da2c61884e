"""exchange list: the exchanges, whether they run, who runs them, and what they have done."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from datetime import timedelta

from django.db.models import Count, Sum
from django.db.models.functions import Now

from psqlmessages.commands.output import one_line, table
from psqlmessages.graph import stored
from psqlmessages.graph.counted import ALIVE_SECONDS, ELEMENT_OUTCOMES
from psqlmessages.models import ExchangeCount

_HEAD = ("exchange", "state", "processes", "source", "destinations")


def run(arguments: Namespace) -> int:
    """Print a table."""
    rows = list(stored.rows(arguments.database))
    if not rows:
        print("no exchanges")
        return 0
    counts, workers = _counts(arguments.database), _workers(arguments.database)
    lines = []
    for row in rows:
        known = stored.definition(row)
        cells = (
            known.name,
            "running" if row.is_running else "stopped",
            str(workers[row.pk]),
            str(known.source),
            ", ".join(map(str, known.destinations)),
            *(f"{counts[row.pk, outcome]:,}" for outcome in ELEMENT_OUTCOMES),
        )
        lines.append([one_line(cell) for cell in cells])
    head = (*_HEAD, *(outcome.label for outcome in ELEMENT_OUTCOMES))
    print(table(head, lines, right=(2, *range(len(_HEAD), len(head)))))
    return 0


def _counts(using: str) -> Counter[tuple[int, str]]:
    found = ExchangeCount.objects.using(using).values_list("exchange", "outcome")
    return Counter({(row, outcome): count for row, outcome, count in found.annotate(Sum("count"))})


def _workers(using: str) -> Counter[int]:
    """Count the processes that run each exchange: those that gave a sign of life just now."""
    alive = ExchangeCount.objects.using(using).filter(
        outcome=ExchangeCount.Outcome.OK, seen_at__gt=Now() - timedelta(seconds=ALIVE_SECONDS)
    )
    return Counter(dict(alive.values_list("exchange").annotate(Count("worker", distinct=True))))
