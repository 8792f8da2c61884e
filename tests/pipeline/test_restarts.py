"""PostgreSQL restarts under queries that run: none ends, and each row is there once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow.parquet as pq
import pytest

from tests.django.processes import ROOT
from tests.pipeline.restart_program import QUERIES
from tests.reliability.conftest import own, own_world
from tests.reliability.counts import counted, size
from tests.reliability.restarts import FAST, POSTMASTER, WAYS, restarting, until
from tests.reliability.test_restart_flows import FAULT
from tests.sql.conftest import World

__all__ = ["own", "own_world"]

BATCHES_BETWEEN = 3
SETTLE_SECONDS = 300
FILL = """
    SELECT messages.publish_many('FILL', 'IN', ARRAY(
        SELECT format('message %%s %%s', n, repeat('.', 150)) FROM generate_series(1, %(rows)s) AS n
    )), messages.push_many('FILL', 'WORK', ARRAY(
        SELECT format('element %%s', n) FROM generate_series(1, %(elements)s) AS n
    ))
"""
BODIES = {
    "topic": "SELECT payload FROM psqlmessages_streammessage AS m JOIN psqlmessages_topic AS t"
    " ON t.id = m.topic_id WHERE t.name = 'OUT'",
    "queue": "SELECT body FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q"
    " ON q.id = e.queue_id WHERE q.name = 'DONE'",
    "each": "SELECT payload FROM psqlmessages_streammessage AS m JOIN psqlmessages_topic AS t"
    " ON t.id = m.topic_id WHERE t.name = 'EACH'",
    "taken": "SELECT payload FROM psqlmessages_streammessage AS m JOIN psqlmessages_topic AS t"
    " ON t.id = m.topic_id WHERE t.name = 'TAKEN'",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Driver:
    """The program, with its Java."""

    def __init__(self, url: str, folder: Path, rows: int) -> None:
        self.folder = folder
        self._log = (folder / "log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.restart_program", str(folder), str(rows)],
            env={**os.environ, "PSQLMESSAGES_DSN": url},
            cwd=ROOT, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    @property
    def batches(self) -> int:
        """How many batches the queries have done."""
        assert self._process.poll() is None, (self.folder / "log").read_text()[-4000:]
        return sum(1 for _ in self.folder.glob("checkpoint of */commits/[0-9]*"))

    @property
    def ended(self) -> list[str]:
        """The queries that have ended, and by what."""
        file = self.folder / "ended"
        return file.read_text().splitlines() if file.exists() else []

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def bodies(owner: psycopg.Connection, folder: Path) -> dict[str, list[str]]:
    """What each query has written."""
    found = {name: [body for (body,) in owner.execute(sql)] for name, sql in BODIES.items()}
    files = folder.glob("files/*/*.parquet")
    return found | {"files": [b for f in files for b in pq.read_table(f)["body"].to_pylist()]}


@pytest.fixture
def owner(own_world: World) -> Iterator[str]:
    url = own_world.server.url()
    with psycopg.connect(url, autocommit=True) as connection:
        role = connection.info.user
        for rule in (
            ("FILL", "Topic", "IN", "W"), ("FILL", "Queue", "WORK", "W"),
            ("pipeline*", "Topic", "IN", "R"), ("pipeline", "Queue", "WORK", "R"),
            ("pipeline", "Topic", "OUT", "W"), ("pipeline", "Topic", "EACH", "W"),
            ("pipeline", "Topic", "TAKEN", "W"), ("pipeline", "Queue", "DONE", "W"),
        ):  # fmt: skip
            connection.execute(
                "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
                " VALUES (%s, %s, %s, %s, %s, 60)",
                (role, *rule),
            )
        connection.execute("UPDATE psqlmessages_topic SET retention = 36000")
    return url


def test_a_restart_of_postgresql_ends_no_query(
    own_world: World, owner: str, tmp_path: Path
) -> None:
    restarts = size(2, 20)
    ways = [FAST, POSTMASTER] if restarts == 2 else [*WAYS] * (restarts // len(WAYS))
    rows = size(1_000, 5_000)
    batches = BATCHES_BETWEEN * (len(ways) + 1)
    count = batches * rows
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute(FILL, {"rows": count, "elements": count})
    driver = Driver(owner, tmp_path, rows)
    try:
        total = batches * len(QUERIES)
        with restarting(own_world.server.server, ways, lambda: driver.batches, total):
            until(lambda: driver.batches >= total, SETTLE_SECONDS * len(ways))
        ended = driver.ended
        with psycopg.connect(owner, autocommit=True) as connection:
            # What was reserved by a call whose answer did not come is read when its lease ends.
            until(lambda: len(bodies(connection, tmp_path)["taken"]) >= count, SETTLE_SECONDS)
            found = bodies(connection, tmp_path)
    finally:
        driver.close()
    lost = sum(count - len(set(each)) for each in found.values())
    doubled = sum(len(each) - len(set(each)) for each in found.values())
    counted(
        FAULT,
        f"four queries of Spark, {len(ways)} restarts, all ways in turn"
        if len(ways) > 2
        else f"four queries of Spark, {' and '.join(ways)}",
        rows=len(found) * count,
        queries_ended=len(ended),
        lost=lost,
        doubled=doubled,
    )
    assert (ended, lost, doubled) == ([], 0, 0)
