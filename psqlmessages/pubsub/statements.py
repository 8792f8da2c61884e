"""Statements: every SQL statement of a bus, and how one is carried out on a connection."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

import psycopg
from psycopg import errors, generators, pq
from psycopg.abc import PQGen

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement and its parameters; its answer is the first column as text."""

    sql: str
    params: tuple[str, ...] = ()


# What a bus does on its connection: yields statements, takes their answers, returns a result.
Script = Generator[Statement, list[str], T]

BACKEND: Final = Statement("SELECT pg_backend_pid()")
# To ask how full the queue is frees one that was full, when its slow listener has gone.
LISTENED: Final = Statement(
    "SELECT pg_listening_channels() WHERE pg_notification_queue_usage() >= 0"
)
BEGAN_AT: Final = Statement("SELECT extract(epoch FROM transaction_timestamp())")
# A notification is not durable: waiting for the WAL to be flushed would buy nothing.
COMMIT_AT_ONCE: Final = Statement("SELECT set_config('synchronous_commit', 'off', false)")


def listen(channel: str) -> Statement:
    """Listen to a channel whose name is checked: it holds no double quote."""
    return Statement(f'LISTEN "{channel}"')


def unlisten(channel: str) -> Statement:
    """Undo :func:`listen`."""
    return Statement(f'UNLISTEN "{channel}"')


def notify(channel: str, segments: list[str]) -> Statement:
    """Send all segments of a message, in their order."""
    if len(segments) == 1:
        return Statement("SELECT pg_notify($1, $2)", (channel, segments[0]))
    # No segment of several holds a comma.
    return Statement(
        "SELECT count(pg_notify($1, segment)) FROM unnest(string_to_array($2, ',')) AS segment",
        (channel, ",".join(segments)),
    )


def living(process_ids: Iterable[int]) -> Statement:
    """Ask which of these backends there are."""
    return Statement(
        "SELECT pid FROM pg_stat_activity WHERE pid = ANY ($1::int[])",
        ("{" + ",".join(map(str, process_ids)) + "}",),
    )


def carry_out(pgconn: pq.abc.PGconn, statement: Statement, encoding: str) -> PQGen[list[str]]:
    """Carry out a statement, without the BEGIN that psycopg's cursors put in front.

    So it is a transaction of its own, unless one is open: then it is part of that.
    """
    if pgconn.pipeline_status != pq.PipelineStatus.OFF:
        raise psycopg.NotSupportedError("a bus cannot use a connection in pipeline mode")
    params = [param.encode(encoding) for param in statement.params]
    pgconn.send_query_params(statement.sql.encode(encoding), params)
    result = (yield from generators.execute(pgconn))[-1]
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise errors.error_from_result(result, encoding)
    values = (result.get_value(row, 0) for row in range(result.ntuples))
    return [value.decode(encoding) for value in values if value is not None]
