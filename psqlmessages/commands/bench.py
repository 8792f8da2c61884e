"""bench: the built-in benchmark, against bare pg_notify on the same connections."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from statistics import median
from typing import Final

from psqlmessages.commands.arguments import positive
from psqlmessages.commands.bench_rounds import Bench, Measured, prepared
from psqlmessages.commands.output import table

NAME = "bench"
HELP = "measure sending and receiving, against bare pg_notify on the same connections"

_KB: Final = 1000
_SIZES: Final = (1, 10, _KB, 10 * _KB, 50 * _KB, 100 * _KB)
_QUICK_SIZES: Final = (10, _KB, 10 * _KB)
_ROUNDS: Final = 5
_SECONDS: Final = 0.4
_QUICK_SECONDS: Final = 0.15


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--quick", action="store_true", help="three sizes and short rounds")
    parser.add_argument(
        "--rounds", type=positive, default=_ROUNDS, help="of each kind (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: Namespace) -> int:
    """Measure and print a table; the two sides take turns, so that both see the same machine."""
    seconds = _QUICK_SECONDS if arguments.quick else _SECONDS
    results = []
    with prepared(arguments.dsn) as bench:
        for size in _QUICK_SIZES if arguments.quick else _SIZES:
            print(f"measuring {_named(size)} …", file=sys.stderr, flush=True)
            results.append(_measure(bench, size, arguments.rounds, seconds))
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "results": results}))
    else:
        print(_report(results, arguments.rounds))
    return 0


def _measure(bench: Bench, size: int, rounds: int, seconds: float) -> dict[str, float]:
    single = bench.measure(size, 1, rounds, seconds, is_counted=True)
    batch = bench.batch_for(size)
    many = bench.measure(size, batch, rounds, seconds, is_counted=True)
    received = bench.measure(size, batch, rounds, seconds, is_counted=False)
    return {
        "size": size,
        "batch": batch,
        **_figures("send", [(ours.sent, bare.sent) for ours, bare in single]),
        **_figures("send_many", [(ours.sent, bare.sent) for ours, bare in many]),
        **_figures("received", [(ours.received, bare.received) for ours, bare in received]),
    }


def _figures(name: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    return {
        name: median(ours for ours, _ in pairs),
        f"{name}_bare": median(bare for _, bare in pairs),
        # Of each pair that was measured side by side, then the median: a slow moment hits both.
        f"{name}_ratio": median(ours / bare for ours, bare in pairs),
    }


def _report(results: list[dict[str, float]], rounds: int) -> str:
    head = ["size", "topic_send/s", "ratio", "topic_send_many/s", "ratio", "received/s", "ratio"]
    rows = [
        [
            _named(int(result["size"])),
            f"{result['send']:,.0f}",
            f"{result['send_ratio']:.2f}",
            f"{result['send_many']:,.0f}",
            f"{result['send_many_ratio']:.2f}",
            f"{result['received']:,.0f}",
            f"{result['received_ratio']:.2f}",
        ]
        for result in results
    ]
    batches = ", ".join(f"{_named(int(r['size']))}: {int(r['batch'])}" for r in results)
    return "\n".join(
        (
            table(head, rows, right=range(1, len(head))),
            "",
            "ratio: to bare pg_notify on the same connections; over 8 KB to an INSERT into an",
            "unlogged table, pg_notify of its key and a SELECT by hand. 1.00 is as fast as that.",
            "Sends up to 8 KB: the receiver counts the notifications, on both sides alike.",
            "received: from the first topic_send_many until a Node has yielded the last body;",
            "by hand the notifications are only counted.",
            f"Medians of {rounds} alternating rounds. Bodies in one call: {batches}.",
        )
    )


def _named(size: int) -> str:
    return f"{size} B" if size < _KB else f"{size // _KB} KB"


__all__ = ["HELP", "NAME", "Measured", "configure", "run"]
