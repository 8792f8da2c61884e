"""Spark is killed, PostgreSQL restarts: each row is there once.

For the figures of docs/explanation/reliability.md:
    make reliability ARGS="tests/pipeline/test_faults.py"
"""

import os
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from psqlmessages.exchanges.store import repository
from psqlmessages.pipeline.exchange.definition import dump_exchanges
from tests.conftest import TestedServer
from tests.django.processes import manage, start, talking
from tests.exchanges.field import Bed, Field
from tests.pipeline.drivers import Streams
from tests.pipeline.processes import FAULT, kill, until, until_more
from tests.pipeline.sinks import PUSHED, SENT
from tests.pipeline.traffic_field import JOB, QUICK, SENDERS, TOPICS, TrafficField
from tests.reliability.conftest import own_server, own_world
from tests.reliability.counts import report, size
from tests.reliability.faults import FAST, POSTMASTER, RESTARTS, restarting
from tests.reliability.workload import EXPIRE
from tests.sql.conftest import World
from tests.sql.simultaneous import in_background

__all__ = ["own_server", "own_world"]

IS_FULL = size(0, 1) == 1
KILLS = int(os.environ.get("KILLS", size(1, 9)))
QUERIES = ("topic", "queue", "files", "taken")
BATCHES_BETWEEN = 3
# What each query has written; `files` writes twice.
WRITTEN = {
    "topic": (SENT, "OUT"), "queue": (PUSHED, "DONE"), "each": (SENT, "EACH"),
    "taken": (SENT, "TAKEN"),
}  # fmt: skip
FILL = """
    SELECT messages.publish_many('FILL', 'IN', bodies), messages.push_many('FILL', 'WORK', bodies)
    FROM (SELECT array_agg('message ' || n) FROM generate_series(%s::int, %s) AS n) AS each (bodies)
"""
COUNTED = "SELECT coalesce(sum(count), 0)::int FROM psqlmessages_traffic WHERE window_seconds = 10"
RULES = (
    "FILL Topic IN W", "FILL Queue WORK W", "pipeline* Topic IN R", "pipeline Queue WORK R",
    "pipeline Topic OUT W", "pipeline Topic EACH W", "pipeline Topic TAKEN W",
    "pipeline Queue DONE W",
)  # fmt: skip

pytestmark = pytest.mark.timeout(1500 * (KILLS + 1))
spawn = partial(talking, "-m", "tests.pipeline.drivers")


def by_chance(seconds: float) -> None:
    Event().wait(random.SystemRandom().uniform(0, seconds))


class Driver:
    """A driver with queries, and what they have written."""

    def __init__(self, world: World, folder: Path, rows: int, master: str, *names: str) -> None:
        self._owner, self._folder = world.owner, folder
        self._log = (folder / "log").open("ab")
        environment = {**os.environ, "PSQLMESSAGES_DSN": world.server.url()}
        output = {"env": environment, "stdout": self._log, "stderr": self._log}
        self.process = spawn(folder, master, rows, *names, **output)

    @property
    def batches(self) -> int:
        assert self.process.poll() is None, (self._folder / "log").read_text()[-4000:]
        # Started again for ever, one that fails would be waited for.
        assert self.ended == []
        return sum(1 for _ in self._folder.glob("checkpoint of */commits/[0-9]*"))

    @property
    def ended(self) -> list[str]:
        file = self._folder / "ended"
        return file.read_text().splitlines() if file.exists() else []

    def bodies(self, name: str) -> list[str]:
        if name == "files":
            files = self._folder.glob("files/*/*.parquet")
            return [body for file in files for body in pq.read_table(file)["body"].to_pylist()]
        sql, place = WRITTEN[name]
        return [body for body, _ in self._owner.execute(sql, [place])]

    def has(self, rows: int, names: Iterable[str]) -> Callable[[], bool]:
        """Whether it still runs, and the queries have written so many rows."""
        return lambda: self.batches > 0 and all(len(self.bodies(name)) >= rows for name in names)

    def close(self) -> None:
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self._log.close()


def allow_all(world: World) -> None:
    role = world.owner.query("SELECT session_user::text")
    for rule in RULES:
        world.rule(role, *rule.split(), 60)
    world.owner.execute("UPDATE psqlmessages_topic SET retention = 36000")


def fill(world: World, first: int, last: int) -> None:
    world.execute(FILL, (first, last))


def lost_and_doubled(found: dict[str, list[str]], count: int) -> tuple[int, int]:
    lost = sum(count - len(set(each)) for each in found.values())
    return lost, sum(len(each) - len(set(each)) for each in found.values())


def test_killed_drivers_neither_lose_nor_double_rows(world: World, tmp_path, monkeypatch, request):
    """One of all kills at each push; a task fails too, once for each query."""
    if not IS_FULL:
        request.getfixturevalue("spark")
    rows = int(os.environ.get("ROWS", size(600, 1_000_000)))
    names = ("topic", "queue")[: size(1, 2)]
    share = rows // (KILLS + 1)
    batch = share // size(2, 6)
    rows = share * (KILLS + 1)
    allow_all(world)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for number in range(KILLS):
        # Each has something to do: the Java of a killed Python continues for a moment.
        fill(world, number * share + 1, (number + 1) * share)
        before = sum(1 for _ in tmp_path.glob("checkpoint of */commits/[0-9]*"))
        with closing(Driver(world, tmp_path, batch, "local[2,3]", *names)) as driver:
            # The second query begins after the first batch of the first one.
            until(lambda: driver.batches > before + len(names) - 1)  # noqa: B023
            by_chance(0.2 + rows / 300_000)
            # Java ends without its Python, as Python does without its Java.
            kill(driver.process, python=number % 2 == 0, java=number % 2 == 1)
    fill(world, KILLS * share + 1, rows)
    if IS_FULL:
        with closing(Driver(world, tmp_path, batch, "local[2,3]", *names)) as driver:
            until(driver.has(rows, names))
        # The next driver has removed the files of those that were killed.
        assert list(tmp_path.glob("psqlmessages-*/driver-*")) == []
    else:
        # The session of the other tests continues, which saves another start of Spark.
        query = Streams(tmp_path, "local[2]", str(batch)).start("topic")
        until(lambda: query.exception() or len(driver.bodies("topic")) >= rows)
        query.stop()
        assert query.exception() is None
    found = {name: driver.bodies(name) for name in names}
    lost, doubled = lost_and_doubled(found, rows)
    report(
        FAULT, "the pipeline's sink; driver and Java alternately", kills=KILLS,
        rows=len(names) * rows, lost=lost, duplicated=doubled,
    )  # fmt: skip
    assert (lost, doubled) == (0, 0)
    assert (tmp_path / "topic").exists(), "no task has failed"


@pytest.mark.nightly  # PostgreSQL restarts under Spark
def test_a_restart_of_postgresql_ends_no_query(own_world: World, tmp_path: Path):
    ways = (size(1, 0) and [FAST, POSTMASTER]) or [*RESTARTS] * 5
    rows = size(1_000, 5_000)
    batches = BATCHES_BETWEEN * (len(ways) + 1)
    allow_all(own_world)
    fill(own_world, 1, batches * rows)
    total = batches * len(QUERIES)
    with closing(Driver(own_world, tmp_path, rows, "local[2]", *QUERIES)) as driver:
        with restarting(own_world.server.server, ways, lambda: driver.batches, total):
            until(lambda: driver.batches >= total)
        own_world.owner.connection.close()
        own_world.owner.connection = psycopg.connect(own_world.server.url(), autocommit=True)
        # What was reserved by a call whose answer did not come is read when its lease ends.
        until(driver.has(batches * rows, ["taken"]))
        found = {name: driver.bodies(name) for name in (*QUERIES, "each")}
        ended = driver.ended
    lost, doubled = lost_and_doubled(found, batches * rows)
    how = " and ".join(ways) if len(ways) == 2 else f"{len(ways)} restarts of all kinds in turn"
    report(
        "PostgreSQL restarts", f"four Spark queries, {how}", rows=len(found) * batches * rows,
        queries_ended=len(ended), lost=lost, duplicated=doubled,
    )  # fmt: skip
    assert (ended, lost, doubled) == ([], 0, 0)


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        definitions = dump_exchanges(list(map(repository.compile_exchange, repository.rows())))
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        started.append(spawn("exchange", definitions, env=environment, stdout=subprocess.DEVNULL))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.nightly  # Spark is started for each kill
@pytest.mark.django_db(transaction=True)
def test_killed_exchanges_neither_lose_nor_double_elements(
    wide_field: Field, server: TestedServer, exchange: Callable[[], subprocess.Popen[str]]
):
    field, elements = wide_field, int(os.environ.get("ELEMENTS", size(4000, 40_000)))
    consumer = {"parallel": 2, "wsize": 40}
    within, between = {"src": "a", "dst": ["b", "c"]}, {"src": "e", "dst": ["f", "eu/f"]}
    field.define(within=within | {"consumer": consumer}, between=between | {"consumer": consumer})
    numbers = [str(number) for number in range(elements)]
    pusher, share = Bed(server), elements // (KILLS + 1)

    def push(some: list[str]) -> None:
        for begin in range(0, len(some), 500):
            for queue in "ae":
                pusher.push_many(queue, some[begin : begin + 500])

    for number in range(KILLS):
        process = exchange()
        with in_background(partial(push, numbers[number * share : (number + 1) * share])):
            until_more(process, lambda: len(field.default.bodies("b")))
            by_chance(0.4 + share / 4000)
            kill(process)
    push(numbers[KILLS * share :])
    pusher.close()
    field.default.connection.execute(EXPIRE)
    # Whoever takes over, here a local worker, goes on where the dead had come to.
    field.run_until_idle()
    field.until(lambda: not field.default.bodies("a") and not field.default.bodies("e"))
    filled = (("default", "b"), ("default", "c"), ("default", "f"), ("eu", "f"))
    queues = {f"{ns}/{name}": sorted(field.beds[ns].bodies(name), key=int) for ns, name in filled}
    lost, doubled = lost_and_doubled(queues, elements)
    report(
        FAULT, "exchanges on Spark; driver and Java at the same time, under load", kills=KILLS,
        elements=elements, lost=lost, duplicated=doubled,
    )  # fmt: skip
    assert queues == dict.fromkeys(queues, numbers)


@contextmanager
def publishing(field: TrafficField) -> Iterator[None]:
    """Publish meanwhile: in transactions that last, end out of order, and are undone."""
    is_over = Event()
    chance = random.Random(17)  # noqa: S311 - to be the same each time

    def publish() -> None:
        programs = [field.world.program("user1") for _ in range(4)]
        while not is_over.wait(0.02):
            program = chance.choice(programs)
            if program.connection.info.transaction_status:
                program.execute(chance.choice(["COMMIT", "COMMIT", "ROLLBACK"]))
                continue
            program.execute("BEGIN")
            bodies = ["x" * chance.randrange(500) for _ in range(20)]
            program.ok("publish_many", chance.choice(SENDERS), chance.choice(TOPICS), bodies)
        for program in programs:
            program.execute("ROLLBACK")

    with in_background(publish):
        try:
            yield
        finally:
            is_over.set()


def killed_again_and_again(
    world: World, field: TrafficField, arguments: tuple[str, ...], done: Callable[[], int]
) -> None:
    """Kill a job, Python and Java in turn, each time after it has done more; let it end."""
    with publishing(field):
        for number in range(KILLS):
            process = start(world.server, *arguments, "--trigger", "0 seconds")
            until_more(process, done)
            by_chance(2)
            kill(process, python=number % 2 == 0, java=number % 2 == 1)
    ended = manage(world.server, *arguments, "--once", timeout=600)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.nightly  # Spark is started for each kill, and once more
def test_a_killed_job_of_traffic_counts_as_sql_does(world: World, tmp_path: Path):
    field = TrafficField(world)
    job = (*JOB, "--checkpoint", str(tmp_path))
    killed_again_and_again(world, field, job, lambda: field.owner.query(COUNTED))
    assert field.job("state", "lag_seconds", "error") == ("stopped", 0.0, "")
    written, expected = field.written(), field.expected()
    wrong = sum(written.get(key) != expected.get(key) for key in written.keys() | expected.keys())
    report(
        FAULT, "the job traffic; Java and Python alternately", kills=KILLS, windows=len(expected),
        wrong=wrong,
    )  # fmt: skip
    assert written == expected != {}


@pytest.mark.nightly  # Spark is started for each kill, and once more
def test_a_killed_archive_has_each_message_once(world: World, tmp_path: Path):
    field, root = TrafficField(world), str(tmp_path / "archive")
    role = field.owner.query("SELECT session_user::text")
    for topic in TOPICS:
        world.rule(role, "KEEP", "Topic", topic, "R", 60)
        field.owner.ok("subscribe", "KEEP", topic, 100_000)
    field.publish_everywhere(int(os.environ.get("ROWS", size(20_000, 1_000_000))) // 6)
    job = ("psqlmessages", "pipeline", "archive", "--master", "local[2]", "--conf", QUICK)

    def entries() -> int:
        rows = plain(root)
        assert len(rows) == len({row[0] for row in rows})
        return len(list(Path(root).glob("_log/[0-9]*.json")))

    killed_again_and_again(world, field, (*job, "--topic", ",".join(TOPICS), "--to", root), entries)
    kept = field.owner.execute("SELECT id, topic, body FROM messages.stored ORDER BY id")
    archived, published = plain(root), kept.fetchall()
    report(
        FAULT, "the job archive; Java and Python alternately", kills=KILLS, messages=len(published),
        lost=len(set(published) - set(archived)), duplicated=len(archived) - len(set(archived)),
    )  # fmt: skip
    assert archived == published
    verified = manage(world.server, *job[:3], "verify", "--to", root, timeout=600)
    assert verified.returncode == 0, verified.stderr


def plain(root: str) -> list[tuple[Any, ...]]:
    if not any(Path(root).glob("data/*/*/*.parquet")):
        return []
    found = pq.read_table(f"{root}/data", columns=["id", "topic", "body"])
    return sorted(zip(*(found[name].to_pylist() for name in ("id", "topic", "body")), strict=True))
