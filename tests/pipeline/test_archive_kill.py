"""The archive's job killed, Java and Python in turn, while messages are published: nothing lost.

By hand: KILLS=9 ROWS=1000000 python -m pytest -s tests/pipeline/test_archive_kill.py
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psycopg
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from psqlmessages.pipeline import archive_verify
from psqlmessages.pipeline.archive import Archive
from tests.conftest import TestedServer
from tests.django.processes import manage, start
from tests.exchanges.test_kill import FAULT
from tests.pipeline.test_traffic_kill import is_alive, java_of, until
from tests.pipeline.traffic_field import QUICK
from tests.reliability.counts import counted
from tests.sql.conftest import World

# Each takes a start of Spark.
KILLS = int(os.environ.get("KILLS", "1"))
ROWS = int(os.environ.get("ROWS", "20000"))
JOB = ("psqlmessages", "pipeline", "archive", "--master", "local[2]", "--conf", QUICK)
PUBLISH = """
    SELECT messages.publish_many('SHOP', %s, ARRAY(
        SELECT format('%%s %%s', %s::text, n) || repeat('x', 170) FROM generate_series(1, %s) AS n
    ))
"""
TOPICS = ("ORDERS", "a/b")
AT_ONCE = 100


class Publishing(Thread):
    """Publishes to both topics, now and then in a transaction that is undone, until it is told."""

    def __init__(self, server: TestedServer) -> None:
        super().__init__()
        self._url = server.url()
        self._is_over = Event()

    def run(self) -> None:
        number = 0
        with psycopg.connect(self._url) as connection:
            while not self._is_over.wait(0.05):
                number += 1
                connection.execute(PUBLISH, (TOPICS[number % 2], number, AT_ONCE))
                connection.rollback() if number % 5 == 0 else connection.commit()

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def plain(root: str) -> list[tuple[Any, ...]]:
    """What a reader sees that knows nothing of archives."""
    if not any(Path(root).glob("data/*/*/*.parquet")):
        return []
    found = pyarrow.parquet.read_table(f"{root}/data", columns=["id", "topic", "body"])
    return sorted(zip(*(found[name].to_pylist() for name in ("id", "topic", "body")), strict=True))


@pytest.mark.slow  # Spark is started for each kill, and once more
@pytest.mark.timeout(1500 + KILLS * 300)
def test_killed_again_and_again_each_message_is_archived_once(
    world: World, server: TestedServer, spark: SparkSession, tmp_path: Path
) -> None:
    root = str(tmp_path / "archive")
    role = world.owner.query("SELECT session_user::text")
    world.rule(role, "pipeline.*", "Topic", "*", "R", 60)
    for topic in TOPICS:
        world.rule(role, "SHOP", "Topic", topic, "W", 60)
        world.rule(role, "KEEP", "Topic", topic, "R", 60)
        world.owner.ok("subscribe", "KEEP", topic, 100_000)
        world.owner.connection.execute(PUBLISH, (topic, "first", ROWS // 2))
    publishing = Publishing(server)
    publishing.start()
    arguments = (*JOB, "--topic", ",".join(TOPICS), "--to", root)
    try:
        for number in range(KILLS):
            kill(start(server, *arguments, "--trigger", "0 seconds"), number, root)
            rows = plain(root)
            assert len(rows) == len({row[0] for row in rows})
    finally:
        publishing.stop()
    done = manage(server, *arguments, "--once", timeout=600)
    assert done.returncode == 0, done.stderr
    kept = world.owner.connection.execute("SELECT id, topic, body FROM messages.stored ORDER BY id")
    archived, published = plain(root), kept.fetchall()
    counted(
        FAULT,
        "the archive's job, Java and Python in turn",
        kills=KILLS,
        messages=len(published),
        lost=len(set(published) - set(archived)),
        doubled=len(archived) - len(set(archived)),
    )
    assert archived == published
    verified = list(archive_verify.verify(Archive.opened(spark, root), None))
    assert [each.is_equal for each in verified] == [True] * len(TOPICS)


def entries(root: str) -> list[Path]:
    return list(Path(root).glob("_log/[0-9]*.json"))


def kill(process: Any, number: int, root: str) -> None:
    """End the job at any moment after it has archived something more, and wait for its Java."""
    before = max(len(entries(root)), 1)
    until(lambda: len(entries(root)) > before, process)
    java = java_of(process.pid)
    Event().wait(random.SystemRandom().uniform(0, 2))
    os.kill(process.pid if number % 2 else java, signal.SIGKILL)
    process.communicate(timeout=600)
    until(lambda: not is_alive(java))
