"""Load: many at once push, take, commit and give back; nothing is lost or doubled."""

import random
import threading
from collections import Counter
from functools import partial

import psycopg
import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import PATIENCE_SECONDS, Program, World
from tests.sql.simultaneous import together

WORKERS, PUSHES = 6, 120


class Worker(threading.Thread):
    """Takes until it is told to stop; what it committed or popped, it has done."""

    def __init__(self, program: Program, seed: int, is_over: threading.Event) -> None:
        super().__init__()
        self.program, self.is_over = program, is_over
        self.dice = random.Random(seed)  # noqa: S311
        self.done: list[str] = []

    def run(self) -> None:
        while not self.is_over.is_set():
            (self._pop if self.dice.random() < 0.3 else self._reserve)()

    def _pop(self) -> None:
        with self.program.connection.transaction() as transaction:
            bodies = [row.body for row in self.program.elements("pop", "GET", "Q", 3)]
            if self.dice.random() < 0.3:
                raise psycopg.Rollback(transaction)
            self.done += bodies

    def _reserve(self) -> None:
        rows = self.program.elements("reserve", "GET", "Q", self.dice.randint(1, 5), 60)
        for row in rows:
            act = self.dice.choice(["commit", "commit", "rollback", "release"])
            given = (None,) if act == "rollback" else ()
            assert self.program.ok(act, "GET", *given, row.lease)["Done"] == [True]
            if act == "commit":
                self.done.append(row.body)


@pytest.mark.timeout(400)
def test_nothing_is_lost_or_doubled_under_load(desk: Desk, world: World) -> None:
    is_over = threading.Event()
    workers = [Worker(world.program("user2"), seed, is_over) for seed in range(WORKERS)]
    for worker in workers:
        worker.start()
    programs = [world.program("user1") for _ in range(4)]
    together(*(partial(push, program, number) for number, program in enumerate(programs)))
    world.wait_for("SELECT count(*) = 0 FROM psqlmessages_element")
    is_over.set()
    for worker in workers:
        worker.join(PATIENCE_SECONDS)
    done = Counter(body for worker in workers for body in worker.done)
    assert done == Counter(f"{n}.{i}" for n in range(4) for i in range(PUSHES))
    counts = desk.counts()
    assert (counts["puts"], counts["gets"] + counts["commits"]) == (4 * PUSHES, 4 * PUSHES)


def push(program: Program, number: int) -> None:
    """Push, some of it in transactions that are rolled back, some with keys twice."""
    for i in range(PUSHES):
        body = f"{number}.{i}"
        with program.connection.transaction(force_rollback=True):
            program.ok("push", "PUT", "Q", f"never {body}")
        for _ in range(2 if i % 3 == 0 else 1):
            key = body if i % 3 == 0 else None
            program.ok("push", "PUT", "Q", body, None, None, None, None, 0, key)
