"""Actors that are killed: nodes, or a reader that books what it reads in its own transaction.

python -m tests.reliability.soak.mortals nodes|reader
"""

import json
import os
import sys
from contextlib import closing

import psycopg

from tests.reliability.soak.acting import VARIABLE, opened

NODES = 3
BOOKS = """
    CREATE TABLE soak_books (came bigint, last bigint, lost bigint, doubled bigint);
    INSERT INTO soak_books VALUES (0, 0, 0, 0);
    GRANT SELECT, UPDATE ON soak_books TO user2
"""
READ = "SELECT payload::json ->> 'number' FROM messages.subscribe('BOOK', 'LEDGER', 600, 100)"
BOOK = """
    UPDATE soak_books SET came = came + %(came)s, last = %(last)s,
        lost = lost + %(lost)s, doubled = doubled + %(doubled)s
"""


def nodes(places: dict[str, str]) -> None:
    """Be some nodes, and say so."""
    alive = [opened(f"MORTAL.{number}", places["user3"]) for number in range(NODES)]
    for node in alive:
        node.topic_listen("TALK")
        node.topic_notify("TALK")
    print("alive", flush=True)
    for _ in alive[0].messages():
        pass


def reader(places: dict[str, str]) -> None:
    """Read and book in one transaction, for ever."""
    with (
        psycopg.connect(places["user2"], autocommit=True) as connection,
        closing(opened("BOOK", places["user2"])) as node,
    ):
        print("alive", flush=True)
        while True:
            with connection.transaction():
                found = connection.execute("SELECT last FROM soak_books FOR UPDATE").fetchone()
                last = found[0]
                numbers = [int(number) for (number,) in connection.execute(READ)]
                entry = {"came": len(numbers), "lost": 0, "doubled": 0}
                for number in numbers:
                    entry["doubled"] += number <= last
                    entry["lost"] += max(0, number - last - 1)
                    last = max(last, number)
                if numbers:
                    connection.execute(BOOK, {**entry, "last": last})
            if not numbers:
                node.wait_published("LEDGER")


if __name__ == "__main__":
    {"nodes": nodes, "reader": reader}[sys.argv[1]](json.loads(os.environ[VARIABLE]))
