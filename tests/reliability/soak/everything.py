"""The soak test: a deployment, streams and queues, nodes that end or are killed, and gauges."""

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import psycopg

from psqlmessages import Node
from psqlmessages.exceptions import TopicNotExistent
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.reliability.deployment import LISTENERS, Deployment, run_deployment
from tests.reliability.node_spawner import NodeSpawner
from tests.reliability.workload import BY_CLIENTS, Workload
from tests.sql.conftest import World
from tests.web.sockets import Visitor

BACKENDS = """
    SELECT pid, coalesce(nullif(application_name, ''), backend_type), backend_type
    FROM pg_stat_activity WHERE pid <> pg_backend_pid()
"""
# Tables that are rotated count as one table.
SIZES = """
    SELECT n.nspname || '.' || regexp_replace(c.relname, '_?[0-9]+$', ''),
           sum(pg_total_relation_size(c.oid))
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'm') AND n.nspname IN ('public', 'messages', 'pg_catalog')
    GROUP BY 1
"""
LOCKS = "SELECT count(*), count(*) FILTER (WHERE locktype = 'advisory') FROM pg_locks"
QUEUE_USAGE = "SELECT pg_notification_queue_usage()"

Gauges = dict[str, float]


def read_process(name: str, pid: int) -> Gauges:
    """Read the private memory, descriptors and threads of a process."""
    try:
        return {
            f"memory of {name}": _status(pid, "RssAnon") / 1024,
            f"descriptors of {name}": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            f"threads of {name}": _status(pid, "Threads"),
        }
    except (FileNotFoundError, ProcessLookupError, KeyError):
        # The process has ended.
        return {}


def read_database(connection: psycopg.Connection) -> Gauges:
    """Read connections, locks, sizes of tables, and the largest memory of each kind of backend."""
    gauges: Gauges = {}
    clients, memory = 0, defaultdict[str, float](float)
    for pid, application, kind in connection.execute(BACKENDS).fetchall():
        clients += kind == "client backend"
        name = re.sub(r"[.0-9]+$", "", application)
        try:
            memory[name] = max(memory[name], _status(pid, "RssAnon") / 1024)
        except (FileNotFoundError, ProcessLookupError, KeyError):
            continue
    gauges |= {f"memory of the backend of {name}": most for name, most in memory.items()}
    gauges["connections"] = clients
    gauges["locks"], gauges["advisory locks"] = connection.execute(LOCKS).fetchone()
    (gauges["notification queue"],) = connection.execute(QUEUE_USAGE).fetchone()
    for name, size in connection.execute(SIZES).fetchall():
        gauges[f"table {name}"] = float(size) / (1024 * 1024)
    return gauges


def _status(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0])


# A gauge whose name begins with the text may grow, after the warm-up, by this part of its value and
# by this number. The first text that matches applies.
BOUNDS = (
    ("memory of the backend", 0.1, 4), ("memory", 0.1, 8),
    ("descriptors", 0, 12),  # connections of callers come and go
    ("threads", 0, 6), ("connections", 0, 10),
    ("locks", 0, 250),  # a transaction of many tables, caught in the act, holds about a hundred
    ("advisory locks", 0, 8), ("notification queue", 0, 0.001), ("table", 0.5, 2),
)  # fmt: skip


class Change(NamedTuple):
    """The value of a gauge after the warm-up and at the end, and the maximum at the end."""

    name: str
    first: float
    last: float
    limit: float

    @property
    def has_grown(self) -> bool:
        return self.last > self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.first:.6g} -> {self.last:.6g}"


def compare_samples(samples: Sequence[tuple[float, Gauges]], warm_up: float) -> list[Change]:
    """Compare the first tenth of the time after the warm-up with the last: their maximum values.

    If a gauge is missing in the first tenth, its first value is 0, but the memory of a process
    that started later is its first sample. A gauge that is missing at the end has not grown.
    """
    end = samples[-1][0]
    window = (end - warm_up) / 10
    first = _maximum(samples, warm_up, warm_up + window)
    last = _maximum(samples, end - window, end)
    changes = []
    for name in sorted(last):
        bounds = [(share, more) for begins, share, more in BOUNDS if name.startswith(begins)]
        if bounds:
            initial = next(seen[name] for time, seen in samples if name in seen and time >= warm_up)
            before = first.get(name, initial if name.startswith("memory") else 0)
            share, more = bounds[0]
            changes.append(Change(name, before, last[name], before * (1 + share) + more))
    return changes


def _maximum(samples: Sequence[tuple[float, Gauges]], since: float, until: float) -> Gauges:
    maximum: Gauges = {}
    for time, gauges in samples:
        if since <= time <= until:
            maximum |= {name: max(value, maximum.get(name, 0)) for name, value in gauges.items()}
    return maximum


RULES = (
    "user3 KILLED.* Topic T RW 60", "user3 STABLE.* Topic T RW 60",
    "user1 GUEST Topic TEMP.* RW 60", "psqlmessages web.* Topic ROOM RW 60",
)  # fmt: skip
# Keys and large bodies expire soon, so that their tables do not grow.
EXPIRE_SOON = """
    UPDATE psqlmessages_queue SET key_timeout = 20;
    UPDATE psqlmessages_auth SET timeout = 60 WHERE dest = 'LIVE'
"""
CHANGES = (
    """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT 'user3', 'NOBODY', 'Topic', 'NOTHING.' || n, 'RW', 5 FROM generate_series(1, 50) AS n
    """,
    "DELETE FROM messages.auth WHERE ident = 'NOBODY'",
)
SECOND = timedelta(seconds=1)


class Actions:
    """Actions that threads repeat while the deployment and the workload run."""

    def __init__(
        self, tested: TestedServer, deployment: Deployment, work: Workload, spawner: NodeSpawner
    ) -> None:
        self.tested, self.deployment, self.work = tested, deployment, work
        self.spawner = spawner
        self.killed = self.rounds = 0
        self.must_stop = threading.Event()
        self.failures: list[BaseException] = []
        nodes = ("node", "STABLE.1"), ("async", "STABLE.2"), ("hub", "STABLE.3")
        self.stable = spawner.spawn(*nodes)
        deployment.site.user("bob", idents=["web.*"])
        self.cookie = deployment.site.login("bob")
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start a thread for each action, which pauses for some seconds after each turn."""
        pauses = (
            (self.use_everything, 0.5), (self.kill, 2), (self.change_rules, 0.7),
            (self.open_websocket, 1), (self.subscribe_briefly, 1),
        )  # fmt: skip
        for act, pause in pauses:
            thread = threading.Thread(target=self._repeat, args=(act, pause), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _repeat(self, act: Callable[[int], None], pause: float) -> None:
        try:
            for number in count(1):
                if self.must_stop.wait(pause):
                    return
                act(number)
        except BaseException as failure:  # noqa: BLE001 - it fails the soak test
            self.failures.append(failure)

    def stop(self) -> None:
        self.must_stop.set()
        for thread in self.threads:
            thread.join(120)

    def use_everything(self, number: int) -> None:
        self.deployment.use_everything(f"word {number}")
        self.rounds = number

    def kill(self, number: int) -> None:
        """Kill nodes of each kind, with names that are used only once."""
        nodes = (("node", f"KILLED.{number}.1"), ("async", f"KILLED.{number}.2"))
        self.spawner.kill_all(self.spawner.spawn(*nodes))
        self.killed += len(nodes)

    def change_rules(self, number: int) -> None:
        with psycopg.connect(self.tested.url(), autocommit=True) as owner:
            owner.execute(CHANGES[(number - 1) % 2])

    def open_websocket(self, number: int) -> None:
        visitor = Visitor(self.deployment.site, cookie=self.cookie)
        visitor.ok("init", ident="web.bob")
        visitor.ok("topic_listen", topic="ROOM")
        if number % 2:
            visitor.break_off()
        visitor.close()

    def subscribe_briefly(self, number: int) -> None:
        """Subscribe to a new topic; then unsubscribe, or let the subscription time out."""
        topic = f"TEMP.{number}"
        # On a busy machine, the topic may be removed before it has a subscription.
        with Node("GUEST", self.tested.url("user1")) as node, suppress(TopicNotExistent):
            node.publish(topic, "that there is the topic")
            messages = node.subscribe(topic, timeout=2 * SECOND, max_rows=10, idle=5 * SECOND)
            node.publish_many(topic, list(range(20)))
            for place, message in enumerate(messages):
                assert message.body == place or not node.subscription(topic).is_recovered
                if place == 19:
                    break
            if number % 2:
                node.unsubscribe(topic)

    def read_gauges(self, connection: psycopg.Connection) -> Gauges:
        pids = {name: process.pid for name, process in self.deployment.processes.items()}
        gauges = read_database(connection)
        for name, pid in {**pids, **self.stable, "site": self.deployment.site.pid}.items():
            gauges |= read_process(name, pid)
        return gauges


def collect_samples(actions: Actions, seconds: float) -> list[tuple[float, Gauges]]:
    """Read the gauges until the time is over; print some of them 30 times."""
    samples: list[tuple[float, Gauges]] = []
    pause, began, printed = threading.Event(), monotonic(), 0
    with psycopg.connect(actions.tested.superuser_url, autocommit=True) as connection:
        while (passed := monotonic() - began) < seconds and not actions.failures:
            gauges = actions.read_gauges(connection)
            samples.append((passed, gauges))
            if passed >= printed * seconds / 30:
                printed += 1
                shown = {
                    name: round(value, 1)
                    for name, value in gauges.items()
                    if name.startswith(("memory", "connections", "notification"))
                }
                counts = actions.work.written, actions.rounds, actions.killed
                print(f"{passed:6.0f} s  written, rounds, killed: {counts}; {shown}", flush=True)
            pause.wait(min(10.0, seconds / 40))
    return samples


def soak(tested: TestedServer, folder: Path, seconds: float) -> int:
    world = World(tested)
    world.rules(*RULES)
    with ExitStack() as stack:
        deployment = stack.enter_context(run_deployment(tested, folder))
        spawner = stack.enter_context(NodeSpawner(tested.url("user3")))
        with Workload(world, *BY_CLIENTS) as work:
            work.large_bodies_percent = 1  # so few that another rate is no growth
            work.wait_for_writes(20)
            world.owner.connection.execute(EXPIRE_SOON)
            actions = Actions(tested, deployment, work, spawner)
            actions.start()
            samples = collect_samples(actions, seconds)
            actions.stop()
        errors = find_errors(actions)
    changes = compare_samples(samples, seconds / 6)
    for change in changes:
        # Do not print tables whose size is unchanged.
        if change.last != change.first or not change.name.startswith("table"):
            print(f"{'GREW' if change.has_grown else 'flat'} {change}")
    counts = work.counts() | {"rounds": actions.rounds, "nodes_killed": actions.killed}
    print("counts:", ", ".join(f"{number} {name}" for name, number in counts.items()))
    errors = [f"grew: {change}" for change in changes if change.has_grown] + errors
    print("\n".join(["ERRORS", *errors]) if errors else "nothing grew, was lost or duplicated")
    return 1 if errors else 0


def find_errors(actions: Actions) -> list[str]:
    counts, events = actions.work.counts(), actions.deployment.listeners
    errors = [repr(failure) for failure in actions.failures]
    names = ("lost", "duplicated", "refused_but_read")
    errors += [f"{counts[name]} {name}" for name in names if counts[name]]
    errors += [f"in the site's log: {line}" for line in actions.deployment.site.faults()]
    expected = Counter(dict.fromkeys(LISTENERS, actions.killed))
    with suppress(AssertionError):
        wait_until(lambda: events.counts("crash") >= expected, 30)
    if events.counts("crash") != expected:
        errors.append(f"{actions.killed} nodes were killed; crash events: {events.crashes()}")
    return errors
