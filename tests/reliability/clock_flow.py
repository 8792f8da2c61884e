"""One publisher, and readers of every kind, while the server's clock is put forward and back."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from urllib.parse import quote

from project.postgres import Server
from psqlmessages import AsyncNode, Node
from tests.exchanges.field import Bed
from tests.rest.callers import Caller, at
from tests.sql.conftest import Program, World
from tests.web.sockets import Visitor

Note = Callable[[int], None]

# Much shorter than the clock jumps: what the clock says about them is wrong.
TIMEOUT = timedelta(seconds=30)
# An own delay of some elements.
DELAY = timedelta(seconds=1)
# Queues, by who takes from them.
QUEUES = ("node", "async", "sql", "rest", "exchange")
PAUSE_SECONDS = 0.02
BACKLOG = 50
RULES = (
    "user1 P Topic NEWS W 3600", "user1 P Queue * W 3600", "user2 R.* Topic NEWS R 3600",
    "user2 R.* Queue * R 3600", f"{Server.owner} web.* Topic NEWS R 3600",
    f"{Server.owner} web.* Queue rest R 3600",
)  # fmt: skip


class Flow:
    """What was published and pushed, and what each reader got, by the names of the readers."""

    def __init__(self, world: World, bed: Bed, rest: Caller, visitor: Visitor) -> None:
        self._world = world
        self._bed = bed
        self._rest = rest
        self._visitor = visitor
        self._stopped = threading.Event()
        self._nodes: list[Node | AsyncNode] = []
        self.published = 0
        self.got: dict[str, list[int]] = {}
        self.is_done = threading.Event()
        self.errors: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have them all work, until the end."""
        publisher = self._world.program("user1")
        sql_reader, sql_taker = self._world.program("user2"), self._world.program("user2")
        sql_reader.read("R.SQL", "NEWS", TIMEOUT.seconds)
        with (
            Node("R.NODE", self._world.server.url("user2")) as node,
            Node("R.TAKER", self._world.server.url("user2")) as taker,
        ):
            self._nodes += [node, taker]
            ready = threading.Barrier(3)
            work: dict[str, Callable[[Note], None]] = {
                "stream of Node": lambda note: self._read(node, note, ready),
                "stream of AsyncNode": lambda note: asyncio.run(self._read_async(note, ready)),
                "stream by SQL": lambda note: self._read_by_sql(sql_reader, note),
                "live messages by WebSocket": self._listen,
                "Node.consume": lambda note: self._consume(taker, note),
                "AsyncNode.consume": lambda note: asyncio.run(self._consume_async(note)),
                "reserve by SQL": lambda note: self._reserve(sql_taker, note),
                "REST reserve": self._reserve_by_rest,
            }
            threads = [
                threading.Thread(target=self._work, args=(name, act), name=name)
                for name, act in work.items()
            ]
            for thread in threads:
                thread.start()
            ready.wait(60)
            threads.append(
                threading.Thread(target=self._work_at, args=(lambda: self._publish(publisher),))
            )
            threads[-1].start()
            try:
                yield
            finally:
                self._stopped.set()
                self.is_done.set()
                for each in self._nodes:
                    each.stop()
                self._visitor.close()
                for thread in threads:
                    thread.join(60)
        assert not any(thread.is_alive() for thread in threads)

    def publish_more(self, number: int) -> None:
        """Wait until so many more were published."""
        goal, end = self.published + number, monotonic() + 60
        while self.published < goal:
            assert monotonic() < end, self.errors
            self._stopped.wait(PAUSE_SECONDS)

    def rest(self) -> None:
        """Publish no more."""
        self._stopped.set()

    def missing(self) -> dict[str, int]:
        """How many each reader has not got of all that was published."""
        self.got["exchange"] = [int(body) for body in self._bed.bodies("exchanged")]
        everything = set(range(self.published))
        return {name: len(everything - {*got}) for name, got in self.got.items()}

    def until_nothing_is_missing(self, seconds: float) -> dict[str, float]:
        """Wait until all have all, or nothing came for so long; how many seconds each took."""
        began, waited = monotonic(), dict[str, float]()
        end, before = began + seconds, dict[str, int]()
        while monotonic() < end:
            missing, passed = self.missing(), monotonic() - began
            if missing != before:
                end, before = monotonic() + seconds, missing
            for name in missing.keys() - waited.keys():
                if not missing[name]:
                    waited[name] = passed
            if len(waited) == len(missing):
                break
            self.is_done.wait(PAUSE_SECONDS)
        return waited

    def doubled(self) -> dict[str, int]:
        """How many each reader got more than once."""
        return {
            name: sum(times - 1 for times in Counter(got).values())
            for name, got in self.got.items()
        }

    # The work

    def _work(self, name: str, act: Callable[[Note], None]) -> None:
        self._work_at(lambda: act(self.got.setdefault(name, []).append))

    def _work_at(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the test fails with it
            if not self.is_done.is_set():
                self.errors.append(error)

    def _publish(self, program: Program) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            if self.published - len(self.got.get("REST reserve", ())) > BACKLOG:
                # A request for each element is slower than all the others.
                continue
            number = self.published
            program.ok("publish", "P", "NEWS", str(number))
            delay = DELAY.total_seconds() if number % 10 == 0 else None
            for queue in QUEUES:
                program.ok("push", "P", queue, str(number), None, None, None, delay)
            self.published += 1

    def _read(self, node: Node, note: Note, ready: threading.Barrier) -> None:
        messages = node.subscribe("NEWS", TIMEOUT)
        ready.wait(60)
        for message in messages:
            note(int(message.body))

    async def _read_async(self, note: Note, ready: threading.Barrier) -> None:
        async with AsyncNode("R.ASYNC", self._world.server.url("user2")) as node:
            self._nodes.append(node)
            messages = await node.subscribe("NEWS", TIMEOUT)
            await asyncio.to_thread(ready.wait, 60)
            async for message in messages:
                note(int(message.body))

    def _read_by_sql(self, program: Program, note: Note) -> None:
        while not self.is_done.wait(0.2):
            for body in program.got("R.SQL", "NEWS", TIMEOUT.seconds):
                note(int(body))

    def _listen(self, note: Note) -> None:
        while not self.is_done.is_set():
            note(int(self._visitor.message()["Body"]))

    def _consume(self, node: Node, note: Note) -> None:
        for element in node.consume("node", batch=5, duration=TIMEOUT):
            note(int(element.body))

    async def _consume_async(self, note: Note) -> None:
        async with AsyncNode("R.ATAKER", self._world.server.url("user2")) as node:
            self._nodes.append(node)
            async for element in node.consume("async", batch=5, duration=TIMEOUT):
                note(int(element.body))

    def _reserve(self, program: Program, note: Note) -> None:
        while not self.is_done.wait(0.05):
            rows = program.elements("reserve", "R.SQL", "sql", 10, TIMEOUT.seconds)
            if rows:
                program.ok("commit", "R.SQL", [row.lease for row in rows])
            for row in rows:
                note(int(row.body))

    def _reserve_by_rest(self, note: Note) -> None:
        while not self.is_done.is_set():
            answer = self._rest.take("rest", to=2, reserve=True, duration=TIMEOUT.seconds)
            if answer.status == 504:
                continue
            assert answer.status == 200, answer
            path = at("rest", "commit", quote(answer.lease, safe=""))
            assert self._rest.call("PATCH", path).status == 200
            note(int(answer.data))
