"""A process with many listening sessions, which only counts notifications: for scaling.py."""

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
NODES_PER_CALL = 100
READ_BYTES = 1 << 20


def listen_as_nodes(connection: psycopg.Connection, first: int, count: int) -> None:
    """Register nodes on one session; each listens to the topic."""
    for start in range(first, first + count, NODES_PER_CALL):
        end = min(start + NODES_PER_CALL, first + count) - 1
        connection.execute(LISTEN, [TOPIC, start, end])


def listen_bare(connection: psycopg.Connection, first: int, count: int) -> None:
    """Run LISTEN, without psqlmessages."""
    connection.execute(f"LISTEN {CHANNEL}")


def run_listeners(dsn: str, sessions: int, nodes: int, is_bare: bool, pipe: Connection) -> None:
    """Open the sessions and read; after each request on the pipe, send the number of messages.

    Messages are counted without parsing them, so that reading needs little CPU time.
    """
    listen = listen_bare if is_bare else listen_as_nodes
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for number in range(sessions):
            connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
            listen(connection, number * nodes, nodes)
            selector.register(connection.fileno(), selectors.EVENT_READ)
        selector.register(pipe, selectors.EVENT_READ)
        pipe.send(0)
        received = 0
        while True:
            for key, _ in selector.select():
                if key.fileobj is pipe:
                    pipe.recv()
                    pipe.send(received)
                else:
                    received += os.read(key.fd, READ_BYTES).count(b'"Type":"Topic"')


@contextmanager
def listening(
    dsn: str, sessions: int, nodes: int = 1, *, is_bare: bool = False
) -> Iterator[Connection]:
    """Run the process with this number of sessions and nodes in each; yield its pipe."""
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
