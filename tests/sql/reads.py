"""How much a call reads: the sequential scans and the rows of each of our tables."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.sql.conftest import Program

READ = """
    SELECT relname::text, coalesce(seq_scan, 0),
           coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
    FROM pg_stat_xact_user_tables WHERE relname ^@ 'psqlmessages_'
"""
Reads = dict[str, tuple[int, int]]


@contextmanager
def counting(program: Program) -> Iterator[Reads]:
    """Count within the open transaction; what the session did before may be counted with it."""
    before = {name: counts for name, *counts in program.execute(READ)}
    found: Reads = {}
    yield found
    for name, scans, rows in program.execute(READ).fetchall():
        scans_before, rows_before = before.get(name, (0, 0))
        counts = scans - scans_before, rows - rows_before
        found[name.removeprefix("psqlmessages_")] = counts


def large_reads(
    program: Program, tables: tuple[str, ...], most_rows: int, function: str, *arguments: object
) -> Reads:
    """Call a function; return the tables, by prefixes, of which it reads all or many rows."""
    found = reads(program, function, *arguments).items()
    of_tables = {name: counts for name, counts in found if name.startswith(tables)}
    return {name: each for name, each in of_tables.items() if each[0] or each[1] > most_rows}


def reads(program: Program, function: str, *arguments: object) -> Reads:
    """Call a function and roll back; return the scans and rows of each table."""
    with program.connection.transaction(force_rollback=True), counting(program) as found:
        program.ok(function, *arguments)
    return found
