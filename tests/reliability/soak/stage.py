"""The stage: an own server, a site, the actors, and who kills those that are to be killed."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import django
import psycopg

from tests.conftest import TestedServer
from tests.reliability.soak import gauges
from tests.reliability.soak.acting import VARIABLE
from tests.reliability.soak.actors import BOOKS, MORTAL_NODES, READ

ROOT = Path(__file__).parents[3]
RULES = """
    ('user1', 'ALPHA', 'Topic', 'TALK', 'RW', 30), ('user1', 'ALPHA', 'Rpc', 'BETA', 'W', 30),
    ('user1', 'ALPHA', 'Topic', 'CHANGING', 'W', 5), ('user2', 'BETA', 'Topic', 'TALK', 'R', 5),
    ('user2', 'ASYNC.*', 'Topic', 'TALK', 'R', 5), ('user2', 'ASYNC.*', 'Rpc', 'BETA', 'W', 30),
    ('user3', 'MORTAL.*', 'Topic', 'TALK', 'RW', 30),
    ('user1', 'PUB', 'Topic', 'LEDGER', 'W', 5), ('user2', 'READER', 'Topic', 'LEDGER', 'R', 5),
    ('user2', 'BOOK', 'Topic', 'LEDGER', 'R', 5),
    ('user1', 'TEMPPUB', 'Topic', 'TEMP.*', 'W', 5), ('user2', 'PASSER', 'Topic', 'TEMP.*', 'R', 5),
    ('user1', 'SHOP', 'Queue', '*', 'RW', 1), ('user2', 'WORKER', 'Queue', '*', 'RW', 1),
    ('user2', 'CLERK', 'Queue', '*', 'RW', 1), ('user2', 'DAWDLER', 'Queue', '*', 'RW', 1),
    ('psqlmessages', 'exchange.sort', 'Queue', '*', 'RW', 1),
    ('psqlmessages', 'rest', 'Queue', 'rest', 'RW', 1),
    ('psqlmessages', 'web.*', 'Topic', 'TALK', 'R', 5),
    ('psqlmessages', 'web.*', 'Topic', 'ROOM', 'RW', 5),
    ('user3', 'XRAY', 'Rpc', 'NOBODY', 'W', 5)
"""
# With DEBUG Django keeps the last 9,000 statements of each connection: that would be no leak.
PRODUCTION = {"DEBUG": "0", "PLAIN_HTTP": "1", "ALLOWED_HOSTS": "127.0.0.1"}
QUEUES = ("jobs", "dead", "orders", "copies.a", "copies.b", "rest")
MAKE_QUEUE = "SELECT * FROM messages.pop('SHOP', %s)"
# Keys are forgotten soon: their table must not grow.
SET_QUEUES = """
    UPDATE psqlmessages_queue SET key_timeout = 20;
    UPDATE psqlmessages_queue SET max_tries = 3, dead_letter_queue = 'dead' WHERE name = 'jobs'
"""
EXCHANGE = """
exchanges:
  sort:
    src: {queue: orders}
    dst:
    - {queue: copies.a}
    - {queue: copies.b, selector: 'msg.hops == 1'}
"""
BOOKED = "SELECT came, last, lost, doubled FROM soak_books"
KILL_SECONDS = {"nodes": 5.0, "reader": 3.0}


class Stage:
    """All processes; `counts` holds what the actors told last, `kills` how often one was killed."""

    def __init__(self, tested: TestedServer, folder: Path) -> None:
        self.tested = tested
        self.folder = folder
        self.places: dict[str, Any] = {}
        self.counts: dict[str, Counter[str]] = {}
        self.kills: Counter[str] = Counter()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.mortals: dict[str, subprocess.Popen[str]] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def prepare(self) -> None:
        """Make queues, books and the exchange."""
        roles = {"owner": "psqlmessages"} | {f"user{n}": f"user{n}" for n in (1, 2, 3)}
        self.places |= {name: self.tested.url(role) for name, role in roles.items()}
        with psycopg.connect(self.places["user1"], autocommit=True) as shop:
            for queue in QUEUES:
                shop.execute(MAKE_QUEUE, [queue])
        with psycopg.connect(self.places["owner"], autocommit=True) as owner:
            owner.execute(SET_QUEUES)
            owner.execute(BOOKS)
        with psycopg.connect(self.places["user2"], autocommit=True) as reader:
            reader.execute(READ)
        definition = self.folder / "exchange.yaml"
        definition.write_text(EXCHANGE)
        self._manage("exchange", "load", str(definition))

    def open_site(self, stack: ExitStack) -> None:
        """Start Daphne, with a user and the user's tokens."""
        os.environ |= {
            "DATABASE_URL": self.tested.url(),
            "DJANGO_SETTINGS_MODULE": "tests.web.site_settings",
            **PRODUCTION,
        }
        django.setup()
        # These need Django's settings.
        from django.db import connection

        from psqlmessages.relay.tokens import token_for
        from tests.rest.callers import bearer
        from tests.web.site import Site

        site = Site(self.tested, self.folder, {})
        site.start()
        stack.callback(site.stop)
        life = timedelta(days=1)
        user = site.user("wanda", idents=["web.*"])
        self.places |= {
            "port": site.port,
            "socket token": token_for(user, life),
            "rest token": bearer(site, "rita", "rest")["Authorization"].split()[1],
        }
        connection.close()
        self.site = site

    def begin(self, actors: Iterable[str]) -> None:
        """Start the mortals, then the actors."""
        self.processes["exchange"] = self._start(
            ["manage.py", "psqlmessages", "exchange", "run"], "exchange"
        )
        for name in KILL_SECONDS:
            self._revive(name)
        for name in actors:
            self._begin_actor(name)
        for _ in range(1200):
            if self.dead() or all(self.counts.values()):
                break
            threading.Event().wait(0.1)
        for name in KILL_SECONDS:
            self._threads.append(threading.Thread(target=self._kill_now_and_then, args=(name,)))
            self._threads[-1].start()

    def end(self) -> None:
        """End the killing, then the actors when nothing is left for them."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        # The last line that the actors tell must know of all crashes.
        for _ in range(300):
            if self.dead() or self.crashes_not_heard() <= 0:
                break
            threading.Event().wait(0.1)
        actors = [process for name, process in self.processes.items() if name in self.counts]
        for process in actors:
            assert process.stdin is not None
            process.stdin.close()
        for process in actors:
            process.wait(120)

    def close(self) -> None:
        """Leave no process behind."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        for process in (*self.processes.values(), *self.mortals.values()):
            process.kill()
            process.wait()

    def booked(self, last: int) -> tuple[int, int, int, int]:
        """Read what the killed reader booked, when it is at this number or has had a minute."""
        with psycopg.connect(self.tested.superuser_url, autocommit=True) as connection:
            for _ in range(600):
                found = connection.execute(BOOKED).fetchone() or (0, 0, 0, 0)
                if found[1] == last:
                    break
                threading.Event().wait(0.1)
        return found

    def crashes_not_heard(self) -> int:
        """Tell how many crashes of nodes that were killed a listener has not been told of."""
        return self.kills["nodes"] * MORTAL_NODES - self.counts["nodes"]["crashes heard"]

    def dead(self) -> list[str]:
        """Name the processes that ended though nobody asked them to, with what they said last."""
        return [
            f"{name} ended: {(self.folder / f'{name}.log').read_text()[-2000:]}"
            for name, process in self.processes.items()
            if process.poll() not in (None, 0)
        ]

    def read(self, connection: psycopg.Connection) -> gauges.Gauges:
        """Read all gauges."""
        found = gauges.of_database(connection) | gauges.of_counts(self.counts)
        pids = {name: process.pid for name, process in self.processes.items()}
        for name, pid in {**pids, "site": self.site.pid}.items():
            found |= gauges.of_process(name, pid)
        return found

    def _begin_actor(self, name: str) -> None:
        process = self._start(["-m", "tests.reliability.soak.actors", name], name)
        self.processes[name] = process
        self.counts[name] = Counter()
        threading.Thread(target=self._hear, args=(name, process), daemon=True).start()

    def _hear(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.counts[name] = Counter(json.loads(line))

    def _kill_now_and_then(self, name: str) -> None:
        while not self._over.wait(KILL_SECONDS[name]):
            process = self.mortals[name]
            process.kill()
            process.wait()
            self.kills[name] += 1
            self._revive(name)

    def _revive(self, name: str) -> None:
        process = self._start(
            ["-m", "tests.reliability.soak.actors", f"mortal {name}"], f"mortal {name}"
        )
        assert process.stdout is not None
        if process.stdout.readline() != "alive\n":
            raise AssertionError((self.folder / f"mortal {name}.log").read_text()[-2000:])
        self.mortals[name] = process

    def _start(self, arguments: list[str], name: str) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=self._environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def _manage(self, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "manage.py", "psqlmessages", *arguments],
            cwd=ROOT, env=self._environment(), check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            VARIABLE: json.dumps(self.places),
            "DATABASE_URL": self.tested.url(),
            "DJANGO_SETTINGS_MODULE": "project.settings",
            **PRODUCTION,
            "PYTHONUNBUFFERED": "1",
        }


@contextmanager
def staged(tested: TestedServer, folder: Path) -> Iterator[Stage]:
    """Set it, and clear it at the end whatever became of it."""
    with ExitStack() as stack:
        stage = Stage(tested, folder)
        stage.prepare()
        stage.open_site(stack)
        stack.callback(stage.close)
        yield stage
