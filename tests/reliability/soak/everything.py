"""Everything at once: a crowd, streams, queues, those who come and go or are killed, and gauges."""

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
from tests.reliability.crowd import LISTENERS, Crowd, crowd
from tests.reliability.soak.gauges import Gauges, changes, of_database, of_process
from tests.reliability.victims import Nursery
from tests.reliability.work import LIVE, Work
from tests.sql.conftest import World
from tests.web.sockets import Visitor

NAMES = ("stream of Node", "stream of AsyncNode", "Node.consume", "AsyncNode.consume", *LIVE)
RULES = (
    "user3 MORTAL.* Topic T RW 60", "user3 STEADY.* Topic T RW 60",
    "user1 GUEST Topic TEMP.* RW 60", "psqlmessages web.* Topic ROOM RW 60",
)  # fmt: skip
# Keys are forgotten soon: their table must not grow.
FORGET_KEYS = "UPDATE psqlmessages_queue SET key_timeout = 20"
CHANGES = (
    """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT 'user3', 'NOBODY', 'Topic', 'NOTHING.' || n, 'RW', 5 FROM generate_series(1, 50) AS n
    """,
    "DELETE FROM messages.auth WHERE ident = 'NOBODY'",
)
SECOND = timedelta(seconds=1)


class Scene:
    """What happens besides the crowd and the work, in threads; `killed` nodes were killed."""

    def __init__(self, tested: TestedServer, people: Crowd, work: Work, nursery: Nursery) -> None:
        self.tested, self.people, self.work, self.nursery = tested, people, work, nursery
        self.killed = self.rounds = 0
        self.over = threading.Event()
        self.failures: list[BaseException] = []
        self.steady = nursery.make(("node", "STEADY.1"), ("async", "STEADY.2"), ("hub", "STEADY.3"))
        self.cookie = ""
        self.threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Let each go on, with a pause between two turns."""
        self.people.site.user("bob", idents=["web.*"])
        self.cookie = self.people.site.login("bob")
        turns = ((self.exercise, 0.5), (self.kill, 2), (self.change_rules, 0.7), (self.visit, 1),
                 (self.pass_by, 1))  # fmt: skip
        for act, pause in turns:
            thread = threading.Thread(target=self._repeat, args=(act, pause), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _repeat(self, act: Callable[[int], None], pause: float) -> None:
        try:
            for number in count(1):
                if self.over.wait(pause):
                    return
                act(number)
        except BaseException as failure:  # noqa: BLE001 - the soak fails by it
            self.failures.append(failure)

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(120)

    def exercise(self, number: int) -> None:
        self.people.exercise(f"word {number}")
        self.rounds = number

    def kill(self, number: int) -> None:
        """Kill nodes of each kind: nobody else has their names."""
        victims = (("node", f"MORTAL.{number}.1"), ("async", f"MORTAL.{number}.2"))
        self.nursery.kill_all(self.nursery.make(*victims))
        self.killed += len(victims)

    def change_rules(self, number: int) -> None:
        with psycopg.connect(self.tested.url(), autocommit=True) as owner:
            owner.execute(CHANGES[(number - 1) % 2])

    def visit(self, number: int) -> None:
        visitor = Visitor(self.people.site, cookie=self.cookie)
        visitor.ok("init", ident="web.bob")
        visitor.ok("topic_listen", topic="ROOM")
        if number % 2:
            visitor.break_off()
        visitor.close()

    def pass_by(self, number: int) -> None:
        """Subscribe to a topic of the moment, and unsubscribe or leave it to time out."""
        topic = f"TEMP.{number}"
        # A busy machine may let it be removed before it was subscribed to, as nobody's.
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

    def told(self) -> dict[str, int]:
        counts = self.people.listeners.counts("crash")
        return {ident: counts[ident] for ident in LISTENERS}

    def read(self, connection: psycopg.Connection) -> Gauges:
        pids = {name: process.pid for name, process in self.people.processes.items()}
        found = of_database(connection)
        for name, pid in {**pids, **self.steady, "site": self.people.site.pid}.items():
            found |= of_process(name, pid)
        return found


def watch(scene: Scene, seconds: float) -> list[tuple[float, Gauges]]:
    """Read the gauges until the time is over, and tell some of them every thirtieth of it."""
    samples: list[tuple[float, Gauges]] = []
    pause, began, told = threading.Event(), monotonic(), 0
    with psycopg.connect(scene.tested.superuser_url, autocommit=True) as connection:
        while (passed := monotonic() - began) < seconds and not scene.failures:
            found = scene.read(connection)
            samples.append((passed, found))
            if passed >= told * seconds / 30:
                told += 1
                tell(passed, found, scene)
            pause.wait(min(10.0, seconds / 40))
    return samples


def tell(passed: float, found: Gauges, scene: Scene) -> None:
    memory = {n.removeprefix("memory of "): v for n, v in found.items() if n.startswith("memory")}
    own = " ".join(f"{n} {v:.0f}" for n, v in memory.items() if "backend" not in n)
    largest = max(v for n, v in memory.items() if "backend" in n)
    tables = sum(v for n, v in found.items() if n.startswith("table"))
    print(
        f"{passed:6.0f} s  MB: {own}, largest backend {largest:.0f}, tables {tables:.0f};"
        f" connections {found['connections']:.0f}, advisory locks {found['advisory locks']:.0f},"
        f" notification queue {found['notification queue']:.2g};"
        f" written {scene.work.written}, rounds {scene.rounds}, killed {scene.killed}",
        flush=True,
    )


def soak(tested: TestedServer, folder: Path, seconds: float) -> int:
    world = World(tested)
    world.rules(*RULES)
    with ExitStack() as stack:
        people = stack.enter_context(crowd(tested, folder))
        nursery = stack.enter_context(Nursery(tested.url("user3")))
        with Work(world, *NAMES) as work:
            work.go_on(20)
            world.owner.connection.execute(FORGET_KEYS)
            scene = Scene(tested, people, work, nursery)
            scene.begin()
            samples = watch(scene, seconds)
            scene.end()
        wrong = faults(scene)
    found = changes(samples, seconds / 6)
    for change in found:
        # Most tables are small, and stay as they are.
        if change.last != change.first or not change.name.startswith("table"):
            print(f"{'GREW' if change.has_grown else 'flat'} {change}")
    counts = work.counts() | {"rounds": scene.rounds, "nodes_killed": scene.killed}
    print("counted:", ", ".join(f"{number} {what}" for what, number in counts.items()))
    wrong = [f"grew: {change}" for change in found if change.has_grown] + wrong
    print("\n".join(["WRONG", *wrong]) if wrong else "flat, and nothing lost or doubled")
    return 1 if wrong else 0


def faults(scene: Scene) -> list[str]:
    found = [repr(failure) for failure in scene.failures]
    found += [f"{n} {what}" for what, n in scene.work.counts().items() if what in WRONG and n]
    found += [f"in the site's log: {line}" for line in scene.people.site.faults()]
    pause = threading.Event()
    for _ in range(300):
        told = scene.told()
        if min(told.values()) >= scene.killed:
            break
        pause.wait(0.1)
    if {*told.values()} != {scene.killed}:
        found.append(f"of {scene.killed} crashes were told: {told}")
    return found


WRONG = ("lost", "duplicated", "refused_but_read")
