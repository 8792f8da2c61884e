"""Writer of refused calls: adds the counts of this process to a table of limited size."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

import psycopg
from django.core.exceptions import ImproperlyConfigured

from psqlmessages.client.refused_calls import OTHERS, NeededRule, refused_calls
from psqlmessages.models.names import NAME_CHARACTERS
from psqlmessages.monitor.names import ident_pattern
from psqlmessages.monitor.queries import connect
from psqlmessages.orm import direct_dsn
from psqlmessages.retry import RateLimitedLogger, error_line

INTERVAL_SECONDS: Final = 5.0
_QUERY_SECONDS: Final = 5
# The table keeps at most this number of rows: the rows that changed last.
MAX_ROWS: Final = 1000
# A write adds at most this number of missing rules: the rules that the most refused calls lacked.
# One more row counts the refused calls that lacked other rules.
_MAX_RULES_PER_WRITE: Final = 100
_RETENTION_DAYS: Final = 7

# Sorted by the key, so that two processes do not deadlock. A count restarts after an idle hour.
_ADD: Final = """
    INSERT INTO psqlmessages_refusedcall AS r (ident, type, dest, mode, count, first_at, last_at)
    SELECT v.ident, v.type, v.dest, v.mode, v.count, statement_timestamp(), statement_timestamp()
    FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::bigint[])
        AS v (ident, type, dest, mode, count)
    ORDER BY 1, 2, 3, 4
    ON CONFLICT (ident, type, dest, mode) DO UPDATE
    SET count = excluded.count
            + CASE WHEN r.last_at > excluded.last_at - interval '1 h' THEN r.count ELSE 0 END,
        first_at = CASE
            WHEN r.last_at > excluded.last_at - interval '1 h' THEN r.first_at
            ELSE excluded.first_at
        END,
        last_at = greatest(r.last_at, excluded.last_at)
"""
_PRUNE: Final = f"""
    DELETE FROM psqlmessages_refusedcall WHERE id IN (
        SELECT r.id FROM psqlmessages_refusedcall AS r
        WHERE r.last_at < statement_timestamp() - interval '{_RETENTION_DAYS} days'
            OR r.id IN (
                SELECT o.id FROM psqlmessages_refusedcall AS o
                ORDER BY o.last_at DESC, o.id OFFSET {MAX_ROWS}
            )
        ORDER BY r.id FOR UPDATE SKIP LOCKED
    )
"""  # noqa: S608 - built from constants

log: Final = RateLimitedLogger(logging.getLogger("psqlmessages"))


async def write_repeatedly() -> None:
    """Write the counts of this process every few seconds until cancelled."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        await write_counts()


async def write_counts() -> None:
    """Write the counts since the last write. If this fails, the next write includes them."""
    if not (counts := refused_calls.take()):
        return
    try:
        if not (limited := _limit_rules(counts)):
            return
        async with await connect(direct_dsn(), "refused calls", _QUERY_SECONDS) as connection:
            columns = [*map(list, zip(*limited, strict=True)), list(limited.values())]
            await connection.execute(_ADD, columns)
            await connection.execute(_PRUNE)
    except (psycopg.Error, OSError, ImproperlyConfigured) as error:
        refused_calls.add(counts)
        log.warning("refused calls cannot be recorded: %s", error_line(error))


def _limit_rules(counts: Counter[NeededRule]) -> Counter[NeededRule]:
    """Return the counts of the most frequent missing rules, and the sum of the others.

    Omit the monitor's own nodes, because its pages show which rules these lack.
    """
    own_prefix = ident_pattern()[:-1]
    result: Counter[NeededRule] = Counter()
    for rule, count in counts.most_common():
        if rule.ident.startswith(own_prefix):
            continue
        names = NeededRule(rule.ident[:NAME_CHARACTERS], rule.type[:5], rule.dest, rule.mode[:2])
        is_full = len(result) >= _MAX_RULES_PER_WRITE
        result[OTHERS if is_full else names] += count
    return result
