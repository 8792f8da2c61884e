"""Traffic through all that a crowd is: live messages, calls, handlers, a stream, an exchange."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic

import psycopg

from psqlmessages import AsyncNode, MessagesError, Node
from tests.reliability.crowd import ASYNC, SYNC, WEB, Crowd
from tests.reliability.restarts import LONG, until

LIFE = timedelta(hours=1)
LAST = "last"
LONG_ONES, SIZE = "long", 10_000
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        (current_user, 'ASKER', 'Rpc', 'ASKED', 'W', 60),
        (current_user, 'ASKED', 'Topic', 'ANSWERS', 'W', 60),
        (current_user, 'TELLER', 'Topic', 'NEWS', 'W', 60),
        (current_user, 'READER', 'Topic', 'NEWS', 'R', 60),
        (current_user, 'PUSHER', 'Queue', 'orders', 'RW', 60),
        (current_user, 'TAKER', 'Queue', 'shipped', 'RW', 60)
"""
HANDLED = "SELECT name FROM auth_group WHERE name LIKE 'handled %'"
# What callers may see and make again, because nothing was done.
REFUSALS = (MessagesError, psycopg.Error)

Arrivals = list[Counter[str]]


@dataclass
class Flow:
    """Numbered calls of one kind, and what arrived of them at each place where all should."""

    call: Callable[[str], object]
    arrivals: Callable[[], Arrivals]
    done: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def end(self) -> None:
        """Make no more calls."""
        self.over.set()
        if self.thread is not None:
            self.thread.join(LONG)

    @property
    def lost(self) -> int:
        return sum(len(set(self.done) - times.keys()) for times in self.arrivals())

    @property
    def doubled(self) -> int:
        return sum(times.total() - len(times) for times in self.arrivals())

    @property
    def undead(self) -> int:
        """How many arrived though their calls were refused."""
        return sum(len(times.keys() - set(self.done)) for times in self.arrivals())


class Traffic:
    """Each kind flows in a thread of its own; `refused` are the errors that callers saw."""

    def __init__(self, crowd: Crowd) -> None:
        self.refused: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.longest_seconds = 0.0
        # Whether the reader of the stream was told that it missed something.
        self.is_told = False
        self._crowd, url = crowd, crowd.server.url()
        self._is_closed, self._is_read = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._asked, self._asker = Node("ASKED", url), Node("ASKER", url)
        self._teller, self._pusher = Node("TELLER", url), Node("PUSHER", url)
        self._reader, self._taker = Node("READER", url), AsyncNode("TAKER", url)
        self._sync = (self._asked, self._asker, self._teller, self._pusher, self._reader)
        self._answers, self._read, self._taken = Counter[str](), Counter[str](), Counter[str]()
        live = crowd.nodes[0]
        self.flows = {
            "sent": Flow(lambda body: live.topic_send("T", body), lambda: self._heard("sent")),
            "handled": Flow(lambda body: live.topic_send("ORDERS", body), self._handled),
            # Bodies over the NOTIFY limit are kept in tables.
            LONG_ONES: Flow(
                lambda body: live.topic_send("T", body.ljust(SIZE)), lambda: self._heard(LONG_ONES)
            ),
            "asked": Flow(self._ask, lambda: [self._answers]),
            "published": Flow(
                lambda body: self._teller.publish("NEWS", body), lambda: [self._read]
            ),
            "pushed": Flow(lambda body: self._pusher.push("orders", body), lambda: [self._taken]),
        }

    # Life

    def open(self) -> None:
        """Open the nodes, and let all flow."""
        with psycopg.connect(self._crowd.server.url(), autocommit=True) as owner:
            owner.execute(RULES)
        for node in self._sync:
            node.open()
        self._asked.on_rpc(lambda message: message.body)
        self._teller.publish("NEWS", "that there is the topic")
        self._reader.subscribe("NEWS", LIFE)
        for act in (self._asked.run, self._read_news, lambda: asyncio.run(self._take())):
            self._start(act)
        for name, flow in self.flows.items():
            flow.thread = self._start(partial(self._act, name))

    def stop(self, *names: str) -> None:
        """Make no more calls of these kinds, and wait until what was done has arrived."""
        flows = [self.flows[name] for name in names]
        for flow in flows:
            flow.end()
        until(lambda: self.failures or not any(flow.lost for flow in flows), 60)

    def read_to_the_end(self) -> None:
        """Publish no more, and read what there is."""
        self.flows["published"].end()
        self._teller.publish("NEWS", LAST)
        until(lambda: self.failures or self._is_read.is_set())

    def close(self) -> None:
        """End all."""
        self._is_closed.set()
        for node in (*self._sync, self._taker):
            node.stop()
        for thread in self._threads:
            thread.join(LONG)
        for node in self._sync:
            node.close()

    def go_on(self, number: int) -> None:
        """Wait until that many more calls of each kind were done."""
        flows = [flow for flow in self.flows.values() if not flow.over.is_set()]
        wanted = [len(flow.done) + number for flow in flows]
        until(
            lambda: (
                self.failures or all(len(f.done) >= w for f, w in zip(flows, wanted, strict=True))
            )
        )

    # What became of it

    @property
    def calls(self) -> int:
        return sum(len(flow.done) for flow in self.flows.values())

    @property
    def lost(self) -> dict[str, int]:
        return {name: flow.lost for name, flow in self.flows.items()}

    @property
    def doubled(self) -> dict[str, int]:
        return {name: flow.doubled + flow.undead for name, flow in self.flows.items()}

    def _heard(self, kind: str) -> Arrivals:
        heard = map(self._crowd.ears.of, (*SYNC, *ASYNC, *WEB))
        return [Counter({w: n for w, n in of.items() if w.startswith(kind)}) for of in heard]

    def _handled(self) -> Arrivals:
        with psycopg.connect(self._crowd.server.url()) as owner:
            return [Counter(name for (name,) in owner.execute(HANDLED))]

    # Those who act

    def _start(self, act: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                act()
            except BaseException as failure:  # noqa: BLE001 - the test fails by it
                self.failures.append(failure)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return self._threads[-1]

    def _act(self, name: str) -> None:
        flow, number = self.flows[name], 0
        # A breath between two calls, for those who listen.
        while not flow.over.wait(0.005) and not self._is_closed.is_set():
            number += 1
            began, body = monotonic(), f"{name} {number}"
            try:
                flow.call(body)
            except REFUSALS as error:
                self._refuse(error)
            else:
                flow.done.append(body)
            self.longest_seconds = max(self.longest_seconds, monotonic() - began)

    def _ask(self, body: str) -> None:
        self._answers[self._asker.call("ASKED", body)] += 1

    def _read_news(self) -> None:
        while not self._is_closed.is_set():
            try:
                # To subscribe again is to say that one knows.
                self.is_told |= not self._reader.subscription("NEWS").is_recovered
                for message in self._reader.subscribe("NEWS", LIFE):
                    if message.body == LAST:
                        self._is_read.set()
                    else:
                        self._read[message.body] += 1
            except REFUSALS as error:
                self._refuse(error)

    async def _take(self) -> None:
        async with self._taker as node:
            while not self._is_closed.is_set():
                try:
                    elements = await node.pop("shipped", 10, timeout=timedelta.max)
                except REFUSALS as error:
                    self._refuse(error)
                else:
                    self._taken.update(e.body for e in elements if e.body.startswith("pushed"))

    def _refuse(self, error: Exception) -> None:
        if not self._is_closed.is_set():
            self.refused[type(error).__name__] += 1
            # What is away is not asked in haste.
            self._is_closed.wait(0.05)
