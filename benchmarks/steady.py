"""Benchmark of streams: steady publishing with expiry: does it stay as fast, and as small?

python -m benchmarks.steady [--seconds 600]

One publishes messages of 1 KB by 20, as fast as it can; one reads all; a third subscribed for ten
seconds and never returns. A PostgreSQL of its own; figures of each part of a tenth.
"""

from __future__ import annotations

import argparse
import json
import threading
from time import perf_counter

import psycopg

from benchmarks.servers import own_server

BATCH, BODY = 20, "x" * 1000
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        (session_user, 'PUB', 'Topic', 'STEADY', 'W', 5),
        (session_user, 'SUB', 'Topic', 'STEADY', 'R', 5),
        (session_user, 'GONE', 'Topic', 'STEADY', 'R', 5)
"""
SIZE = """
    SELECT sum(pg_total_relation_size(inhrelid))::bigint FROM pg_inherits
    WHERE inhparent = 'psqlmessages_streammessage'::regclass
"""


class Reader(threading.Thread):
    """Reads until it is stopped, and counts."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.count = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        """Read what there is; wait a moment where there is nothing."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            while True:
                is_last = self.stopped.is_set()
                query = "SELECT count(*) FROM messages.subscribe('SUB', 'STEADY', 60, 5000)"
                row = connection.execute(query).fetchone()
                number = row[0] if row else 0
                self.count += number
                if is_last and not number:
                    return
                if not number:
                    self.stopped.wait(0.02)


def run(url: str, seconds: float) -> list[dict[str, float]]:
    """Publish for so long; rate and size of each tenth."""
    reader = Reader(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(RULES)
        connection.execute("SELECT messages.subscribe('SUB', 'STEADY', 60)")
        connection.execute("SELECT messages.subscribe('GONE', 'STEADY', 10)")
        reader.start()
        parts, published = [], 0
        for part in range(10):
            begun, number, largest = perf_counter(), 0, 0
            while perf_counter() - begun < seconds / 10:
                connection.execute(
                    "SELECT messages.publish_many('PUB', 'STEADY', %b)", ([BODY] * BATCH,)
                )
                number += BATCH
                if number % (BATCH * 500) == 0:
                    row = connection.execute(SIZE).fetchone()
                    largest = max(largest, row[0] if row else 0)
            rate = number / (perf_counter() - begun)
            published += number
            parts.append({"part": part + 1, "per_second": round(rate), "largest_mb": largest >> 20})
            print(json.dumps(parts[-1]), flush=True)
        reader.stopped.set()
        reader.join()
    print(f"published {published:,}, read {reader.count:,}")
    return parts


def main() -> None:
    """Print the parts, and how the last compares with the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    arguments = parser.parse_args()
    with own_server() as server:
        parts = run(server.url(), arguments.seconds)
    ratio = parts[-1]["per_second"] / parts[0]["per_second"]
    print(f"last by first: rate {ratio:.2f}")


if __name__ == "__main__":
    main()
