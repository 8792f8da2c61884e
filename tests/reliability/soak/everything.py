"""The soak test: a deployment, streams and queues, nodes that end or are killed, and gauges."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic

import psycopg

from psqlmessages import Node
from psqlmessages.exceptions import TopicNotExistent
from tests.conftest import TestedServer
from tests.reliability.deployment import LISTENERS, Deployment, run_deployment
from tests.reliability.node_spawner import NodeSpawner
from tests.reliability.soak.gauges import Gauges, compare_samples, read_database, read_process
from tests.reliability.workload import LIVE, Workload
from tests.sql.conftest import World
from tests.web.sockets import Visitor

NAMES = ("stream of Node", "stream of AsyncNode", "Node.consume", "AsyncNode.consume", *LIVE)
RULES = (
    "user3 MORTAL.* Topic T RW 60", "user3 STEADY.* Topic T RW 60",
    "user1 GUEST Topic TEMP.* RW 60", "psqlmessages web.* Topic ROOM RW 60",
)  # fmt: skip
# Keys expire soon, so that the table of keys does not grow.
FORGET_KEYS = "UPDATE psqlmessages_queue SET key_timeout = 20"
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
        nodes = ("node", "STEADY.1"), ("async", "STEADY.2"), ("hub", "STEADY.3")
        self.steady = spawner.spawn(*nodes)
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
        nodes = (("node", f"MORTAL.{number}.1"), ("async", f"MORTAL.{number}.2"))
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

    def crash_events(self) -> dict[str, int]:
        counts = self.deployment.listeners.counts("crash")
        return {ident: counts[ident] for ident in LISTENERS}

    def read_gauges(self, connection: psycopg.Connection) -> Gauges:
        pids = {name: process.pid for name, process in self.deployment.processes.items()}
        gauges = read_database(connection)
        for name, pid in {**pids, **self.steady, "site": self.deployment.site.pid}.items():
            gauges |= read_process(name, pid)
        return gauges


def collect_samples(actions: Actions, seconds: float) -> list[tuple[float, Gauges]]:
    """Read the gauges until the time is over, and print some of them 30 times."""
    samples: list[tuple[float, Gauges]] = []
    pause, began, printed = threading.Event(), monotonic(), 0
    with psycopg.connect(actions.tested.superuser_url, autocommit=True) as connection:
        while (passed := monotonic() - began) < seconds and not actions.failures:
            gauges = actions.read_gauges(connection)
            samples.append((passed, gauges))
            if passed >= printed * seconds / 30:
                printed += 1
                print_gauges(passed, gauges, actions)
            pause.wait(min(10.0, seconds / 40))
    return samples


def print_gauges(passed: float, gauges: Gauges, actions: Actions) -> None:
    memory = {n.removeprefix("memory of "): v for n, v in gauges.items() if n.startswith("memory")}
    processes = " ".join(f"{n} {v:.0f}" for n, v in memory.items() if "backend" not in n)
    largest = max(v for n, v in memory.items() if "backend" in n)
    tables = sum(v for n, v in gauges.items() if n.startswith("table"))
    print(
        f"{passed:6.0f} s  MB: {processes}, largest backend {largest:.0f}, tables {tables:.0f};"
        f" connections {gauges['connections']:.0f}, advisory locks {gauges['advisory locks']:.0f},"
        f" notification queue {gauges['notification queue']:.2g};"
        f" written {actions.work.written}, rounds {actions.rounds}, killed {actions.killed}",
        flush=True,
    )


def soak(tested: TestedServer, folder: Path, seconds: float) -> int:
    world = World(tested)
    world.rules(*RULES)
    with ExitStack() as stack:
        deployment = stack.enter_context(run_deployment(tested, folder))
        spawner = stack.enter_context(NodeSpawner(tested.url("user3")))
        with Workload(world, *NAMES) as work:
            work.wait_for_writes(20)
            world.owner.connection.execute(FORGET_KEYS)
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
    counts = actions.work.counts()
    errors = [repr(failure) for failure in actions.failures]
    errors += [f"{counts[name]} {name}" for name in MUST_BE_ZERO if counts[name]]
    errors += [f"in the site's log: {line}" for line in actions.deployment.site.faults()]
    pause = threading.Event()
    for _ in range(300):
        events = actions.crash_events()
        if min(events.values()) >= actions.killed:
            break
        pause.wait(0.1)
    if {*events.values()} != {actions.killed}:
        errors.append(f"{actions.killed} nodes were killed, but crash events are: {events}")
    return errors


MUST_BE_ZERO = ("lost", "duplicated", "refused_but_read")
