"""Listeners: sessions that only read what comes, in a process of their own, for scaling.py."""

from __future__ import annotations

import multiprocessing
import os
import selectors
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import psycopg

TOPIC = "SCALING"
CHANNEL = "scaling"
LISTEN = """
    SELECT count(CASE WHEN messages.init(n.ident) ->> 'Err' = '0'
                      THEN messages.topic_listen(%s) END)
    FROM (
        SELECT 'LISTENER.' || number AS ident
        FROM generate_series(%s::int, %s::int) AS number OFFSET 0
    ) AS n
"""
AT_ONCE = 100
READ_BYTES = 1 << 20


def listen_as_nodes(connection: psycopg.Connection, first: int, count: int) -> None:
    """Register so many nodes on one session, each of which listens to the topic."""
    for start in range(first, first + count, AT_ONCE):
        end = min(start + AT_ONCE, first + count) - 1
        connection.execute(LISTEN, [TOPIC, start, end])


def listen_bare(connection: psycopg.Connection, first: int, count: int) -> None:
    """Do what a session without us does."""
    connection.execute(f"LISTEN {CHANNEL}")


def run_listeners(dsn: str, sessions: int, nodes: int, is_bare: bool, pipe: Connection) -> None:
    """Open the sessions and read for ever; whenever asked, tell how many messages came.

    What comes is not looked at but counted, so that reading takes next to nothing of a processor.
    """
    listen = listen_bare if is_bare else listen_as_nodes
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for number in range(sessions):
            connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
            listen(connection, number * nodes, nodes)
            selector.register(connection.fileno(), selectors.EVENT_READ)
        selector.register(pipe, selectors.EVENT_READ)
        pipe.send(0)
        came = 0
        while True:
            for key, _ in selector.select():
                if key.fileobj is pipe:
                    pipe.recv()
                    pipe.send(came)
                else:
                    came += os.read(key.fd, READ_BYTES).count(b'"Type":"Topic"')


@contextmanager
def listening(
    dsn: str, sessions: int, nodes: int = 1, *, is_bare: bool = False
) -> Iterator[Connection]:
    """Have so many sessions of so many nodes each listen; what is sent is answered by a count."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    arguments = (dsn, sessions, nodes, is_bare, theirs)
    process = context.Process(target=run_listeners, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()
